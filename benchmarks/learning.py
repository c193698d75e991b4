"""Does one command make a policy better? `swarmnode join`, 60 rounds from the tiny policy, seeds 0, 1, 2.

    python benchmarks/learning.py [--quick] [--json FILE]

The baseline is the policy before its first round, on the same held-out draws, in the same process. Claims:
the worst final reward, the best first reward, the smallest gain, and CPU seconds of a whole process (with
imports, both evaluations and the network daemon). --quick: seed 0 only.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import MODELS, arguments, report

from swarmnode.extensions.demonstration.tiny import build_tiny

ROUNDS = 60


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = (0,) if options.quick else (0, 1, 2)
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(MODELS)
        runs = [run(Path(folder) / str(seed), model, seed, ROUNDS) for seed in seeds]
    for seed, one in zip(seeds, runs, strict=True):
        print(
            f"seed {seed}: {one['reward_first']:.3f} -> {one['reward_last']:.3f} in {one['cpu_s']:.1f} CPU s"
        )
    first = [one["reward_first"] for one in runs]
    last = [one["reward_last"] for one in runs]
    gain = [b - a for a, b in zip(first, last, strict=True)]
    cpu_s = [one["cpu_s"] for one in runs]
    claims = {"reward_first": max(first), "reward_last": min(last), "gain": min(gain), "cpu_s": max(cpu_s)}
    spread = {
        name: (min(values), max(values))
        for name, values in {"reward_first": first, "reward_last": last, "gain": gain, "cpu_s": cpu_s}.items()
    }
    report("learning", claims, spread, options.json)


def run(home: Path, model: Path, seed: int, rounds: int, *more: str) -> dict[str, Any]:
    """The last line of one `swarmnode join`, and the CPU seconds that it and its daemons took. `more`:
    further options of it."""
    command = [sys.executable, "-m", "swarmnode", "join", "--home", str(home), "--model", str(model)]
    options = [
        "--preset",
        "tiny",
        "--rounds",
        str(rounds),
        "--seed",
        str(seed),
        "--set",
        "network.listen=127.0.0.1",
        *more,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout.splitlines()[-1]), "cpu_s": cpu_s}


if __name__ == "__main__":
    main()
