"""Does a policy learn to use tools, and what is it worth to keep keys and values between turns?

    python benchmarks/environments.py [--quick] [--json FILE]

*Learning*: `swarmnode join` on an environment with two tools (environments_task.py) from a tiny policy that has
seen calls and makes the wrong one half of the time (environments_policy.py): held-out reward before and after, and
the wall seconds of the whole process. The baseline is the same policy before its first round.

*Kept*: conversations whose turns are one sequence, on the embedded engine, with the keys and values of earlier
turns kept, against the same engine computing the whole conversation again at every turn (kept_kv.py).

Claims: `reward_first` (highest), `reward_last` (lowest), `seconds` (longest run), `kv_kept_gain`. --quick: one seed.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, report
from environments_policy import build
from learning import joined

TASK = Path(__file__).with_name("environments_task.py")
ROUNDS = 60


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = (0,) if options.quick else (0, 1, 2)
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        runs = [learn(Path(folder) / str(seed), model, seed) for seed in seeds]
    print(runs, median)


def learn(home: Path, model: Path, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {}
    return {**found, "wall_s": time.monotonic() - began}


if __name__ == "__main__":
    sys.exit(main())
