"""What there is to steal and to break: listeners, secrets, a victim; all made for the trial."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

LIMITS: dict[str, Any] = {
    **{"seconds": 1.5, "cpu_seconds": 2, "memory_mb": 256, "output_bytes": 65536},
    **{"file_mb": 16, "processes": 16, "open_files": 64, "files": 1000},
}


def _answer(listener: socket.socket, secret: bytes) -> None:
    """Give the secret to whoever asks, by stream or by datagram, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            if listener.type == socket.SOCK_DGRAM:
                _, sender = listener.recvfrom(4096)
                with contextlib.suppress(OSError):
                    listener.sendto(secret, sender)
            else:
                caller, _ = listener.accept()
                with caller, contextlib.suppress(OSError):
                    caller.sendall(secret)


def _file_handle(path: Path) -> str:
    """The number by which the kernel knows a file, whatever its name."""
    room = ctypes.create_string_buffer((128).to_bytes(4, sys.byteorder), 136)
    libc = ctypes.CDLL(None, use_errno=True)
    mount = ctypes.c_int()
    if libc.name_to_handle_at(-100, bytes(path), room, ctypes.byref(mount), 0):
        return bytes(136).hex()
    return room.raw.hex()


class Arena:
    """Everything the probes attack, as `values` that their programs may know."""

    def __init__(self) -> None:
        self.secret = "COA-SECRET-" + secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="coa-arena-"))
        self.values: dict[str, Any] = dict(LIMITS)
        self.values["too_much_mb"] = LIMITS["memory_mb"] * 5 // 4
        self._listeners: list[socket.socket] = []

    def __enter__(self) -> Arena:
        os.environ["COA_PROBE_API_KEY"] = self.secret
        os.environ["HOME"] = self._write("home/.netrc").parent.as_posix()
        self._shared = Path("/dev/shm") / f"coa-{secrets.token_hex(8)}"
        if self._shared.parent.is_dir():
            self._shared.write_text(self.secret)
        self.values |= {
            "secret": str(self._write("secret.txt")),
            "gold": str(self._write("tasks/gold.jsonl")),
            "stdin": str(self._write("stdin.txt")),
            "home": os.environ["HOME"],
            "shm": str(self._shared),
            "folder": str(self.folder),
            "checkout": __file__,
            "device": self.folder.stat().st_dev,
            "handle": _file_handle(self.folder / "secret.txt"),
            "passwd": hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest(),
        }
        self._listen()
        self._start_victim()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._victim.kill()
        self._victim.wait()
        for listener in self._listeners:
            listener.close()
        self._shared.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def values_for(self, side: str) -> dict[str, Any]:
        """What one side of one trial knows; names that it may leave behind are its own."""
        token = "coa" + secrets.token_hex(5)  # a process name holds 15 letters
        spare = self.folder / f"{token}.spare"
        spare.write_text("do not touch")
        return {
            **self.values,
            "side": side,
            "token": token,
            "key": int(token[3:10], 16),
            "spare": str(spare),
            "outside": str(self.folder / f"{token}.outside"),
        }

    def _write(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{self.secret}\n")
        return path

    def _listen(self) -> None:
        abstract = f"coa-{secrets.token_hex(8)}"
        wanted: dict[str, tuple[int, int, Any]] = {
            "tcp4": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "tcp6": (socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "socket")),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract}"),
            "abstract datagram": (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{abstract}d"),
        }
        for name, (family, kind, address) in wanted.items():
            self.values[name] = 1
            with contextlib.suppress(OSError):  # no IPv6: the control will say so
                listener = socket.socket(family, kind)
                self._listeners.append(listener)
                listener.bind(address)
                if kind == socket.SOCK_STREAM:
                    listener.listen()
                bound = listener.getsockname()
                self.values[name] = bound[1] if isinstance(bound, tuple) else bound
                arguments = (listener, self.secret.encode())
                threading.Thread(target=_answer, args=arguments, daemon=True).start()
        self.values["abstract"] = abstract

    def _start_victim(self) -> None:
        """A process of the same user, with the secret in its arguments and its environment."""
        ends = "import ctypes, sys, time; ctypes.CDLL(None).prctl(1, 9)"  # with this process
        code = f"{ends}; print('ready', flush=True); time.sleep(900)"
        command = [sys.executable, "-c", code, self.secret]
        self._victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._victim.stdout is not None
        assert self._victim.stdout.readline() == "ready\n"
        stack = [0, 0]
        for line in Path(f"/proc/{self._victim.pid}/maps").read_text().splitlines():
            if line.endswith("[stack]"):
                stack = [int(end, 16) for end in line.split()[0].split("-")]
        self.values |= {"victim": self._victim.pid, "stack": stack}
