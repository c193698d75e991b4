"""What a program may do, how its end is told, where none is run. test_escapes.py has the attacks."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmnode.errors import SandboxError
from swarmnode.extensions.sandbox import sandbox
from swarmnode.extensions.sandbox.confinement.kernel import number_of
from swarmnode.extensions.sandbox.confinement.seccomp import filtered
from swarmnode.extensions.sandbox.isolation import UNCONFINED, Isolation, runtime_paths
from swarmnode.extensions.sandbox.sandbox import Limits, ProgramEnd, available
from swarmnode.tasks.processes import unconfined

needs_a_sandbox = pytest.mark.skipif(
    not available().confines, reason="this machine has nothing to make a sandbox of"
)


def run(program: str, *, wall_s: float = 120.0, cpu_s: int = 5, **options: Any) -> ProgramEnd:
    """Run a program with so much time that a busy machine changes nothing."""
    limits = replace(options.pop("limits", Limits()), wall_s=wall_s, cpu_s=cpu_s)
    return sandbox.run(program, limits=limits, **options)


@pytest.fixture
def a_machine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No isolation is to be had, and nobody has said that it may be done without."""
    monkeypatch.setattr(sandbox, "candidates", lambda: iter(()))
    monkeypatch.setattr(sandbox, "_found", [])
    monkeypatch.setattr(unconfined, "_allowed", False)


@needs_a_sandbox
def test_a_program_has_no_input_and_writes_its_output() -> None:
    end = run("import sys\nprint([*sys.stdin])\nprint('aside', file=sys.stderr)")
    assert (end.status, end.stdout, end.stderr, end.ended_by) == (0, "[]\n", "aside\n", None)
    assert end.isolation == available()


@needs_a_sandbox
def test_it_has_the_standard_library_and_a_folder_of_its_own() -> None:
    end = run(
        "import asyncio, collections, decimal, json, math, random, re, tempfile\n"
        "async def slept(): await asyncio.sleep(0); return 7\n"
        "with tempfile.TemporaryFile('w+') as file:\n"
        "    file.write(str(asyncio.run(slept()))); file.seek(0); print(file.read())\n"
        "open('mine', 'w').write('more'); print(open('mine').read())"
    )
    assert (end.stdout, end.stderr) == ("7\nmore\n", "")


@needs_a_sandbox
def test_two_runs_share_nothing() -> None:
    assert run("open('left', 'w').write('x'); import os; print(os.listdir())").stdout == "['left']\n"
    assert run("import os; print(os.listdir())").stdout == "[]\n"


@needs_a_sandbox
def test_strings_hash_alike_in_every_run() -> None:
    assert len({run("print(hash('swarm'), list({'a', 'b', 'c', 'd'}))").stdout for _ in range(3)}) == 1


@needs_a_sandbox
@pytest.mark.parametrize(
    ("program", "status", "last_line"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("import os; os._exit(9)", 9, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("def f(:", 1, "SyntaxError: invalid syntax"),
        ("def f(): f()\nf()", 1, "RecursionError: maximum recursion depth exceeded"),
        ("import sys; sys.stdout = sys.stderr = None; 1 / 0", 1, ""),
        ("import os; os.fork()", 1, "PermissionError: [Errno 1] Operation not permitted"),
    ],
)
def test_its_end_is_told_as_it_was(program: str, status: int, last_line: str) -> None:
    end = run(program)
    assert (end.status, end.ended_by) == (status, None)
    assert [*end.stderr.splitlines(), ""][-1 if not last_line else -2] == last_line


@needs_a_sandbox
def test_a_traceback_shows_the_program_and_nothing_of_ours() -> None:
    end = run("def f():\n    1 / 0\nf()")
    assert 'File "<program>", line 2, in f' in end.stderr and "launch.py" not in end.stderr


@needs_a_sandbox
def test_odd_texts_reach_a_program_and_come_back() -> None:
    assert run("print(ascii('\u00e4\U0001f600'))").stdout == "'\\xe4\\U0001f600'\n"
    assert run("import os; os.write(1, b'\\xff\\xfe')").stdout == "\ufffd\ufffd"
    assert run("print('\ud800')").status == 1
    assert run("").status == 0 and run("\x00").status == 1


@needs_a_sandbox
def test_the_second_program_is_ended_with_the_first() -> None:
    end = run(
        "import os; print(os.read(3, 9))", beside="import os, time; os.write(3, b'hi'); time.sleep(999)"
    )
    assert end.stdout == "b'hi'\n" and end.ended_by is None


@needs_a_sandbox
def test_the_first_program_hears_when_the_second_has_ended() -> None:
    assert run("import os; print(os.read(3, 9))", beside="import os; os._exit(1)").stdout == "b''\n"


@needs_a_sandbox
def test_limits_are_those_that_were_asked_for() -> None:
    end = run("print(len(bytearray(300 << 20)))", limits=Limits(memory_bytes=256 << 20))
    assert end.ended_by == "memory" and end.stderr.endswith("MemoryError\n")
    assert run("print(len(bytearray(300 << 20)))").stdout == f"{300 << 20}\n"
    assert run("print('x' * 100)", limits=Limits(output_bytes=50)).ended_by == "output"


def test_where_nothing_isolates_nothing_is_run(a_machine_without: None) -> None:
    with pytest.raises(SandboxError, match="no sandbox to run strangers' programs in") as caught:
        run("print(1)")
    assert "tasks.sandbox=optional" in caught.value.hint


def test_somebody_may_say_that_it_is_run_all_the_same(a_machine_without: None) -> None:
    unconfined.allow_unconfined(True)
    end = run("import os; print(os.getpid() > 0)")
    assert end.stdout == "True\n" and not end.isolation.confines
    unconfined.allow_unconfined(False)
    with pytest.raises(SandboxError):
        run("print(1)")


def test_limits_hold_without_isolation_too() -> None:
    assert run("while True: pass", cpu_s=1, isolation=UNCONFINED).ended_by == "cpu"


def test_what_a_program_started_is_ended_without_isolation_too() -> None:
    end = run(
        "import os, time\n"
        "heard, says = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    os.fork()\n"
        "    os.write(says, b'%8d' % os.getpid())\n"
        "    time.sleep(999)\n"
        "print(os.read(heard, 8).decode(), os.read(heard, 8).decode())",
        isolation=UNCONFINED,
    )
    assert end.ended_by is None
    assert [number for number in end.stdout.split() if psutil.pid_exists(int(number))] == []
    assert run("import time; time.sleep(999)", wall_s=0.5, isolation=UNCONFINED).ended_by == "wall"


@pytest.mark.parametrize(
    ("command", "error"),
    [("/bin/false", "ended before the program"), ("/no/such/command", "cannot start a process")],
)
def test_an_interpreter_that_does_not_start_is_an_error_and_no_run(
    monkeypatch: pytest.MonkeyPatch, command: str, error: str
) -> None:
    monkeypatch.setattr(sandbox, "interpreter", lambda: command)
    with pytest.raises(SandboxError, match=error):
        run("print(1)", isolation=UNCONFINED)


@pytest.mark.parametrize(
    ("isolation", "confines", "words"),
    [
        (UNCONFINED, False, "programs would run without a sandbox"),
        (Isolation(seccomp=True), False, "programs would run without a sandbox"),
        (Isolation(landlock=5), False, "programs would run without a sandbox"),
        (Isolation(namespaces=True, seccomp=True), True, "a sandbox of namespaces and seccomp"),
    ],
)
def test_an_isolation_says_what_it_is_made_of(isolation: Isolation, confines: bool, words: str) -> None:
    assert isolation.confines is confines
    assert words in isolation.describe()


def test_what_may_be_read_is_the_runtime_and_nothing_of_the_user() -> None:
    assert str(Path.home()) not in runtime_paths()
    assert sys.prefix == sys.base_prefix or not any(path.startswith(sys.prefix) for path in runtime_paths())
    assert not {"/", "/home", "/root", "/etc", "/proc", "/sys", "/usr", "/tmp"} & set(runtime_paths())


# ---- the filter, as a small machine would run it ----


def verdict(name: str, *arguments: int, machine: str = "x86_64", own: int = 7) -> str:
    number = number_of(name, machine)
    assert number is not None
    return verdict_on(number, *arguments, machine=machine, own=own)


def verdict_on(number: int, *arguments: int, machine: str = "x86_64", own: int = 7, arch: int = 0) -> str:
    """What the filter says of a system call."""
    architecture = arch or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = {0: number, 4: architecture}
    for place, argument in enumerate((*arguments, *[0] * (6 - len(arguments)))):
        words |= {16 + 8 * place: argument & 0xFFFFFFFF, 20 + 8 * place: argument >> 32 & 0xFFFFFFFF}
    program, at, held = filtered(own, folders=False, machine=machine), 0, 0
    while True:
        code, true, false, value = program[at]
        at += 1
        match code:
            case 0x20:
                held = words[value]
            case 0x54:
                held &= value
            case 0x15:
                at += true if held == value else false
            case 0x35:
                at += true if held >= value else false
            case _:
                return {0x7FFF0000: "allowed", 0x00050001: "refused", 0x80000000: "killed"}[value]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_looks_at_what_matters_in_a_call(machine: str) -> None:
    def said(name: str, *arguments: int) -> str:
        return verdict(name, *arguments, machine=machine)

    assert said("read") == said("exit_group") == said("futex") == "allowed"
    assert said("mkdirat") == said("pivot_root") == "refused"
    assert (said("kill", 7, 9), said("kill", 8), said("kill", 2**64 - 1)) == ("allowed", "refused", "refused")
    assert said("kill", 7 | 1 << 32, 9) == "allowed"  # The kernel reads an int: that is 7.
    assert (said("prlimit64", 0, 7, 0, 1), said("prlimit64", 0, 7, 1)) == ("allowed", "refused")
    assert (said("prlimit64", 0, 7, 1 << 32), said("prlimit64", 1, 7, 0)) == ("refused", "refused")
    assert (said("socketpair", 1, 0o2000001), said("socketpair", 1, 2)) == ("allowed", "refused")
    assert (said("socketpair", 2, 1), said("fcntl", 1, 8)) == ("refused", "refused")
    assert (said("openat", 0, 0, 0o1101), said("openat", 0, 0, 0o1000)) == ("allowed", "refused")
    assert (said("openat", 0, 0, 0), said("openat", 0, 0, 3)) == ("allowed", "refused")
    assert (said("ioctl", 0, 0x5401), said("ioctl", 0, 0x5412)) == ("allowed", "refused")


def test_calls_that_nobody_thought_of_are_refused() -> None:
    assert {verdict_on(number) for number in range(424, 1000) if number != 439} == {"refused"}
    assert verdict_on(0x40000000) == verdict_on(0x40000000 | 59) == "refused"
    assert verdict_on(0, arch=0x40000003) == verdict_on(63, machine="aarch64", arch=0xC000003E) == "killed"
