"""What passes between a crew and its workers: messages over two pipes, and errors within them.

Threads read and write, so neither side ever waits for the other to make room: however large the
messages are and however busy the other side is, the event loops go on.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import traceback
from collections.abc import Callable
from typing import IO

from coa.config import load_object
from coa.errors import CoaError
from coa.runs import Json

Heard = Callable[[Json | None], None]
_PLAIN = (str, int, float, type(None))


class CrewError(CoaError, RuntimeError):
    """Work that failed in a way nobody planned for, or that ended the process it was done in."""


class Channel:
    """Sends messages, and calls `heard` with each that comes, in a thread; with None at the end."""

    def __init__(self, inbox: IO[bytes], outbox: IO[bytes], heard: Heard) -> None:
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, args=(outbox,), daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, args=(inbox, heard), daemon=True).start()

    def send(self, message: bytes) -> None:
        self._unsent.put(message)

    def finish(self, wait_s: float = 0.0) -> None:
        """Close our end when all is written; wait for that so long."""
        self._unsent.put(None)
        self._writer.join(wait_s)

    def _write(self, outbox: IO[bytes]) -> None:
        with contextlib.suppress(OSError), outbox:  # nobody reads any more
            while (message := self._unsent.get()) is not None:
                outbox.write(struct.pack(">Q", len(message)))
                outbox.write(message)
                outbox.flush()

    def _read(self, inbox: IO[bytes], heard: Heard) -> None:
        with inbox:
            while len(head := inbox.read(8)) == 8:
                (size,) = struct.unpack(">Q", head)
                body = inbox.read(size)
                if len(body) < size:  # the writer was killed
                    break
                heard(decoded(body))
        heard(None)


def encoded(message: Json) -> bytes:
    # ASCII, so that halves of characters pass, too; strangers' texts hold such things.
    return json.dumps(message).encode("ascii")


def decoded(message: bytes) -> Json:
    record: Json = json.loads(message)
    return record


def fault_of(error: BaseException) -> Json:
    """An exception as JSON: one of ours can be made again from it, another can be told."""
    ours = [each for each in type(error).__mro__ if issubclass(each, CoaError)]
    said = str(error)
    if not ours:
        said = f"{type(error).__name__}: {shortened(said, 300)}".removesuffix(": ")
    return {
        "classes": [f"{each.__module__}:{each.__qualname__}" for each in ours],
        "arguments": [each for each in error.__reduce__()[1] if isinstance(each, _PLAIN)],
        "fields": {key: value for key, value in vars(error).items() if isinstance(value, _PLAIN)},
        "said": said,
        "traceback": "".join(traceback.format_exception(error)),
    }


def error_of(fault: Json, what: str) -> CoaError:
    """The error that was raised elsewhere, of the same class; its traceback there is a note."""
    error = _again(fault) or CrewError(f"{what} failed: {fault['said']}")
    error.add_note(fault["traceback"])
    return error


def _again(fault: Json) -> CoaError | None:
    """One of our errors, made as pickle makes it; of its base where it cannot be made here."""
    for reference in fault["classes"]:
        with contextlib.suppress(Exception):
            error: CoaError = load_object(reference)(*fault["arguments"])
            if str(error) == fault["said"]:
                vars(error).update(fault["fields"])
                return error
    return CoaError(fault["said"]) if fault["classes"] else None


def shortened(text: str, most: int = 80) -> str:
    """The text in one line, cut where it is longer than that."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
