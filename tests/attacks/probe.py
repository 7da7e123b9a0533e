"""What an attack is: one or more programs, and how to tell that it worked.

The same programs run outside (plain Python) and inside (the sandbox). Each begins with `PRELUDE`,
which says PROBE-STARTED, so that a probe which never ran is not mistaken for one that was stopped.
Most programs call `won()` exactly when their attack has worked; the others are judged from outside,
by a file that must not exist, a process that must not live, or a run that must still be answered.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

STARTED, MARKER, NAMED = "PROBE-STARTED", "PROBE-SUCCEEDED", "PROBE-NAMED"
ALIVE = "alive"
"""How a program ended that had to be killed from outside."""

Control = Literal["processes", "interpreter", "none"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one program left for its caller to see."""

    stdout: str
    stderr: str
    ended: str
    """As the sandbox says; outside: "exit", or `ALIVE`."""

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


Judge = Callable[[Sequence[Seen], Mapping[str, Any]], bool]
"""(what each step showed, the arena's values) -> whether the attack worked."""


@dataclass(frozen=True, slots=True)
class Step:
    program: str
    session: str = ""
    """The name of the session it runs in; a fresh run when empty."""
    pause: float = 0.0
    """Seconds that the host waits before it."""


@dataclass(frozen=True, slots=True)
class Probe:
    name: str
    category: str
    about: str
    steps: tuple[Step, ...]
    judge: Judge
    needs: str = ""
    """What this attack needs even without a sandbox, where a machine or a user may lack it."""
    control: Control = "processes"
    """Outside: a process per step in one folder, one reused interpreter for all steps, or not at
    all, because it would harm the machine."""
    alive: bool = False
    """Outside it goes on for ever; it is given a moment and then killed."""


def marked(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    return re.search(rf"^{MARKER}$", seen[-1].text, re.MULTILINE) is not None


def exists(key: str) -> Judge:
    """Won when the file that the arena names is there."""
    return lambda seen, arena: Path(arena[key]).exists()


def gone(key: str) -> Judge:
    return lambda seen, arena: not Path(arena[key]).exists()


def living(token: str) -> list[int]:
    """Processes that carry this name, as the host sees them; zombies are dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().split("(", 1)[1].rsplit(")", 1)
        except (OSError, IndexError, ValueError):
            continue  # it ended while we looked
        if name == token and rest.split()[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def outlives(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    """Won when a process of the probe's own name lives on after its run was answered."""
    assert NAMED in seen[0].stdout, ("its processes cannot be told apart", seen)
    looks = []
    while len(looks) < 20 and any(looks[-3:] or [True]):  # killed ones take a moment to go,
        looks.append(bool(living(arena["token"])))  # and those that move can be missed once
        time.sleep(0.02)
    return any(looks[-3:])


def endless(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    """Won when it runs for as long as it likes."""
    return seen[-1].ended == ALIVE or outlives(seen, arena)


def unanswered(seen: Sequence[Seen], arena: Mapping[str, Any]) -> bool:
    """Won when the run after the attack no longer gets exactly its own output."""
    return seen[-1].stdout != f"{STARTED}\n42\n"


ANSWER = Step("print(6 * 7)")
"""The innocent run that follows an attack; see `unanswered`."""


def probe(name: str, category: str, about: str, *programs: str, **more: Any) -> Probe:
    """A probe from program texts, which run one after the other in fresh places."""
    steps = more.pop("steps", None) or tuple(Step(program) for program in programs)
    return Probe(name, category, about, steps, more.pop("judge", marked), **more)


NUMBERS = {  # name: (x86_64, aarch64); newer calls have the same number everywhere
    **{"add_key": (248, 217), "bpf": (321, 280), "capget": (125, 90), "clone": (56, 220)},
    **{"clone3": (435, 435), "delete_module": (176, 106), "execveat": (322, 281)},
    **{"fanotify_init": (300, 262), "fsopen": (430, 430), "init_module": (175, 105)},
    **{"io_uring_setup": (425, 425), "iopl": (172, -1), "kcmp": (312, 272)},
    **{"kexec_load": (246, 104), "keyctl": (250, 219), "memfd_create": (319, 279)},
    **{"mknodat": (259, 33), "modify_ldt": (154, -1), "mount": (165, 40), "mq_open": (240, 180)},
    **{"open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "personality": (135, 92)},
    **{"pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424)},
    **{"pivot_root": (155, 41), "process_vm_readv": (310, 270), "ptrace": (101, 117)},
    **{"quotactl": (179, 60), "reboot": (169, 142), "sethostname": (170, 161)},
    **{"setns": (308, 268), "settimeofday": (164, 170), "shmat": (30, 196), "shmctl": (31, 195)},
    **{"shmget": (29, 194), "swapon": (167, 224), "syslog": (103, 116), "unshare": (272, 97)},
    **{"userfaultfd": (323, 282)},
}

PRELUDE = f'''
import ctypes, errno, os, re, signal, socket, struct, sys, time
print("{STARTED}", flush=True)
NUMBERS = {NUMBERS!r}
NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def won():
    print("\\nPROBE-" "SUCCEEDED", flush=True)

def leak(text, kind=b"SECRET"):
    """Won, if one of the host's secrets is in it."""
    text = text if isinstance(text, bytes) else text.encode()
    if re.search(b"COA-" + kind + b"-[0-9a-f]{{32}}", text):
        won()
        return True

def call(name, *arguments):
    """A system call by its name, past the C library."""
    number = NUMBERS[name][os.uname().machine == "aarch64"] if isinstance(name, str) else name
    long = lambda value: ctypes.c_long(value) if isinstance(value, int) else value
    got = libc.syscall(ctypes.c_long(number), *map(long, arguments))
    if got == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return got

def enter(flags):
    """New namespaces, through a user namespace where the attacker is not root."""
    try:
        call("unshare", flags or NEWUSER)
    except PermissionError:
        call("unshare", flags | NEWUSER)

def mark():
    """Take a name by which the host can find this process."""
    try:
        open("/proc/self/comm", "w").write(A["token"])
    except OSError:
        libc.prctl(15, A["token"].encode())
    buffer = ctypes.create_string_buffer(16)
    libc.prctl(16, buffer)
    if buffer.value.decode() == A["token"]:
        print("{NAMED}", flush=True)

def memory(pid):
    """Everything that this user may read of another process."""
    with open(f"/proc/{{pid}}/mem", "rb", 0) as file:
        for line in open(f"/proc/{{pid}}/maps"):
            start, end = [int(each, 16) for each in line.split()[0].split("-")]
            for place in range(start, end, 1 << 22):
                try:
                    file.seek(place)
                    yield file.read(min(1 << 22, end - place))
                except (OSError, OverflowError):
                    break

def own_memory(gap=1 << 24, most=1 << 29):
    """Everything mapped near known addresses, read by way of a pipe: no /proc, no crash."""
    near, far = os.pipe()
    seen, page, block = set(), 1 << 12, 1 << 16
    libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_long]
    words = ctypes.create_string_buffer(8)
    large = ctypes.create_string_buffer(1 << 22)
    known = [id(words), id(type), ctypes.addressof(words), ctypes.addressof(large)]
    known += [libc.sbrk(0) - 1, ctypes.cast(libc.write, ctypes.c_void_p).value]
    known.append(ctypes.c_void_p.in_dll(libc, "environ").value)  # on the stack, or was

    def copy(place, size):
        got = libc.write(far, place, size)
        return os.read(near, got) if got > 0 else b""

    for anchor in known:
        for step in (block, -block):
            place, missed, before = anchor & -block, 0, b""
            while missed < gap and abs(place - anchor) < most and place > 0:
                if place not in seen:
                    got = copy(place, block)
                    if len(got) < block:  # somewhere in it is a hole
                        got = b"".join(copy(place + at, page) for at in range(0, block, page))
                    seen.add(place)
                    missed = 0 if got else missed + block
                    yield before[-99:] + got if step > 0 else got + before[:99]
                    before = got
                place += step
'''


def whole(step: Step, arena: Mapping[str, Any]) -> str:
    """The program as it runs: prelude, what it may know of the host, attack."""
    return f"{PRELUDE}\nA = {dict(arena)!r}\n{step.program.strip()}\n"
