"""Taking more than the given share of memory, processes, files, output and time.

Sizes are a little above the limits that `arena.LIMITS` sets, so that a plain run is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .probe import Probe, Seen, endless, outlives, probe


def on(name: str, about: str, program: str, **more: object) -> Probe:
    return probe(name, "bombs", about, program, **more)


def forever(name: str, about: str, program: str) -> Probe:
    return on(name, about, "mark()\n" + program, judge=endless, alive=True)


def flooded(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    """Won when more text came back than was asked for; room for the note that it was cut."""
    return len(seen[-1].text) > 2 * arena["output_bytes"] + 1000


_HOLD = """
def hold(megabytes):
    \"\"\"Memory that is really there: every page is written to.\"\"\"
    block = bytearray(megabytes << 20)
    block[::4096] = b"x" * len(block[::4096])
    return block
"""

_KEEP = """
def keep(source):
    \"\"\"Shared blocks, each unmapped but for its first page: the kernel keeps the block.\"\"\"
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for _ in range(A["too_much_mb"] // 32):
        place = libc.mmap(None, 32 << 20, 3, 0x21 if source < 0 else 0x01, source, 0)
        if place in (None, 2**64 - 1):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        ctypes.memset(place, 1, 32 << 20)
        libc.munmap(place + 4096, (32 << 20) - 4096)
    won()
"""

_MEMORY: tuple[Probe, ...] = (
    on("memory", "take too much memory in one block", _HOLD + 'hold(A["too_much_mb"])\nwon()'),
    on(
        "memory-in-pieces",
        "take too much memory in small pieces",
        """
kept = [os.urandom(1) * 65536 for _ in range(A["too_much_mb"] * 16)]
won()
""",
    ),
    on(
        "memory-map",
        "take too much memory in shared mappings",
        """
import mmap
kept = []
for _ in range(A["too_much_mb"] // 32):
    kept.append(mmap.mmap(-1, 32 << 20))
    for place in range(0, 32 << 20, 4096):
        kept[-1][place] = 1
won()
""",
    ),
    on("memory-kept", "take too much memory in objects that no mapping shows", _KEEP + "keep(-1)"),
    on(
        "memory-kept-zero",
        "the same through the device of zeros",
        _KEEP + 'keep(os.open("/dev/zero", os.O_RDWR))',
    ),
    on(
        "memory-kept-unread",
        "the same, by asking to forget the pages, which shared memory does not",
        """
import mmap
kept = []
for _ in range(A["too_much_mb"] // 32):
    kept.append(mmap.mmap(-1, 32 << 20))
    kept[-1].write(b"x" * (32 << 20))
    kept[-1].madvise(mmap.MADV_DONTNEED)
all(block[-1:] == b"x" for block in kept) and won()
""",
    ),
    on(
        "memory-file",
        "take too much memory in files that have no name",
        """
block = os.urandom(1 << 20)
for _ in range(A["too_much_mb"] // 8):
    number = call("memfd_create", b"x", 0)
    for _ in range(8):
        os.write(number, block)
won()
""",
    ),
    on(
        "memory-segments",
        "take too much memory in System V segments, which outlive their maker",
        """
kept = []
try:
    for _ in range(A["too_much_mb"] // 32):
        kept.append(call("shmget", 0, 32 << 20, 0o1600))
        place = call("shmat", kept[-1], None, 0)
        ctypes.memset(place, 1, 32 << 20)
        libc.shmdt(ctypes.c_void_p(place))
    won()
finally:
    for number in kept:
        call("shmctl", number, 0, None)
""",
    ),
    on(
        "memory-of-children",
        "take too much memory together with children, each of them modest",
        _HOLD
        + """
ready, done = os.pipe(), os.pipe()
for _ in range(8):
    if not os.fork():
        block = hold(A["too_much_mb"] // 6)
        os.write(ready[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
os.close(ready[1])
held = 0
while held < 8 and os.read(ready[0], 1):
    held += 1
held == 8 and won()
""",
    ),
    on(
        "memory-file-system",
        "take too much memory in files of a file system that lives in memory",
        """
block, written = os.urandom(1 << 20), 0
for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run", "."):
    try:
        for number in range(A["too_much_mb"] // 8):
            with open(f"{folder}/{A['token']}-{number}", "wb") as file:
                for _ in range(8):
                    written += file.write(block)
    except OSError as error:
        print(folder, error)
    if written >= A["too_much_mb"] << 20:
        won()
        break
for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run", "."):
    for number in range(A["too_much_mb"] // 8):
        try:
            os.unlink(f"{folder}/{A['token']}-{number}")
        except OSError:
            break
""",
    ),
)

_COUNTS: tuple[Probe, ...] = (
    on(
        "fork",
        "start more processes than allowed",
        """
children = []
try:
    for _ in range(3 * A["processes"]):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        children.append(child)
finally:
    for child in children:
        os.kill(child, 9)
    print(len(children))
    len(children) > 1.5 * A["processes"] and won()
""",
    ),
    on(
        "threads",
        "start more threads than allowed",
        """
import threading
threading.stack_size(1 << 18)  # small ones, so that it is not the memory that stops them
stop, started = threading.Event(), []
try:
    for _ in range(3 * A["processes"]):
        started.append(threading.Thread(target=stop.wait, daemon=True))
        started[-1].start()
except RuntimeError as error:
    print(error)
    started.pop()
stop.set()
print(len(started))
len(started) > 1.5 * A["processes"] and won()
""",
    ),
    on(
        "descriptors",
        "open more files than allowed",
        """
kept = []
try:
    for _ in range(3 * A["open_files"]):
        kept += os.pipe()
finally:
    len(kept) > A["open_files"] and os.write(1, b"\\nPROBE-" + b"SUCCEEDED\\n")
""",
    ),
    on(
        "large-file",
        "write a file that is too large",
        """
block = bytes(1 << 20)
with open("large", "wb", 0) as file:
    for _ in range(2 * A["file_mb"]):
        assert file.write(block) == len(block)
won()
""",
    ),
    on(
        "sparse-file",
        "make a file that seems a terabyte",
        """
with open("sparse", "wb") as file:
    file.truncate(1 << 40)
won()
""",
    ),
    on(
        "reserved-file",
        "reserve the disk without writing",
        """
number = os.open("reserved", os.O_CREAT | os.O_RDWR)
os.posix_fallocate(number, 0, 2 * A["file_mb"] << 20)
won()
""",
    ),
    on(
        "many-files",
        "fill the disk with files, each of them allowed",
        """
block = bytes(1 << 20)
for number in range(16):
    with open(f"part{number}", "wb", 0) as file:
        for _ in range(A["file_mb"] // 2):
            assert file.write(block) == len(block)
won()
""",
    ),
    on(
        "many-names",
        "fill the disk's table of files with empty ones",
        """
for number in range(3 * A["files"]):
    os.close(os.open(f"n{number}", os.O_CREAT | os.O_WRONLY))
    number % 200 or time.sleep(0.03)  # over several looks of whoever counts them
won()
""",
    ),
    on(
        "output",
        "flood the standard output",
        """
for _ in range(64):
    os.write(1, b"x" * 65536)
""",
        judge=flooded,
    ),
    on(
        "error-output",
        "flood the standard error",
        """
for _ in range(64):
    os.write(2, b"x" * 65536)
""",
        judge=flooded,
    ),
    on(
        "output-of-children",
        "flood the output from several processes at once",
        """
for _ in range(4):
    os.fork() or [os.write(1, b"x" * 65536) for _ in range(16)] and os._exit(0)
for _ in range(4):
    os.wait()
""",
        judge=flooded,
    ),
)

_FOREVER: tuple[Probe, ...] = (
    forever("burn", "compute for ever", "while True: pass"),
    forever("sleep", "sleep for ever", "time.sleep(3600)"),
    forever(
        "read-for-ever",
        "wait for an input that never comes",
        "near, far = os.pipe()\nos.read(near, 1)",
    ),
    forever(
        "flood-for-ever",
        "write for ever",
        """
while True:
    os.write(2, b"x" * 4096)
    time.sleep(0.001)
""",
    ),
    forever(
        "stuck-in-c",
        "never return to the interpreter, which would see a signal",
        're.match("(a+)+$", "a" * 60 + "b")',
    ),
    forever(
        "ignore-signals",
        "ignore every signal that may be ignored",
        """
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
time.sleep(3600)
""",
    ),
    forever(
        "stop",
        "stop itself, so that it takes no signal",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ),
)

_OUTLIVING: tuple[Probe, ...] = (
    on(
        "daemon",
        "leave a process that outlives the run",
        """
mark()
if not os.fork():
    os.setsid()
    libc.prctl(1, 0)  # no signal when the parent ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        os.closerange(0, 64)
        time.sleep(20)
    os._exit(0)
time.sleep(0.1)
""",
        judge=outlives,
    ),
    on(
        "moving-target",
        "leave a process that is another one every moment",
        """
mark()
if not os.fork():
    os.closerange(0, 64)
    for _ in range(30):
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.4)
    os._exit(0)
""",
        judge=outlives,
    ),
    on(
        "killed-with-children",
        "leave children behind by being killed oneself",
        """
mark()
for _ in range(4):
    if not os.fork():
        os.setsid()
        os.closerange(0, 64)
        time.sleep(20)
        os._exit(0)
os.kill(os.getpid(), 9)
""",
        judge=outlives,
    ),
)

BOMBS = (*_MEMORY, *_COUNTS, *_FOREVER, *_OUTLIVING)
