"""Calls of the Linux kernel that Python has no function for, and the numbers of those that are named.

namespaces.py, landlock.py, seccomp.py -> [kernel] -> libc
"""

import ctypes
import os
import signal
import sys

MACHINE = os.uname().machine
LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x20080522

_NUMBERS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "dup": (32, 23),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "mkdirat": (258, 34),
    "unlinkat": (263, 35),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "symlinkat": (266, 36),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "ftruncate": (77, 46),
    "getdents64": (217, 61),
    "umask": (95, 166),
    "flock": (73, 32),
    "fadvise64": (221, 223),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "times": (100, 153),
    "getrusage": (98, 165),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "restart_syscall": (219, 128),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "recvfrom": (45, 207),
    "sendto": (44, 206),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "openat": (257, 56),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "pivot_root": (155, 41),
    "open": (2, None),
    "stat": (4, None),
    "lstat": (6, None),
    "poll": (7, None),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "dup2": (33, None),
    "mkdir": (83, None),
    "rmdir": (84, None),
    "unlink": (87, None),
    "rename": (82, None),
    "readlink": (89, None),
    "symlink": (88, None),
    "time": (201, None),
    "alarm": (37, None),
    "pause": (34, None),
    "getdents": (78, None),
    "epoll_create": (213, None),
    "epoll_wait": (232, None),
    "getpgrp": (111, None),
    "eventfd": (284, None),
    "getrlimit": (97, None),
}
"""System calls by name: their numbers on x86-64, and on aarch64, as on all newer ones."""

_COLUMNS = {"x86_64": 0, "aarch64": 1}


def number_of(name: str, machine: str = MACHINE) -> int | None:
    """Returns the number of a system call on this machine, or None if it has no such call.

    >>> number_of("read", "x86_64"), number_of("open", "aarch64")
    (0, None)
    """
    return _NUMBERS[name][_COLUMNS[machine]]


def checked(result: int, what: str) -> int:
    """Returns the result of a call of libc. Raises OSError if it is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Calls the kernel by number. Raises OSError if it refuses."""
    return checked(LIBC.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def die_with_parent(parent: int) -> None:
    """Makes the kernel end this process when `parent`, which started it, ends. 0: the parent is in another
    namespace. Raises OSError if it has ended."""
    if sys.platform != "linux":
        return
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        raise OSError("the process that asked for this one is gone")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose their own, if the kernel supports it."""
    if sys.platform == "linux":
        checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def give_up_privileges() -> None:
    """Drops every capability, and lets no program that is started bring any back. A crash writes no core,
    which a handler of the machine's might read with rights that we do not have."""
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    checked(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")
