"""Attacks on what starts the runs: the next run must still be answered, and rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .probe import ANSWER, MARKER, Probe, Seen, Step, probe, unanswered


def taken(name: str, about: str, program: str, **more: object) -> Probe:
    more = {"judge": unanswered, "control": "interpreter", **more}
    return probe(name, "protocol", about, steps=(Step(program), ANSWER), **more)


def forged(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    """Won when something was written to a channel that is not the program's own, or broke it."""
    return MARKER in seen[0].stdout or unanswered(seen, arena)


_FRAME = r"""
frames = [b'{"ok": true, "exit": 0, "stdout": "42", "ended": "exit"}\n', b"\0" * 64, b"\xff" * 64,
          struct.pack("<I", 2) + b"{}", struct.pack(">I", 2) + b"{}"]
"""

_TAKEN: tuple[Probe, ...] = (
    taken(
        "late-flood",
        "write too much and end at once, so that its punishment comes to the next",
        "os.write(1, b'x' * (A['output_bytes'] + 100))",
        control="none",
    ),
    taken("exit", "end the interpreter at once", "os._exit(3)"),
    taken("crash", "crash the interpreter", "ctypes.string_at(0)"),
    taken("kill-self", "be killed", "os.kill(os.getpid(), 9)"),
    taken("close-everything", "close every descriptor", "os.closerange(0, 256)"),
    taken(
        "replace-everything",
        "put something else in the place of every descriptor",
        """
near, far = os.pipe()
for number in range(256):
    try:
        number in (near, far) or os.dup2(far, number)
    except OSError:
        break
""",
    ),
    taken("no-output", "take away the standard output", "sys.stdout.close()\nsys.stdout = None"),
    taken(
        "exit-code",
        "leave by an exception at exit",
        """
import atexit
atexit.register(lambda: os._exit(9))
sys.exit(7)
""",
    ),
    taken(
        "forge-frames",
        "write answers of its own to every descriptor it inherited",
        _FRAME
        + """
found = []
for number in range(3, 256):
    for frame in frames:
        try:
            os.write(number, frame)
            found.append(number)
        except OSError:
            pass
found and won()
""",
        judge=forged,
        control="processes",
    ),
    taken(
        "forge-sockets",
        "send answers of its own with a descriptor attached, on every descriptor",
        _FRAME
        + """
found = []
for number in range(256):
    try:
        channel = socket.socket(fileno=os.dup(number))
        channel.setblocking(False)
        channel.sendmsg(frames[:1], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])
        found.append(number)
    except OSError:
        pass
found and won()
""",
        judge=forged,
        control="processes",
    ),
    taken(
        "steal-requests",
        "read the next request from every descriptor it inherited",
        """
ready = []
for number in range(3, 256):
    try:
        os.set_blocking(number, False)
        ready.append(number)
    except OSError:
        pass
ready and won()
""",
        judge=forged,
        control="processes",
    ),
)


def harm(name: str, about: str, program: str) -> Probe:
    return probe(
        name,
        "harm",
        about,
        steps=(Step(program), ANSWER),
        judge=unanswered,
        control="none",
    )


_OTHERS = "others = [pid for pid in range(1, 300) if pid != os.getpid()]\n"
_EACH = """
for pid in others:
    try:
        attack(pid)
    except OSError:
        pass
"""

_HARM: tuple[Probe, ...] = (
    harm("kill-all", "kill every process there is", "os.kill(-1, 9)"),
    harm("stop-all", "stop every process there is", "os.kill(-1, signal.SIGSTOP)"),
    harm(
        "kill-each",
        "kill every process by its number",
        _OTHERS + "attack = lambda pid: os.kill(pid, 9)" + _EACH,
    ),
    harm(
        "stop-each",
        "stop every process by its number",
        _OTHERS + "attack = lambda pid: os.kill(pid, signal.SIGSTOP)" + _EACH,
    ),
    harm(
        "kill-each-by-owner",
        "have the kernel kill every process when a file is ready",
        """
import fcntl
near, far = socket.socketpair()
"""
        + _OTHERS
        + """
def attack(pid):
    fcntl.fcntl(near, fcntl.F_SETOWN, pid)
    fcntl.fcntl(near, 10, 9)  # F_SETSIG
    fcntl.fcntl(near, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    far.send(b"x")
    near.recv(1)
"""
        + _EACH,
    ),
    harm(
        "starve-each",
        "take files, memory and time from every process",
        "import resource\n"
        + _OTHERS
        + """
def attack(pid):
    for name in ("NOFILE", "AS", "CPU", "NPROC", "FSIZE"):
        resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (1, 1))
"""
        + _EACH,
    ),
    harm("fork-for-ever", "fork without end", "while True: os.fork()"),
    harm(
        "fork-for-ever-quietly",
        "fork without end, whatever fails",
        """
os.closerange(0, 64)
while True:
    try:
        os.fork() or os.setsid()
    except OSError:
        pass
""",
    ),
    harm("memory-for-ever", "take memory without end", "kept = [b'x' * i for i in range(1 << 40)]"),
    harm(
        "disk-for-ever",
        "fill every file system that can be written to",
        """
for folder in (".", "/tmp", "/var/tmp", "/dev/shm", "/run", "/"):
    try:
        for number in range(1 << 30):
            open(f"{folder}/{number}", "wb").write(bytes(1 << 20))
    except OSError:
        pass
""",
    ),
    harm(
        "threads-for-ever",
        "start threads without end and crash among them",
        """
import threading
threading.stack_size(1 << 18)
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    os.abort()
""",
    ),
)

TAKEOVER = (*_TAKEN, *_HARM)
