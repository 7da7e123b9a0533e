"""Reaching other processes: the host's (a victim that the arena starts) and the parent."""

from __future__ import annotations

from .probe import Probe, probe


def on(name: str, about: str, program: str, **more: object) -> Probe:
    return probe(name, "processes", about, program, **more)


PROCESSES: tuple[Probe, ...] = (
    on("signal", "signal a process of the host", 'os.kill(A["victim"], 0)\nwon()'),
    on(
        "signal-parent",
        "signal the process that started this one",
        "os.getppid() > 0 and (os.kill(os.getppid(), 0), won())",
    ),
    on(
        "signal-by-pidfd",
        "signal a process of the host through a descriptor of it",
        'call("pidfd_send_signal", call("pidfd_open", A["victim"], 0), 0, None, 0)\nwon()',
    ),
    on(
        "signal-by-owner",
        "have the kernel signal a process of the host when a file is ready, past a filter of kill",
        """
import fcntl
near, far = os.pipe()
fcntl.fcntl(near, fcntl.F_SETOWN, A["victim"])
won()
""",
    ),
    on(
        "signal-parent-by-owner",
        "have the kernel signal the parent when a file is ready",
        """
import fcntl
near, far = os.pipe()
os.getppid() > 0 and (fcntl.fcntl(near, fcntl.F_SETOWN, os.getppid()), won())
""",
    ),
    on(
        "steal-descriptor",
        "copy an open descriptor out of a process of the host",
        'call("pidfd_getfd", call("pidfd_open", A["victim"], 0), 1, 0) and won()',
    ),
    on(
        "steal-parent-descriptor",
        "copy an open descriptor out of the parent",
        """
got = call("pidfd_open", os.getppid(), 0)
for number in range(64):
    try:
        call("pidfd_getfd", got, number, 0) and won()
        break
    except OSError as error:
        print(error)
""",
    ),
    on(
        "others-environment",
        "read keys from the environment of every process",
        """
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(name) != os.getpid():
            leak(open(f"/proc/{name}/environ", "rb").read())
    except OSError:
        pass
""",
    ),
    on(
        "others-arguments",
        "read passwords from the command lines of every process",
        """
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        leak(open(f"/proc/{name}/cmdline", "rb").read())
    except OSError:
        pass
""",
    ),
    on(
        "ptrace",
        "attach to a process of the host as a debugger",
        """
call("ptrace", 0x4206, A["victim"], 0, 0)  # PTRACE_SEIZE stops nothing
won()
""",
    ),
    on(
        "ptrace-parent",
        "attach to the parent as a debugger",
        'call("ptrace", 0x4206, os.getppid(), 0, 0)\nwon()',
    ),
    on(
        "ptrace-child",
        "trace a process of its own, to rewrite its system calls after the filter",
        """
child = os.fork()
if not child:
    time.sleep(5)
    os._exit(0)
try:
    call("ptrace", 0x4206, child, 0, 0)
    won()
finally:
    os.kill(child, 9)
""",
    ),
    on(
        "read-memory",
        "read the memory of a process of the host",
        """
class Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
start, end = A["stack"]
room = ctypes.create_string_buffer(end - start)
here, there = Span(ctypes.addressof(room), len(room)), Span(start, end - start)
call("process_vm_readv", A["victim"], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
leak(room.raw)
""",
    ),
    on(
        "parent-memory",
        "read the memory of the parent",
        "next(memory(os.getppid())) and won()",
    ),
    on(
        "parent-memory-write",
        "open the memory of the parent for writing",
        'os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR) and won()',
    ),
    on(
        "compare",
        "compare kernel objects with those of the parent (kcmp)",
        'call("kcmp", os.getpid(), os.getppid(), 1, 0, 0)\nwon()',
        needs="CONFIG_KCMP in the kernel",
    ),
    on(
        "others-limits",
        "change the limits of a process of the host",
        'import resource\nresource.prlimit(A["victim"], resource.RLIMIT_CORE, (0, 0))\nwon()',
    ),
    on(
        "parents-limits",
        "change the limits of the parent, which its later children inherit",
        """
import resource
got = resource.prlimit(os.getppid(), resource.RLIMIT_CORE)
resource.prlimit(os.getppid(), resource.RLIMIT_CORE, got)
won()
""",
    ),
    on(
        "others-priority",
        "make a process of the host slower",
        'os.setpriority(os.PRIO_PROCESS, A["victim"], 19)\nwon()',
    ),
    on(
        "others-oom-score",
        "make the kernel kill a process of the host first",
        'open(f"/proc/{A[\'victim\']}/oom_score_adj", "w").write("1")\nwon()',
    ),
    on(
        "host-program",
        "run a program of the host",
        """
child = os.fork()
if not child:
    os.execv("/bin/sh", ["sh", "-c", "echo; echo PROBE-SUCC''EEDED"])
os.waitpid(child, 0)
""",
    ),
    on(
        "setuid-program",
        "reach a program that runs with root's rights",
        """
import stat
for name in ("su", "mount", "passwd", "sudo", "chsh", "newgrp", "umount", "gpasswd"):
    try:
        if os.stat("/usr/bin/" + name).st_mode & stat.S_ISUID and os.access("/usr/bin/" + name, 1):
            libc.prctl(39, 0, 0, 0, 0) == 0 and won()  # PR_GET_NO_NEW_PRIVS: the bit would count
            break
    except OSError as error:
        print(error)
""",
        needs="a setuid program",
    ),
)
