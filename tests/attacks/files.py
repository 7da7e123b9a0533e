"""Reading, writing and naming files of the host, by every road that leads to them."""

from __future__ import annotations

from .probe import Probe, exists, gone, probe

_FILES, _SECRETS = "files", "secrets"


def reading(name: str, about: str, program: str, **more: object) -> Probe:
    return probe(name, _FILES, about, program, **more)


FILES: tuple[Probe, ...] = (
    reading(
        "passwd",
        "read the host's /etc/passwd",
        """
import hashlib
text = open("/etc/passwd", "rb").read()
hashlib.sha256(text).hexdigest() == A["passwd"] and won()
""",
    ),
    reading("temp-secret", "read a file of the temp folder", 'leak(open(A["secret"]).read())'),
    reading("host-shm", "read a file of /dev/shm", 'leak(open(A["shm"]).read())'),
    reading("list-host", "list a folder of the host", 'os.listdir(A["folder"]) and won()'),
    reading("checkout", "read the program's own source", 'open(A["checkout"]).read(9) and won()'),
    reading(
        "symlink",
        "read a host's file through a symbolic link made inside",
        'os.symlink(A["secret"], "link")\nleak(open("link").read())',
    ),
    reading(
        "hardlink",
        "take a second name for a host's file",
        'os.link(A["secret"], "hard")\nleak(open("hard").read())',
    ),
    reading(
        "dot-dot",
        "climb out of the working folder",
        'leak(open("../" * 40 + A["secret"][1:]).read())',
    ),
    reading(
        "proc-self-root",
        "go through /proc/self/root",
        'leak(open("/proc/self/root" + A["secret"]).read())',
    ),
    reading(
        "proc-1-root",
        "go through the root folder of the first process",
        'leak(open("/proc/1/root" + A["secret"]).read())',
        needs="being allowed to trace process 1",
    ),
    reading(
        "proc-parent-root",
        "go through the root and the working folder of the parent",
        """
for road in ("root" + A["secret"], "cwd/" + "../" * 40 + A["secret"][1:]):
    try:
        leak(open(f"/proc/{os.getppid()}/{road}").read())
    except OSError as error:
        print(error)
""",
    ),
    reading(
        "open-descriptors",
        "find a host's file among the descriptors it was started with",
        """
import stat
for number in range(256):
    try:
        if stat.S_ISREG(os.fstat(number).st_mode):
            leak(os.pread(number, 200, 0))
    except OSError as error:
        print(error)
""",
    ),
    reading(
        "folder-descriptors",
        "climb to the host from any open folder descriptor",
        """
os.open(".", os.O_RDONLY)  # the plain process has one, as a careless parent may leave
for number in range(256):
    try:
        leak(os.read(os.open("../" * 40 + A["secret"][1:], os.O_RDONLY, dir_fd=number), 99))
    except OSError:
        pass
""",
    ),
    reading(
        "file-handle",
        "open a host's file by its number on the disk (open_by_handle_at)",
        """
handle = bytes.fromhex(A["handle"])
for folder in (".", "/", os.path.dirname(os.__file__)):
    try:
        leak(os.read(call("open_by_handle_at", os.open(folder, os.O_RDONLY), handle, 0), 99))
    except OSError as error:
        print(error)
""",
        needs="CAP_DAC_READ_SEARCH and file handles on this file system",
    ),
    reading(
        "raw-disk",
        "make a device file of the host's disk and read it",
        """
os.mknod("disk", 0o60600, A["device"])
os.read(os.open("disk", os.O_RDONLY), 512) and won()
""",
        needs="CAP_MKNOD and a disk below the temp folder",
    ),
    reading(
        "kernel-log-file",
        "read the kernel's log from /dev/kmsg",
        'os.read(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK), 8192) and won()',
        needs="a readable /dev/kmsg",
    ),
    reading(
        "core-pattern",
        "open the setting that makes the kernel run a program on a crash",
        'os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY) and won()',
        needs="root",
    ),
    reading(
        "sysrq",
        "open the file that reboots or crashes the machine",
        'os.open("/proc/sysrq-trigger", os.O_WRONLY) and won()',
        needs="root and SysRq in the kernel",
    ),
    reading(
        "system-settings",
        "open a setting of the kernel under /sys for writing",
        """
for name in ("kernel/uevent_helper", "kernel/profiling", "module/printk/parameters/time",
             "kernel/mm/transparent_hugepage/enabled"):
    try:
        os.open("/sys/" + name, os.O_WRONLY) and won()
        break
    except OSError as error:
        print(error)
""",
        needs="root and /sys",
    ),
    reading(
        "interpreter",
        "open the standard library for writing, to be run by the next program",
        "os.open(os.__file__, os.O_RDWR) and won()",
        needs="an interpreter that this user may change",
    ),
    reading(
        "write-outside",
        "make a file in a folder of the host",
        'open(A["outside"], "w").write("was here")',
        judge=exists("outside"),
    ),
    reading(
        "delete-outside", "delete a file of the host", 'os.unlink(A["spare"])', judge=gone("spare")
    ),
    reading(
        "rename-outside",
        "move a file of the host away",
        'os.rename(A["spare"], A["spare"] + "2")',
        judge=gone("spare"),
    ),
    reading(
        "change-outside",
        "change the permissions and times of a host's file",
        'os.chmod(A["spare"], 0o777)\nos.utime(A["spare"], (1, 1))\nwon()',
    ),
    probe(
        "home",
        _SECRETS,
        "read credentials from the home folder",
        """
for home in {A["home"], os.path.expanduser("~")}:
    try:
        leak(open(home + "/.netrc").read())
    except OSError as error:
        print(error)
""",
    ),
    probe("environment", _SECRETS, "find an API key in the environment", "leak(repr(os.environ))"),
    probe(
        "first-environment",
        _SECRETS,
        "find an API key in the environment that the process began with",
        'leak(open("/proc/self/environ", "rb").read())',
    ),
    probe(
        "own-memory",
        _SECRETS,
        "search the process's own memory for what its parent knew",
        "any(leak(block) for block in own_memory())",
    ),
    probe(
        "gold-answers",
        _SECRETS,
        "read the answers that the grader compares with",
        """
for path in (A["gold"], "../" * 40 + A["gold"][1:], "/proc/self/root" + A["gold"]):
    try:
        leak(open(path).read())
    except OSError as error:
        print(error)
""",
    ),
    probe(
        "gold-search",
        _SECRETS,
        "search the temp folders for the answers",
        """
for top in {os.path.dirname(A["gold"]), os.path.join(A["folder"], "tasks")}:
    for folder, _, names in os.walk(top):
        for name in names:
            leak(open(os.path.join(folder, name), "rb").read(999))
""",
    ),
)
