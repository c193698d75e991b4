"""The interpreter that a confined program runs in: it shuts itself in, and only then runs the text.

sandbox.py -> `python -I -S -c ...` -> [launch] -> namespaces.py, landlock.py, seccomp.py -> the program

One process of ours stays outside of what the program may reach (the first of the new process namespace,
where there is one). It waits, ends what is left, and reports. Each program reads its own text and never had
another's in its memory. Every layer that was asked for stands, or nothing is run.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys

from .kernel import adopt_orphans, die_with_parent, give_up_privileges
from .landlock import restrict
from .namespaces import NOBODY, enter_root, leave
from .seccomp import apply_filter, filtered

TYPE_CHECKING = False
"""Starting is most of what a short program costs: typing, dataclasses, json and socket take 40 ms."""
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any, NoReturn

OTHER_PROGRAM = 3
"""Descriptor of the socket to the other program, where there are two."""

IMPORTED_BY_BOTH = ("json", "typing")
"""Modules that two programs (remote_calls.py) spend most of their start on: they are imported once for
both."""

FILES = "/tmp"
"""Folder that a program may write to, in a root of its own."""

LAST_DESCRIPTOR = 1 << 20

LATE_S = 5.0
"""Seconds after a program's time at which our process ends itself, if nobody is left to end it."""


class LaunchOrder:
    """The order of sandbox.py to this process, as it stands in the command line."""

    codes: list[int]
    """Descriptors of the texts. The first is the program; a second is run beside it."""
    report: int
    """Descriptor that the report is written to."""
    parent: int
    """Process id of who asked for the program. 0: it cannot be seen from this namespace."""
    place: str
    """An empty folder of ours."""
    readable: list[str]
    namespaces: bool
    landlock: bool
    seccomp: bool
    wall_s: float
    cpu_s: int
    memory_bytes: int
    output_bytes: int
    """Bound of sandbox.py, which reads the output."""
    disk_bytes: int
    descriptors: int

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


class Ended(BaseException):
    """Raised when whoever asked for the program has seen enough, or is gone."""


def main(text: str) -> NoReturn:
    """Entry point of the process."""
    order = LaunchOrder(**marshal.loads(bytes.fromhex(text)))
    signal.signal(signal.SIGTERM, _end)
    try:
        if sys.platform == "linux":
            die_with_parent(order.parent)
        if order.namespaces:
            leave()
            die_with_parent(order.parent)
            _attend([_fork(lambda: _first(order))])
        else:
            _keep(order)
    except OSError as error:
        _report(order, f"failed {error}")
    except Ended:
        pass
    os._exit(0)


def _first(order: LaunchOrder) -> None:
    """Runs as the first process of the namespace: when it ends, the kernel ends all others."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    enter_root(order.place, order.readable, order.disk_bytes)
    _keep(order)


def _keep(order: LaunchOrder) -> None:
    """Runs the programs until the first of them has ended, and reports."""
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, order.wall_s + LATE_S)
    if not order.seccomp:
        adopt_orphans()
    channels = _pair() if len(order.codes) > 1 else []
    children = [
        _fork(lambda n=number: _program(order, n, channels[n] if channels else None))
        for number in range(len(order.codes))
    ]
    for channel in channels:
        os.close(channel)
    status, usage = _attend(children)
    cpu_s = usage.ru_utime + usage.ru_stime
    _report(order, f"ended {os.waitstatus_to_exitcode(status)} {cpu_s:.3f}")


def _pair() -> list[int]:
    """Returns a pair of sockets that connects two programs."""
    import _socket

    for name in IMPORTED_BY_BOTH:
        __import__(name)
    return [end.detach() for end in _socket.socketpair()]


def _attend(children: list[int]) -> tuple[int, resource.struct_rusage]:
    """Waits for the first child, ends all others, and returns how the first one ended."""
    left = set(children)
    try:
        while True:
            child, status, usage = os.wait4(-1, 0)
            left.discard(child)
            if child == children[0]:
                return status, usage
    finally:
        for child in left:
            os.kill(child, signal.SIGKILL)
        for child in left:
            os.waitpid(child, 0)
        _end_strays()


def _end_strays() -> None:
    """Ends the processes that an unconfined program has started: they are ours once their parent is gone."""
    try:
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
    except (ChildProcessError, FileNotFoundError):
        return


def _fork(work: Callable[[], None]) -> int:
    """Does `work` in a child, which ends with this process at the latest."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        # The first process of a namespace does not see its parent.
        die_with_parent(0 if os.getpid() == 1 else parent)
        work()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(70)
    except Ended:
        pass
    os._exit(0)


def _program(order: LaunchOrder, number: int, channel: int | None) -> NoReturn:
    """Confines this process and runs a program."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        with os.fdopen(order.codes[number], "rb", closefd=False) as file:
            code = file.read()
        _shut_in(order)
    except OSError as error:
        _report(order, f"failed {error}")
        os._exit(70)
    if number:
        silent = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
    if channel is not None:
        os.dup2(channel, OTHER_PROGRAM)
    os.closerange(OTHER_PROGRAM + (channel is not None), LAST_DESCRIPTOR)
    if order.seccomp:
        apply_filter(filtered(os.getpid(), folders=order.namespaces))
    sys.argv = [""]
    os._exit(_run(code))


def _shut_in(order: LaunchOrder) -> None:
    """Confines this process except for the filter of system calls, which would forbid these very steps."""
    files, keeper = FILES if order.namespaces else order.place, os.getppid()
    os.chdir(files)
    confined = order.namespaces or order.landlock or order.seccomp
    if confined and os.geteuid() == 0:
        _become_nobody(files)
    die_with_parent(keeper)
    _limit(order)
    if confined:
        give_up_privileges()
    if order.landlock:
        restrict([path for path in order.readable if os.path.exists(path)], [files, "/dev/null"])


def _become_nobody(files: str) -> None:
    """Switches root's programs to the user nobody, who can read Python and write to the program's folder. A
    container may forbid the switch; then the other layers have to do."""
    can = False
    try:
        os.chown(files, NOBODY, NOBODY)
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        can = all(os.access(path, os.R_OK, effective_ids=True) for path in (os.__file__, files))
    except OSError:
        pass
    os.seteuid(0)
    os.setegid(0)
    if can:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    elif os.stat(files).st_uid != 0:
        os.chown(files, 0, 0)


def _limit(order: LaunchOrder) -> None:
    soft_and_hard = {
        resource.RLIMIT_CPU: (order.cpu_s, order.cpu_s),
        resource.RLIMIT_AS: (order.memory_bytes, order.memory_bytes),
        resource.RLIMIT_FSIZE: (order.disk_bytes, order.disk_bytes),
        resource.RLIMIT_NOFILE: (order.descriptors, order.descriptors),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, values in soft_and_hard.items():
        hardest = resource.getrlimit(kind)[1]
        soft, hard = (v if hardest == resource.RLIM_INFINITY else min(v, hardest) for v in values)
        resource.setrlimit(kind, (soft, hard))


def _run(code: bytes) -> int:
    """Runs a text as the main module, and returns its exit status."""
    module: ModuleType = type(sys)("__main__")
    sys.modules["__main__"] = module
    status = 1
    try:
        exec(compile(code, "<program>", "exec"), module.__dict__)
        status = 0
    except SystemExit as end:
        status = _status_of(end.code)
    except BaseException as error:  # noqa: BLE001  whatever it is, the program has ended with it
        _print_error(error)
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    return status


def _status_of(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    _print_error(code)
    return 1


def _print_error(error: Any) -> None:
    """Prints an error as Python would, without our frames, even where a program broke what it needs."""
    try:
        import traceback

        if isinstance(error, BaseException):
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(error.with_traceback(frames))
        else:
            os.write(2, f"{error}\n".encode())
    except BaseException:  # noqa: BLE001
        os.write(2, type(error).__name__.encode() + b"\n")


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except BaseException:  # noqa: BLE001
        os.write(2, b"the output could not be written\n")


def _report(order: LaunchOrder, line: str) -> None:
    os.write(order.report, line.encode() + b"\n")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended
