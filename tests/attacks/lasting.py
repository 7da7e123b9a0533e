"""Leaving something for a later run: files, memory, processes, or another state of mind."""

from __future__ import annotations

from .probe import Probe, probe

WRITE = """
for folder in (".", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
    try:
        open(f"{folder}/{A['token']}", "w").write("left")
        print(folder)
    except OSError as error:
        print(error)
"""
FIND = """
for folder in (".", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
    try:
        open(f"{folder}/{A['token']}").read() == "left" and won()
        os.unlink(f"{folder}/{A['token']}")
    except OSError as error:
        print(error)
"""
POISON = """
import builtins, json, random, sys
json.dumps = lambda *a, **k: "PROBE-" "SUCCEEDED"
builtins.len = lambda x: 10**6
sys.modules["left_behind"] = json
"""
TASTE = """
import json, sys
(json.dumps(1) != "1" or len("") or "left_behind" in sys.modules) and won()
"""


def remember(kind: str) -> str:
    """A value that is not in the program's text."""
    return f'kept = "COA-" + "{kind}" + "-0123456789abcdef" * 2\nkept = kept[:-17] + kept[-16:]'


def search(kind: str) -> str:
    return f'any(leak(block, b"{kind}") for block in own_memory())'


def left(name: str, about: str, first: str, second: str, **more: object) -> Probe:
    return probe(name, "lasting", about, first, second, **more)


LASTING: tuple[Probe, ...] = (
    left("file-left", "leave a file for the next run", WRITE, FIND),
    left(
        "module-left",
        "leave a module that the next run imports instead of the real one",
        'open("colorsys.py", "w").write("value = 7")',
        "sys.path.insert(0, os.getcwd())\nimport colorsys\nhasattr(colorsys, 'value') and won()",
    ),
    left(
        "segment-left",
        "leave a System V memory segment",
        'call("shmget", A["key"], 4096, 0o1600)',
        'number = call("shmget", A["key"], 4096, 0)\nwon()\ncall("shmctl", number, 0, None)',
    ),
    left(
        "queue-left",
        "leave a message queue",
        'call("mq_open", A["token"].encode(), 0o102, 0o600, None)',
        'call("mq_open", A["token"].encode(), 0, 0, None) and won()\n'
        'libc.syscall(241 if os.uname().machine != "aarch64" else 181, A["token"].encode())',
        needs="POSIX message queues in the kernel",
    ),
    left(
        "key-left",
        "leave a key in the user's key ring",
        'call("add_key", b"user", A["token"].encode(), b"left", 4, -4)',
        'number = call("keyctl", 10, -4, b"user", A["token"].encode(), 0)\n'
        'number and won()\ncall("keyctl", 9, number, -4)',
    ),
    left(
        "process-left",
        "leave a process that the next run can find",
        """
mark()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 64)
        time.sleep(20)
    os._exit(0)
time.sleep(0.1)
""",
        """
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        open(f"/proc/{name}/comm").read().strip() == A["token"] and won()
    except OSError:
        pass
""",
    ),
    left(
        "folder-times",
        "leave a number in the times of the working folder",
        'os.utime(".", (1234567, 7654321))',
        's = os.stat(".")\n(s.st_atime == 1234567 or s.st_mtime == 7654321) and won()',
    ),
    left(
        "folder-mode",
        "leave the working folder with other permissions",
        'os.chmod(".", 0o1705)',
        'os.stat(".").st_mode & 0o7777 == 0o1705 and won()',
    ),
    left("poison", "change modules for the next run", POISON, TASTE, control="interpreter"),
    left(
        "earlier-text",
        "find the text of an earlier program in memory",
        "# COA-TEXT-" + "0123456789abcdef" * 2,
        search("TEXT"),
        control="interpreter",
    ),
    left(
        "earlier-values",
        "find the values of an earlier program in memory",
        remember("VALUES"),
        search("VALUES"),
        control="interpreter",
    ),
)
