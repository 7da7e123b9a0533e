"""PageReader: pages of strangers, read in processes of their own.

A page may be made so that finding its text takes for ever or all memory. It then costs the process
that reads it, and nobody else waits for that: not the threads that tools share, not the event loop,
not the end of the program. Processes are kept for the next page, and few read at once.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import os
import queue
import subprocess
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache

from coa.corpus import worker
from coa.errors import CoaError, ToolError, ToolMistake, ToolTimeout
from coa.machine import cores
from coa.runs import Json
from coa.tools.extract import Link, WebPage, read_page

READ_S = 15.0
"""Seconds for finding the text in a page that has arrived."""
WORKER = worker.command_of("coa.tools.reader")
_FAULTS = {"mistake": ToolMistake, "failure": ToolError}


class PageReader:
    """Reads pages, at most `at_once` at a time; others wait for their turn."""

    def __init__(
        self, at_once: int = 0, seconds: float = READ_S, command: Sequence[str] = WORKER
    ) -> None:
        self._at_once, self._seconds, self._command = at_once or max(2, cores()), seconds, command
        self._waiting: queue.SimpleQueue[tuple[Json, Future[WebPage]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._asked = 0

    async def read(self, url: str, media_type: str, charset: str, body: bytes) -> WebPage:
        """As `read_page`, and a `ToolTimeout` for a page that takes too long."""
        question = {"url": url, "media_type": media_type, "charset": charset}
        question |= {"body": base64.b64encode(body).decode("ascii")}
        found: Future[WebPage] = Future()
        self._waiting.put((question | {"seconds": self._seconds}, found))
        with self._lock:
            self._asked += 1
            if self._asked > self._threads < self._at_once:
                self._threads += 1
                # A daemon: it must not keep the program from ending.
                threading.Thread(target=self._serve, name="page reader", daemon=True).start()
        return await asyncio.wrap_future(found)

    def _serve(self) -> None:
        """A thread that hands pages to a process, and starts another when that dies."""
        process: subprocess.Popen[str] | None = None
        while True:
            question, found = self._waiting.get()
            try:
                if found.set_running_or_notify_cancel():
                    if process is None or process.poll() is not None:
                        process = worker.start(self._command)
                    started = time.monotonic()
                    answer = worker.ask(process, question)
                    if answer is None:
                        worker.end(process)
                        process = None
                        raise self._death(time.monotonic() - started)
                    found.set_result(_page_of(answer))
            except Exception as error:  # shown by whoever waits for it
                found.set_exception(error)
            finally:
                with self._lock:
                    self._asked -= 1

    def _death(self, seconds: float) -> CoaError:
        if seconds >= self._seconds:
            return ToolTimeout(f"the page could not be read within {self._seconds:g} s.")
        return ToolError("the page ended the process that read it, for want of memory perhaps.")


async def read_apart(url: str, media_type: str, charset: str, body: bytes) -> WebPage:
    """`PageReader.read` with the processes that this program shares."""
    return await _shared(os.getpid()).read(url, media_type, charset, body)


@cache
def _shared(pid: int) -> PageReader:
    """By process: after a fork the threads are gone, and the processes are the parent's."""
    return PageReader()


def _page_of(answer: Json) -> WebPage:
    for warning in answer["warnings"]:
        warnings.warn(warning, stacklevel=2)
    if answer["fault"]:
        raise _FAULTS[answer["fault"]](answer["said"])
    page = answer["page"]
    return WebPage(**page | {"links": tuple(Link(**link) for link in page["links"])})


def work() -> None:
    """The life of a worker process."""
    worker.serve(_answer)


def _answer(asked: Json) -> Json:
    # It ends the process, even one that holds the interpreter; that is how the time is kept.
    faulthandler.dump_traceback_later(asked["seconds"], exit=True)
    said, fault, page = "", "", None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # ours: a package that is missing
        try:
            body = base64.b64decode(asked["body"])
            page = asdict(read_page(asked["url"], asked["media_type"], asked["charset"], body))
        except ToolMistake as error:
            fault, said = "mistake", str(error)
        except CoaError as error:
            fault, said = "failure", str(error)
        except Exception as error:  # memory that ran out, say
            fault, said = "failure", f"the page cannot be read ({type(error).__name__})."
        finally:
            faulthandler.cancel_dump_traceback_later()
    shown = [str(each.message) for each in caught if each.category is UserWarning]
    return {"page": page, "fault": fault, "said": said, "warnings": shown}
