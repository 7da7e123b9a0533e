"""Take the rights of this process away, for good: limits, Landlock, then a filter of system calls.

`Confinement` is prepared once in the zygote (opening paths costs most of the time) and entered by
every forked child. The order matters: Landlock needs calls that the filter forbids. Only the
standard library is used, so that no package has to be trusted or installed where programs run.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping, Sequence

from .syscalls import ALLOWED, ARCHITECTURES, EXAMINED, FATAL, FORKING, OWN_DISK, numbers

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2
_SET_DUMPABLE, _SET_DEATH_SIGNAL = 4, 1
_DROP_FROM_BOUNDING_SET, _CAPABILITIES, _CAPABILITY_VERSION = 24, 64, 0x20080522

# -- Landlock ---------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_SOCK, _MAKE_FIFO, _MAKE_SYM = 1 << 9, 1 << 10, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILES_V1 = (1 << 13) - 1
_BIND_TCP_CONNECT_TCP, _SCOPE_SOCKETS_SIGNALS = 0b11, 0b11
_WRITE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_FIFO | _MAKE_SYM


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 where it has none or it is off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


Paths = Iterable[str]


def _ruleset(readable: Paths, listable: Paths, writable: Paths, devices: Paths) -> int:
    """A Landlock ruleset: what is not named here cannot be opened, whatever its permissions."""
    version = landlock_version()
    since = {_REFER: 2, _TRUNCATE: 3, _IOCTL_DEV: 5}
    handled = _FILES_V1 | sum(right for right, first in since.items() if version >= first)
    parts = [handled]
    if version >= 4:
        parts.append(_BIND_TCP_CONNECT_TCP)
    if version >= 6:
        parts.append(_SCOPE_SOCKETS_SIGNALS)
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _checked(ruleset, "Landlock")
    inside = _READ_FILE | _READ_DIR | _WRITE | (handled & (_TRUNCATE | _REFER))
    for paths, rights in (
        (readable, _READ_FILE | _READ_DIR),
        (listable, _READ_DIR),
        (writable, inside),
        (devices, _READ_FILE | _WRITE_FILE | (handled & _TRUNCATE)),
    ):
        for path in paths:
            _allow(int(ruleset), path, rights)
    return int(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):  # noqa: PTH112 - the standard library's lighter half
            rights &= _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", rights, beneath)
        _checked(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
    finally:
        os.close(beneath)


# -- the filter of system calls ---------------------------------------------------------------

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45
_PASS, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_NAMESPACES, _THREAD = 0x7E020000, 0x00010000
_TERMINAL_ASKS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""ioctl: is it a terminal, its size, bytes to read, blocking, close-on-exec. Nothing that types."""
_OWNER_SETS = (8, 10, 15)
"""fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel signal another process."""
_NAME_GETS_SETS = (15, 16)
_SOCKET_KINDS = (3, 4, 38, 39)
"""getsockopt: type, error, protocol and domain. Nothing about who is at the other end."""
_KIND_OF_MAP, _SHARED, _ANONYMOUS = 0x0F, 0x01, 0x20

Code = list[tuple[int, int, int, int]]


def _load_argument(index: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _end(action: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, action)


def _only(index: int, values: Sequence[int], these: int = _PASS, others: int = _REFUSE) -> Code:
    """Pass when the argument is one of the values; or what `these` and `others` say."""
    tests = [step for value in values for step in ((_EQUAL, 0, 1, value), _end(these))]
    return [_load_argument(index), *tests, _end(others)]


def _answer(numbers: Iterable[int], action: int) -> Code:
    """One answer for all of these, by spans: the kernel compiles this anew for every program."""
    code: Code = []
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    for first, last in spans:
        code += [(_AT_LEAST, 0, 2, first), (_ABOVE, 1, 0, last), _end(action)]
    return code


def _examinations(forks: bool, pid: int) -> dict[str, Code]:
    """What is looked at in the calls that are allowed with some arguments only."""
    clone = [_load_argument(0), (_ANY_BIT, 0, 1, _NAMESPACES), _end(_REFUSE)]
    if not forks:
        clone += [(_ANY_BIT, 1, 0, _THREAD), _end(_REFUSE)]
    stream_pair = [
        _load_argument(0),
        (_EQUAL, 1, 0, 1),  # AF_UNIX
        _end(_REFUSE),
        _load_argument(1),
        (_AND, 0, 0, 0xF),
        *((_EQUAL, 0, 1, 1), _end(_PASS)),  # SOCK_STREAM: it has no other address to send to
        _end(_REFUSE),
    ]
    # Shared memory without a file outlives its mapping, and so escapes the limit on mappings.
    private = [_load_argument(3), (_AND, 0, 0, _KIND_OF_MAP | _ANONYMOUS)]
    private += [(_EQUAL, 0, 1, _SHARED | _ANONYMOUS), _end(_REFUSE), _end(_PASS)]
    signal = [_end(_PASS)] if forks else _only(0, [pid])
    return {
        "clone": [*clone, _end(_PASS)],
        # Its flags lie in memory, where no filter can look; the C library then falls back to clone.
        "clone3": [_end(_ABSENT)],
        "ioctl": _only(1, _TERMINAL_ASKS),
        "prctl": _only(0, _NAME_GETS_SETS),
        "fcntl": _only(1, _OWNER_SETS, these=_REFUSE, others=_PASS),
        "socketpair": stream_pair,
        "getsockopt": _only(2, _SOCKET_KINDS),
        "mmap": private,
        "prlimit64": _only(0, [0]),  # the zygote has the same uid: its limits are not theirs to set
        "sched_setaffinity": _only(0, [0]),
        "kill": signal,
        "tgkill": signal,
    }


def filter_code(machine: str, forks: bool, pid: int) -> Code:
    """The program that the kernel runs at every system call."""
    _, architecture = ARCHITECTURES[machine]
    code: Code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        *((_EQUAL, 1, 0, architecture), _end(_KILL)),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":  # the x32 calls are other numbers for the same things
        code += [(_AT_LEAST, 0, 1, 0x40000000), _end(_KILL)]
    allowed = numbers(f"{ALLOWED} {FORKING} {OWN_DISK}" if forks else ALLOWED, machine)
    code += _answer(allowed.values(), _PASS)
    examined = numbers(EXAMINED, machine)
    for name, steps in _examinations(forks, pid).items():
        code += [(_EQUAL, 0, len(steps), examined[name]), *steps]
    return [*code, *_answer(numbers(FATAL, machine).values(), _KILL), _end(_REFUSE)]


def _packed(code: Code) -> bytes:
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _load_filter(packed: bytes) -> None:
    steps = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("@HP", len(packed) // 8, ctypes.addressof(steps))
    loaded = _libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0)
    _checked(loaded, "the filter of system calls")


# -- all of it --------------------------------------------------------------------------------


def end_with_parent() -> None:
    """Die when the parent does, and let nobody look into this process."""
    _libc.prctl(_SET_DEATH_SIGNAL, 9, 0, 0, 0)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def drop_to(uid: int, gid: int) -> None:
    """Become a user that owns nothing; all capabilities go with the uid.

    What could be gained again by running something goes, too: the bounding and inheritable sets.
    no_new_privs forbids that already, so that where the right to drop is missing, nothing is lost.
    """
    for capability in range(_CAPABILITIES):  # those that this kernel does not know are refused
        _libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
    try:
        os.setresuid(0, 0, 0)
    except PermissionError:
        return
    raise RuntimeError(f"the rights of root came back after dropping to uid {uid}")


class Confinement:
    """What a child may do, prepared; `enter` makes it so for the calling process."""

    def __init__(
        self,
        *,
        readable: Sequence[str],
        listable: Sequence[str],
        writable: Sequence[str],
        devices: Sequence[str],
        limits: dict[str, int],
        forks: bool,
    ) -> None:
        """`limits`: name of the resource (AS, CPU ...) -> value. `forks`: processes are allowed."""
        self._ruleset = _ruleset(readable, listable, writable, devices)
        self._limits = limits
        self._machine = platform.machine()
        self._filter = _packed(filter_code(self._machine, True, 0)) if forks else b""

    def enter(self, changed: Mapping[str, int | None]) -> None:
        """Irreversible. `changed` has other values for some limits; None leaves one as it is."""
        for name, value in {**self._limits, **changed}.items():
            if value is not None:
                # At the hard limit of CPU time comes SIGKILL, which could mean anything.
                hard = value + 1 if name == "CPU" else value
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
        _checked(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        _checked(_libc.syscall(_RESTRICT_SELF, self._ruleset, 0), "Landlock")
        os.close(self._ruleset)
        _load_filter(self._filter or _packed(filter_code(self._machine, False, os.getpid())))
