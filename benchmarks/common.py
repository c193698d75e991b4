"""What every benchmark shares: its command line, interleaved repeats, a last line for machines to read.

python benchmarks/NAME.py [--quick] [--json FILE] -> text for people ... and one JSON object as the last line
"""

import os

# Before torch is loaded: beside other work, a second thread costs far more than it brings.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from swarmnode.machine.hardware import cpu_flags

T = TypeVar("T")


class TimeIsOver(Exception):
    """The time that a benchmark may take has passed."""


torch.set_num_threads(1)

BUDGET_S = 8 * 60.0
"""Wall time in which rounds are begun, counted from the start of the process. A benchmark ends within ten
minutes on two busy cores; what no longer fits are repeats: the claim stays and its spread is wider."""
_STARTED_S = time.monotonic()

MODELS = Path.home() / ".cache" / "swarmnode" / "models"
"""Where the tiny policy is built once for all of them: that takes a quarter of a minute."""

VECTOR_UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Flags of a CPU, the strongest first: what a ratio of matrix products depends on."""


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has: `quick` (bool) and `json` (Path | None)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: does it run, roughly how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    return parser.parse_args()


def report(
    name: str,
    claims: Mapping[str, float],
    spread: Mapping[str, Sequence[float]],
    json_path: Path | None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print the result as one JSON object, which must be the last line, and write it to `json_path`.

    `spread` holds (low, high) around each claim.
    """
    result = {
        "benchmark": name,
        "claims": {claim: _rounded(value) for claim, value in claims.items()},
        "spread": {claim: [_rounded(low), _rounded(high)] for claim, (low, high) in spread.items()},
        "machine": machine(),
        **(extra or {}),
    }
    line = json.dumps(result)
    if json_path is not None:
        json_path.write_text(line + "\n")
    print(line, flush=True)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_model(),
        "vector_unit": vector_unit(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def vector_unit() -> str | None:
    """The strongest of VECTOR_UNITS that this CPU has; None for none of them, or where nobody tells."""
    flags = cpu_flags()
    return next((unit for unit in VECTOR_UNITS if unit in flags), None)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process for `work`: on a shared machine steadier than the clock on the wall."""
    started = time.process_time()
    work()
    return time.process_time() - started


def elapsed_s() -> float:
    """Return the seconds since this process began."""
    return time.monotonic() - _STARTED_S


def rounds(most: int, share: float = 1.0) -> Iterator[int]:
    """Count rounds, at most so many, while one more still fits into this share of BUDGET_S; one always does.

    >>> list(rounds(2))
    [0, 1]
    """
    longest_s = 0.0
    for number in range(most):
        started_s = time.monotonic()
        if number and elapsed_s() + longest_s > share * BUDGET_S:
            print(f"{number} of {most} rounds: there is no time for another", flush=True)
            return
        yield number
        longest_s = max(longest_s, time.monotonic() - started_s)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeIsOver in the block once it has taken so long."""

    def ring(*_: object) -> None:
        raise TimeIsOver

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def parts(of: Sequence[T]) -> Iterator[tuple[T, float]]:
    """Each part of a benchmark with the share of BUDGET_S by which its rounds are to end.

    >>> list(parts(["a", "b"]))
    [('a', 0.5), ('b', 1.0)]
    """
    return ((part, number / len(of)) for number, part in enumerate(of, 1))


def interleaved(
    variants: Mapping[str, Callable[[], float]], repeats: int, share: float = 1.0
) -> dict[str, list[float]]:
    """Measure each variant once per round, so that a noisy minute falls on all of them alike.

    `repeats` are the rounds, fewer where they do not fit into this share of BUDGET_S.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in rounds(repeats, share):
        for name, measure in variants.items():
            found[name].append(measure())
    return found


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Ratio round by round, of two variants measured interleaved."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median, and the quartiles around it.

    >>> middle([1.0, 2.0, 3.0])
    (2.0, (1.5, 2.5))
    """
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return median(values), (low, high)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
