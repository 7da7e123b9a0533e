"""Parts of the kernel that a program has no need of, and roads around a system call filter."""

from __future__ import annotations

from .probe import Probe, probe


def on(name: str, about: str, program: str, **more: object) -> Probe:
    return probe(name, "kernel", about, program, **more)


_NAMESPACES: tuple[Probe, ...] = (
    on("unshare-user", "become root in a new user namespace", 'call("unshare", NEWUSER)\nwon()'),
    on("unshare-net", "make a network of its own", "enter(NEWNET)\nwon()"),
    on(
        "clone-user",
        "start a process in a new user namespace",
        """
child = call("clone", NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
if not child:
    os._exit(0)
os.waitpid(child, 0)
won()
""",
    ),
    on(
        "clone3-user",
        "the same with clone3, whose flags no filter can see",
        """
child = call("clone3", struct.pack("=11Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, *[0] * 6), 88)
if not child:
    os._exit(0)
os.waitpid(child, 0)
won()
""",
    ),
    on(
        "setns",
        "join the namespaces of another process",
        """
for name in ("net", "uts", "ipc"):
    try:
        call("setns", os.open(f"/proc/{A['victim']}/ns/{name}", os.O_RDONLY), 0)
    except FileNotFoundError:
        call("setns", os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0)
won()
""",
        needs="CAP_SYS_ADMIN",
    ),
    on(
        "mount",
        "mount a file system",
        """
enter(NEWNS)
call("mount", b"none", b"/", None, 0x44000, None)  # keep it in this namespace
os.mkdir("here")
call("mount", b"tmpfs", b"here", b"tmpfs", 0, None)
won()
""",
    ),
    on(
        "mount-plain",
        "mount without a new namespace",
        """
os.mkdir("here")
call("mount", b"tmpfs", b"here", b"tmpfs", 0, None)
libc.umount2(b"here", 2)
won()
""",
        needs="CAP_SYS_ADMIN",
    ),
    on(
        "fsopen",
        "mount by the newer calls, which older filters do not know",
        "enter(NEWNS)\ncall('fsopen', b'tmpfs', 0) and won()",
    ),
    on(
        "chroot",
        "change the root folder, the first half of a classic escape",
        """
try:
    os.chroot(".")
except PermissionError:
    enter(NEWUSER)
    os.chroot(".")
won()
""",
    ),
    on(
        "pivot-root",
        "exchange the root file system",
        """
enter(NEWNS)
call("mount", b"none", b"/", None, 0x44000, None)
os.mkdir("here")
call("mount", b"tmpfs", b"here", b"tmpfs", 0, None)
os.chdir("here")
call("pivot_root", b".", b".")
won()
""",
    ),
)

_RIGHTS: tuple[Probe, ...] = (
    on("setuid", "become another user", "os.setuid(12345)\nwon()", needs="CAP_SETUID"),
    on("setgroups", "take other groups", "os.setgroups([0, 42])\nwon()", needs="CAP_SETGID"),
    on(
        "capabilities",
        "hold any of root's capabilities",
        """
header, sets = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
call("capget", header, sets)
any(struct.unpack("=6I", sets.raw)) and won()
""",
        needs="root",
    ),
    on(
        "new-privileges",
        "gain rights by running a setuid program (no_new_privs unset)",
        "libc.prctl(39, 0, 0, 0, 0) == 0 and won()",
    ),
    on(
        "real-root",
        "be the host's root, under whatever name",
        """
inner, outer, _ = map(int, open("/proc/self/uid_map").readline().split())
os.getuid() - inner + outer == 0 and won()
""",
        needs="root",
    ),
    on(
        "priority",
        "run before everybody else",
        "os.setpriority(os.PRIO_PROCESS, 0, -5)\nwon()",
        needs="CAP_SYS_NICE",
    ),
    on(
        "real-time",
        "run before the kernel's own work",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\nwon()",
        needs="CAP_SYS_NICE",
    ),
    on(
        "raise-limits",
        "lift the limits it was given",
        """
import resource
for name in ("NPROC", "FSIZE", "AS", "NOFILE", "CPU"):
    which = getattr(resource, "RLIMIT_" + name)
    now = resource.getrlimit(which)[1]
    if now == resource.RLIM_INFINITY or name == "NOFILE" and now > 10 * A["open_files"]:
        won()
        break
    try:
        resource.setrlimit(which, (now + 1, now + 1))
        won()
        break
    except (OSError, ValueError) as error:
        print(error)
""",
    ),
)

_CALLS: tuple[Probe, ...] = (
    on(
        "io-uring",
        "make system calls through a ring that seccomp does not see",
        'call("io_uring_setup", 8, ctypes.create_string_buffer(120)) and won()',
        needs="io_uring enabled",
    ),
    on(
        "bpf",
        "load into the kernel's virtual machine",
        'call("bpf", 0, struct.pack("=4I", 2, 4, 4, 1) + bytes(112), 128) and won()',
        needs="CAP_BPF",
    ),
    on(
        "socket-filter",
        "load a filter into the kernel by way of a local socket",
        """
near, far = socket.socketpair()
code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))  # one step: drop all
near.setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 1, ctypes.addressof(code)))
won()
""",
    ),
    on(
        "add-key",
        "keep something in the kernel's key ring",
        'call("add_key", b"user", b"coa-probe", b"text", 4, -2) and won()',
    ),
    on("keyctl", "look into the kernel's key rings", 'call("keyctl", 0, -5, 1) and won()'),
    on(
        "perf",
        "watch the processor's counters",
        'call("perf_event_open", struct.pack("=IIQ", 1, 112, 0) + bytes(24) + '
        'struct.pack("=Q", 0x61) + bytes(64), 0, -1, -1, 0) and won()',
        needs="perf_event_paranoid below 3",
    ),
    on(
        "userfaultfd",
        "hold the kernel at a page fault, as exploits do",
        'call("userfaultfd", 1) and won()',
    ),
    on(
        "memory-program",
        "run a program that exists only in memory",
        """
code = bytes.fromhex("b801000000bf01000000488d3510000000ba11000000" "0f05b83c00000031ff0f05")
code += b"\\nPROBE-" + b"SUCCEEDED\\n"
start = 0x400078
size = 120 + len(code)
image = (b"\\x7fELF\\2\\1\\1" + bytes(9)
         + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
         + struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0, size, size, 4096) + code)
number = call("memfd_create", b"x", 0)
os.write(number, image)
child = os.fork()
if not child:
    empty = (ctypes.c_char_p * 1)()
    call("execveat", number, b"", empty, empty, 0x1000)
os.waitpid(child, 0)
""",
        needs="an x86_64 machine",
    ),
    on(
        "personality",
        "switch off address randomisation",
        'call("personality", 0x40000)\ncall("personality", 0xffffffff) & 0x40000 and won()',
    ),
    on(
        "kernel-log",
        "read the kernel's log",
        """
room = ctypes.create_string_buffer(4096)
call("syslog", 3, room, 4096) and won()
""",
        needs="dmesg_restrict off, or CAP_SYSLOG",
    ),
    on(
        "module",
        "load a module into the kernel (an invalid one: it only has to be looked at)",
        """
try:
    call("init_module", b"not a module", 12, b"")
except OSError as error:
    print(error)
    error.errno == errno.ENOEXEC and won()
""",
        needs="CAP_SYS_MODULE and a kernel with modules",
    ),
    on(
        "kexec",
        "replace the running kernel (wrongly: only the right to ask is tested)",
        """
try:
    call("kexec_load", 0, 0, None, 0x7fff)
except OSError as error:
    print(error)
    error.errno == errno.EINVAL and won()
""",
        needs="CAP_SYS_BOOT and a kernel with kexec",
    ),
    on(
        "reboot",
        "ask for a reboot (wrongly: only the right to ask is tested)",
        """
try:
    call("reboot", 1, 2, 3, None)
except OSError as error:
    print(error)
    error.errno == errno.EINVAL and won()
""",
        needs="CAP_SYS_BOOT",
    ),
    on(
        "set-time",
        "set the clock (to nothing)",
        'call("settimeofday", None, None)\nwon()',
        needs="CAP_SYS_TIME",
    ),
    on(
        "set-hostname",
        "rename the machine (as it is)",
        """
name = socket.gethostname().encode()
call("sethostname", name, len(name))
won()
""",
        needs="CAP_SYS_ADMIN",
    ),
    on("ports", "get at the machine's I/O ports", 'call("iopl", 3)\nwon()', needs="CAP_SYS_RAWIO"),
    on(
        "fanotify",
        "watch every file access",
        'call("fanotify_init", 0, 0) and won()',
        needs="CAP_SYS_ADMIN",
    ),
    on(
        "segment-table",
        "change the processor's segment table, a source of kernel bugs",
        'call("modify_ldt", 0, ctypes.create_string_buffer(64), 64)\nwon()',
        needs="modify_ldt in an x86 kernel",
    ),
    on(
        "terminal",
        "type into a terminal (TIOCSTI)",
        """
import fcntl, pty, termios
os.getsid(0) == os.getpid() or os.setsid()
near, far = pty.openpty()
fcntl.ioctl(far, termios.TIOCSCTTY, 0)
fcntl.ioctl(far, termios.TIOCSTI, b"x")
won()
""",
        needs="TIOCSTI in the kernel",
    ),
    on(
        "terminal-high-bits",
        "type into a terminal, with bits in the request that only the filter sees",
        """
import fcntl, pty, termios
os.getsid(0) == os.getpid() or os.setsid()
near, far = pty.openpty()
fcntl.ioctl(far, termios.TIOCSCTTY, 0)
number = 29 if os.uname().machine == "aarch64" else 16
call(number, far, (7 << 32) | termios.TIOCSTI, b"x")
won()
""",
        needs="TIOCSTI in the kernel",
    ),
)

_CODE = """
import mmap
def run(code):
    \"\"\"Call machine code from a page in the low 2 GB.\"\"\"
    page = mmap.mmap(-1, 4096, 0x22 | 0x40, 7)  # private, anonymous, MAP_32BIT; read write execute
    page.write(code)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(place)()
"""

_ROADS: tuple[Probe, ...] = (
    on(
        "calls-of-32-bits",
        "open a socket by the 32-bit numbers, which mean other calls in 64 bits",
        # push rbx; socket(AF_INET, SOCK_STREAM, 0) by int 0x80; pop rbx
        _CODE + 'run(bytes.fromhex("53b867010000bb02000000b90100000031d2cd805bc3")) >= 0 and won()',
        needs="an x86_64 kernel with 32-bit emulation",
    ),
    on(
        "old-calls-of-32-bits",
        "the same through the multiplexed socketcall",
        # socketcall(SYS_SOCKET=1, [2, 1, 0]) with the words on the page itself
        _CODE
        + """
page = mmap.mmap(-1, 4096, 0x22 | 0x40, 7)
place = ctypes.addressof(ctypes.c_char.from_buffer(page))
page[256:268] = struct.pack("<3I", 2, 1, 0)
page[:20] = b"\\x53\\xb8\\x66\\0\\0\\0\\xbb\\1\\0\\0\\0\\xb9" + struct.pack("<I", place + 256) + \\
    b"\\xcd\\x80\\x5b\\xc3"
ctypes.CFUNCTYPE(ctypes.c_int)(place)() >= 0 and won()
""",
        needs="an x86_64 kernel with 32-bit emulation",
    ),
    on(
        "calls-of-x32",
        "open a socket by its x32 number",
        "call(0x40000000 | 41, 2, 1, 0) >= 0 and won()",
        needs="CONFIG_X86_X32_ABI in the kernel",
    ),
    on(
        "high-bits-of-a-number",
        "open a network socket with bits in the number and the family that the kernel drops",
        """
number = 198 if os.uname().machine == "aarch64" else 41
call((9 << 32) | number, (9 << 32) | 2, 1, 0) >= 0 and won()
""",
    ),
)

KERNEL = (*_NAMESPACES, *_RIGHTS, *_CALLS, *_ROADS)
