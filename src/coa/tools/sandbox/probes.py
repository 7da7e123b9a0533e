"""Quick attacks for the start: programs that print OPEN when they get through.

Each is harmless where it succeeds. A sandbox that one of them gets out of is not used.
"""

from __future__ import annotations

_CALL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def call(on_x86, on_arm, *arguments):
    if libc.syscall(on_x86 if x86 else on_arm, *arguments) >= 0:
        print("OPEN")
"""
_CONNECT = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 9)), (socket.AF_UNIX, "\\0coa")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            socket.socket(family, kind)
            print("OPEN")
        except OSError:
            pass
"""
_HOST_FILES = """
import os
for path in ("/etc/passwd", "/etc/hostname", "/proc/1/environ", "/proc/self/maps", "/sys", "/usr"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print("OPEN", path)
    except OSError:
        pass
"""
_WRITES = """
import sys, os
for folder in ("/", "/dev", "/var/tmp", os.path.dirname(os.__file__), "/py", "/py/site"):
    try:
        open(os.path.join(folder, "coa-was-here"), "w")
        print("OPEN", folder)
    except OSError:
        pass
"""
_SIGNALS = """
import os
try:
    os.kill(os.getppid(), 9)  # one that arrives ends the sandbox, and that is noticed
except OSError:
    pass
"""
_EXECUTES = """
import os, sys
for path in ("/bin/sh", sys.executable or "/py/bin/python3", "/py/bin/python3"):
    try:
        os.execv(path, [path, "-c", "print('OPEN')"])
    except OSError:
        pass
"""
_IDENTITY = """
import os
for become in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):
    try:
        become()
        print("OPEN")
    except OSError:
        pass
if os.getuid() == 0:
    print("OPEN")
"""
_LIMITS = """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("OPEN")
    except (OSError, ValueError):
        pass
try:
    bytearray(1 << 36)
    print("OPEN")
except MemoryError:
    pass
"""

_FORKS = """
import os, time
started = 0
for _ in range(64):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
    except OSError:
        pass
if started == 64:
    print("OPEN")
"""

PROBES = {
    "sockets": _CONNECT,
    "files of the host": _HOST_FILES,
    "writing outside": _WRITES,
    "signals": _SIGNALS,
    "starting a program": _EXECUTES,
    "becoming root": _IDENTITY,
    "raising a limit": _LIMITS,
    "processes without end": _FORKS,
    "ptrace": f"{_CALL}call(101, 117, 0, 0, 0, 0)",
    "unshare": f"{_CALL}call(272, 97, 0x10000000)",
    "mount": f"{_CALL}call(165, 40, b'none', b'/tmp', b'tmpfs', 0, None)",
    "bpf": f"{_CALL}call(321, 280, 0, ctypes.create_string_buffer(64), 64)",
    "io_uring": f"{_CALL}call(425, 425, 4, ctypes.create_string_buffer(120))",
    "keyctl": f"{_CALL}call(250, 219, 0, -3, 1)",
    "memory outside the limit": f"{_CALL}call(319, 279, b'x', 0)",
    "another's descriptors": f"{_CALL}call(434, 434, 1, 0)",
}
"""Name of the attack -> program."""
