"""What the sandbox costs: milliseconds of a run, beside the same program without isolation and Python alone.

python benchmarks/sandbox.py [--quick] [--json FILE]

Each isolation that this machine has runs a program of one line, in turns with the same program without any
and with an interpreter that does nothing. `passes_tests_ms` is one answer judged by five tests: two programs.
"""

import subprocess
import time
from collections.abc import Callable
from functools import partial

from common import arguments, interleaved, middle, report

from swarmnode.extensions.sandbox.isolation import UNCONFINED, Isolation, candidates, interpreter
from swarmnode.extensions.sandbox.sandbox import holds, run
from swarmnode.extensions.suites.code_tests import Step, share_passed

STEPS: list[Step] = [(f"assert double({number}) == {2 * number}", True) for number in range(5)]


def in_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def a_program(isolation: Isolation) -> None:
    assert run("print(6 * 7)", isolation=isolation).stdout == "42\n"


def an_answer() -> None:
    assert share_passed("def double(n): return 2 * n", STEPS) == 1.0


def main() -> None:
    options = arguments("milliseconds of a program in the sandbox, and without")
    found = [isolation for isolation in candidates() if holds(isolation)]
    works: dict[str, Callable[[], object]] = {
        "python_ms": partial(subprocess.run, [interpreter(), "-S", "-c", "pass"], check=True),
        "unconfined_ms": partial(a_program, UNCONFINED),
        **{_key(isolation): partial(a_program, isolation) for isolation in found},
        **({"passes_tests_ms": an_answer} if found else {}),
    }
    measured = interleaved(
        {name: partial(in_ms, work) for name, work in works.items()}, 20 if options.quick else 300
    )
    middles = {name: middle(values) for name, values in measured.items()}
    for name, (value, (low, high)) in middles.items():
        print(f"{name:<32} {value:6.1f} ({low:.1f}-{high:.1f})")
    report(
        "sandbox",
        claims={name: value for name, (value, _) in middles.items()},
        spread={name: spread for name, (_, spread) in middles.items()},
        json_path=options.json,
    )


def _key(isolation: Isolation) -> str:
    layers = ["namespaces"] if isolation.namespaces else []
    return "_".join([*layers, *(["landlock"] if isolation.landlock else []), "seccomp_ms"])


if __name__ == "__main__":
    main()
