"""Escaping through a session, whose state is meant to last, but only for itself."""

from __future__ import annotations

from dataclasses import replace

from .lasting import FIND, POISON, TASTE, WRITE, remember, search
from .probe import ANSWER, Probe, Step, marked, outlives, probe, unanswered

_AWAKE = """
import mmap
common = open(A["token"], "w+b")
common.truncate(4096)
common = mmap.mmap(common.fileno(), 4096)
clock = ctypes.c_double.from_buffer(common)  # the longest sleep of the others
crowd = (ctypes.c_int * 8).from_buffer(common, 8)
for place in range(8):
    if not os.fork():
        crowd[place] = os.getpid()
        last = end = time.monotonic()
        while time.monotonic() < end + 2:
            for other in crowd:
                try:
                    other and other != os.getpid() and os.kill(other, signal.SIGCONT)
                except OSError:
                    pass
            now = time.monotonic()
            clock.value, last = max(clock.value, now - last), now
        os._exit(0)
time.sleep(0.2)
"""


def shared(name: str, about: str, *steps: Step) -> Probe:
    return probe(name, "sessions", about, steps=steps, control="interpreter")


SESSIONS: tuple[Probe, ...] = (
    shared(
        "session-to-session",
        "see another session's variables",
        Step("kept = 1", "a"),
        Step("'kept' in globals() and won()", "b"),
    ),
    shared(
        "session-to-fresh",
        "see a session's variables from a fresh run",
        Step("import builtins\nbuiltins.kept = 1", "a"),
        Step("import builtins\nhasattr(builtins, 'kept') and won()"),
    ),
    shared("session-files", "see another session's files", Step(WRITE, "a"), Step(FIND, "b")),
    shared(
        "session-files-to-fresh",
        "see a session's files from a fresh run",
        Step(WRITE, "a"),
        Step(FIND),
    ),
    shared(
        "session-poison",
        "change modules for another session",
        Step(POISON, "a"),
        Step(TASTE, "b"),
    ),
    shared(
        "session-memory",
        "find another session's values in memory",
        Step(remember("SESSION"), "a"),
        Step(search("SESSION"), "b"),
    ),
    shared(
        "session-lock",
        "tell another session something by locking a file that both can see",
        Step("import fcntl\nheld = open(os.__file__)\nfcntl.flock(held, fcntl.LOCK_EX)", "a"),
        Step(
            """
import fcntl
try:
    fcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    won()
""",
            "b",
        ),
    ),
    shared(
        "session-thaw",
        "go on computing between two calls, by processes that wake each other",
        Step(_AWAKE, "a"),
        Step("print(clock.value)\nclock.value < 0.4 and won()", "a", pause=0.8),
    ),
    probe(
        "session-flood",
        "sessions",
        "write too much, so that the session's next program is punished for it",
        steps=(
            Step("print('x' * 10**6)", "a"),
            replace(ANSWER, session="a"),
        ),
        judge=unanswered,
        control="none",
    ),
    probe(
        "session-peer",
        "sessions",
        "signal the host through the socket that its requests come by",
        steps=(
            Step(
                """
for number in range(3, 64):
    try:
        channel = socket.socket(fileno=os.dup(number))
        peer = channel.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD
        call("pidfd_send_signal", peer, 0, None, 0)
        won()
    except OSError as error:
        error.errno == errno.EBADF or print(number, error)
""",
                "a",
            ),
        ),
        judge=marked,
        needs="a kernel of 6.5 or newer",
    ),
    probe(
        "session-daemon",
        "sessions",
        "leave a process that outlives its session",
        steps=(
            Step(
                """
mark()
if not os.fork():
    os.setsid()
    os.closerange(0, 64)
    time.sleep(20)
    os._exit(0)
""",
                "a",
            ),
            Step("", "b"),
        ),
        judge=outlives,
    ),
)
