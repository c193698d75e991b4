"""The system calls that a program may make: for computing and for its own files, and no others."""

from __future__ import annotations

import ctypes
import struct

from .kernel import LIBC, MACHINE, checked, number_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN = """
read write close lseek readv writev pread64 pwrite64 dup dup2 dup3 pipe pipe2 flock ftruncate fadvise64
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
fstat stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64
getcwd chdir fchdir umask rename renameat renameat2 unlink unlinkat symlink symlinkat
mmap mprotect munmap mremap madvise brk futex set_robust_list set_tid_address rseq membarrier
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause
alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getrusage getrlimit sched_yield sched_getaffinity getrandom sysinfo uname
getpid gettid getppid getpgrp getuid geteuid getgid getegid getresuid getresgid getgroups
wait4 waitid restart_syscall exit exit_group recvfrom sendto shutdown
getsockname getpeername getsockopt
"""
"""System calls that are allowed with any arguments."""

_FOLDERS = "mkdir mkdirat rmdir"
"""System calls that are allowed if the program writes to a file system that vanishes with it."""

_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python asks of a file that it opens."""

_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. No locks: they would have no bound."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_O_TRUNC, _O_ACCMODE = 0o1000, 0o3
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF

_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050001, 0x7FFF0000
_LOAD, _AND, _RETURN, _IF_EQUAL, _IF_AT_LEAST = 0x20, 0x54, 0x06, 0x15, 0x35

_SET_SECCOMP, _FILTER_MODE = 22, 2

Instruction = tuple[int, int, int, int]
"""One instruction of classic BPF: code, where to go if true, where if false, and its number."""


def seccomp_is_here(machine: str = MACHINE) -> bool:
    """Returns True if this machine can restrict programs to our list of system calls."""
    try:
        with open("/proc/self/status") as status:
            return machine in _ARCHITECTURES and any(line.startswith("Seccomp:") for line in status)
    except OSError:
        return False


def filtered(own: int, *, folders: bool, machine: str = MACHINE) -> list[Instruction]:
    """Returns the filter of a program whose process has the number `own`. `folders`: True if it may make
    folders.

    >>> len(filtered(7, folders=False)) < 4096
    True
    """
    names = (_PLAIN + (_FOLDERS if folders else "")).split()
    numbers = [number for name in names if (number := number_of(name, machine)) is not None]
    checks: dict[str, list[Instruction]] = {
        "ioctl": _one_of(1, _TERMINAL_QUESTIONS),
        "fcntl": _one_of(1, _DESCRIPTOR_COMMANDS),
        "kill": _one_of(0, (own,)),
        "tgkill": _one_of(0, (own,)),
        # Its own limits, and only to read them: that is `resource.getrlimit`.
        "prlimit64": [*_only(0, 0), *_only(2, 0), (_LOAD, 0, 0, _high(2)), *_equal_or_refuse(0), _allow()],
        # asyncio wakes itself through a pair. Not of datagrams: those can be sent to any address.
        "socketpair": [
            *_only(0, _AF_UNIX),
            (_LOAD, 0, 0, _low(1)),
            (_AND, 0, 0, _SOCK_TYPES),
            *_equal_or_refuse(_SOCK_STREAM),
            _allow(),
        ],
        "open": _opening(1),
        "openat": _opening(2),
    }
    instructions = _preamble(machine)
    for number in numbers:
        instructions += [(_IF_EQUAL, 0, 1, number), _allow()]
    for name, check in checks.items():
        if (number := number_of(name, machine)) is not None:
            instructions += [(_IF_EQUAL, 0, len(check), number), *check]
    return [*instructions, _refuse()]


def apply_filter(instructions: Sequence[Instruction]) -> None:
    """Keeps this process to the filter, for good. Raises OSError. PR_SET_NO_NEW_PRIVS must have been set."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(held))
    zero = ctypes.c_ulong(0)
    checked(LIBC.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), program, zero, zero), "PR_SET_SECCOMP")


def _preamble(machine: str) -> list[Instruction]:
    """Instructions that kill a program which calls by another architecture's numbers, and refuse x32
    calls."""
    start = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    return [*start, (_IF_AT_LEAST, 0, 1, _X32), _refuse()] if machine == "x86_64" else start


def _opening(flags: int) -> list[Instruction]:
    """Instructions that refuse to empty a file opened for reading, and access mode 3: early versions of
    landlock check neither."""
    return [
        (_LOAD, 0, 0, _low(flags)),
        (_AND, 0, 0, _O_TRUNC | _O_ACCMODE),
        (_IF_EQUAL, 0, 1, _O_TRUNC),
        _refuse(),
        (_AND, 0, 0, _O_ACCMODE),
        (_IF_EQUAL, 0, 1, _O_ACCMODE),
        _refuse(),
        _allow(),
    ]


def _one_of(argument: int, values: Sequence[int]) -> list[Instruction]:
    """Instructions that allow a call if the lower half of an argument, all that the kernel reads of an int,
    is one of these."""
    block: list[Instruction] = [(_LOAD, 0, 0, _low(argument))]
    for value in values:
        block += [(_IF_EQUAL, 0, 1, value), _allow()]
    return [*block, _refuse()]


def _only(argument: int, value: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, _low(argument)), *_equal_or_refuse(value)]


def _equal_or_refuse(value: int) -> list[Instruction]:
    return [(_IF_EQUAL, 1, 0, value), _refuse()]


def _low(argument: int) -> int:
    return 16 + 8 * argument


def _high(argument: int) -> int:
    return 20 + 8 * argument


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _refuse() -> Instruction:
    return (_RETURN, 0, 0, _REFUSE)
