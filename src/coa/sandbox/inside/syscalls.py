"""The system calls a program may make, and the numbers of both architectures.

The list is one of what is allowed. Everything else fails with EPERM, so that a library which tries
something optional goes on without it; what nobody but an attacker calls ends the process. Each
entry is name:x86_64:aarch64, and `-` where the architecture has no such call.
"""

from __future__ import annotations

ALLOWED = (
    "read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 "
    "pwritev:296:70 preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 openat2:437:437 "
    "creat:85:- close:3:57 close_range:436:436 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 "
    "statx:332:291 statfs:137:43 fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 "
    "lseek:8:62 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 "
    "rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- "
    "unlink:87:- unlinkat:263:35 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 "
    "readlink:89:- readlinkat:267:78 umask:95:166 truncate:76:45 ftruncate:77:46 fallocate:285:47 "
    "fsync:74:82 fdatasync:75:83 fadvise64:221:223 sendfile:40:71 "
    "copy_file_range:326:285 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 "
    "llistxattr:195:12 flistxattr:196:13 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 "
    "select:23:- pselect6:270:72 poll:7:- ppoll:271:73 epoll_create:213:- epoll_create1:291:20 "
    "epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- "
    "eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 "
    "signalfd:282:- signalfd4:289:74 mprotect:10:226 munmap:11:215 mremap:25:216 "
    "madvise:28:233 brk:12:214 msync:26:227 mincore:27:232 membarrier:324:283 "
    "rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 "
    "rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 futex:202:98 "
    "futex_waitv:449:449 set_robust_list:273:99 set_tid_address:218:96 rseq:334:293 "
    "arch_prctl:158:- sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 "
    "sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 "
    "getpriority:140:141 getcpu:309:168 clock_gettime:228:113 clock_getres:229:114 "
    "clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201:- "
    "setitimer:38:103 getitimer:36:102 alarm:37:- pause:34:- times:100:153 "
    "getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 "
    "getresgid:120:150 getgroups:115:158 getpid:39:172 gettid:186:178 getppid:110:173 "
    "getpgrp:111:- getpgid:121:155 getsid:124:156 setpgid:109:154 setsid:112:157 uname:63:160 "
    "sysinfo:99:179 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 getrandom:318:278 "
    "exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 restart_syscall:219:128 "
    "sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 "
    "getsockname:51:204 getpeername:52:205"
)
"""Absent on purpose: socket and connect (no network), execve (there is nothing to run), memfd and
System V memory (neither counts towards the limit of a process), timers that send a chosen signal
(SIGCONT would wake a frozen session), flock (a message to whoever sees the same file), anything
that changes identity."""

OWN_DISK = "chmod:90:- fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- utimensat:280:88"
"""Landlock does not govern these: allowed only where no file of the host is in sight."""

FORKING = "fork:57:- vfork:58:-"
"""Allowed where every process can be found and killed: in a process namespace of its own."""

EXAMINED = (
    "clone:56:220 clone3:435:435 ioctl:16:29 prctl:157:167 fcntl:72:25 socketpair:53:199 "
    "mmap:9:222 getsockopt:55:209 prlimit64:302:261 kill:62:129 tgkill:234:131 "
    "sched_setaffinity:203:122"
)
"""Allowed with some arguments only; see `confine`."""

FATAL = (
    "ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 "
    "pidfd_getfd:438:438 kcmp:312:272 mount:165:40 umount2:166:39 pivot_root:155:41 "
    "chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431 "
    "fsmount:432:432 fspick:433:433 mount_setattr:442:442 setns:308:268 unshare:272:97 "
    "bpf:321:280 perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425 "
    "io_uring_enter:426:426 io_uring_register:427:427 keyctl:250:219 add_key:248:217 "
    "request_key:249:218 init_module:175:105 finit_module:313:273 delete_module:176:106 "
    "kexec_load:246:104 kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225 "
    "iopl:172:- ioperm:173:- acct:163:89 quotactl:179:60 open_by_handle_at:304:265 "
    "name_to_handle_at:303:264 settimeofday:164:170 clock_settime:227:112 adjtimex:159:171 "
    "clock_adjtime:305:266 syslog:103:116 fanotify_init:300:262 vhangup:153:58 modify_ldt:154:-"
)
"""The worst: no program that means well calls these, so whoever does is ended."""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Machine -> (column above, the kernel's number of the architecture)."""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Name -> number on that machine, without the calls it does not have."""
    column, _ = ARCHITECTURES[machine]
    entries = [entry.split(":") for entry in table.split()]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
