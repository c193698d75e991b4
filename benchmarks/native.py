"""Our C kernels for CPUs against torch's operations: one GRPO step, end to end, with them and without.

    python benchmarks/native.py [--quick] [--json FILE]

Jobs and processes are those of grpo.py, both ours; `policy.cpu_kernels` differs. Samples per CPU second.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import arguments, interleaved, middle, parts, ratios, report
from grpo import WARM_UP_TURNS, Side, jobs
from grpo_job import Job

from swarmnode.extensions.native.compiler import find_compiler, library


def main() -> None:
    options = arguments(__doc__ or "")
    if library() is None:
        raise SystemExit("no kernels to measure: install gcc or clang")
    turns = 3 if options.quick else 12
    claims: dict[str, float] = {}
    spread: dict[str, Sequence[float]] = {}
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="swarmnode-native-") as folder:
        for (name, job), share in parts(list(jobs(Path(folder), turns + WARM_UP_TURNS).items())):
            found = measure(job, Path(folder), turns, share)
            for side, values in found.items():
                rate, (low, high) = middle(values)
                rates[f"{name}/{side}"] = rate
                print(f"{name:15s} {side:8s} {rate:8.1f} samples per CPU s ({low:.1f}-{high:.1f})")
            claim = f"kernels_vs_torch_{name}"
            claims[claim], spread[claim] = middle(ratios(found["kernels"], found["torch"]))
    report("native", claims, spread, options.json, {"rates": rates, "compiler": str(find_compiler())})


def measure(job: Job, folder: Path, turns: int, share: float) -> dict[str, list[float]]:
    """Samples per CPU second, turn by turn, of both sides."""
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Side(
                    name, Path(sys.executable), "grpo_ours", replace(job, kernels=on), folder / f"{name}.log"
                )
            )
            for name, on in (("kernels", True), ("torch", False))
        }
        takes = {name: partial(side.samples_per_cpu_s, job.steps_per_turn) for name, side in sides.items()}
        interleaved(takes, WARM_UP_TURNS)
        return interleaved(takes, turns, share)


if __name__ == "__main__":
    main()
