"""Does a policy learn to use tools, and what does it bring to keep keys and values between its turns?

    python benchmarks/environments.py [--quick] [--json FILE]

*Learning*: `swarmnode join` on an environment with two tools (environments_task.py), from a tiny policy
that has seen them called and makes the wrong call one half of the time (environments_policy.py), seeds 0,
1, 2. The baseline is the same policy before its first round, on the same held-out draws.

*Kept*: conversations whose turns are one sequence on the embedded engine, with the keys and values of the
turns before kept, against the same engine that reads the whole conversation again at every turn
(kept_kv.py).

Claims: the best first reward, the worst last one, wall seconds of the longest run (imports, evaluations and
the network daemon included), and CPU time of conversations read again by that of conversations kept.
--quick: seed 0, one repeat of a quarter of the conversations. The policy is built once, in a minute of CPU.
"""

import tempfile
import time
from pathlib import Path

from common import MODELS, arguments, report
from environments_policy import build
from kept_kv import kept_kv_gain
from learning import run

TASK = Path(__file__).with_name("environments_task.py")
ROUNDS = 20
SETTINGS = ("--task", str(TASK), "--set", "rollout.max_tokens=64", "--set", "exchange.enabled=false")


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = (0,) if options.quick else (0, 1, 2)
    first, last, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = build(MODELS)
        for seed in seeds:
            began = time.monotonic()
            found = run(Path(folder) / str(seed), model, seed, ROUNDS, *SETTINGS)
            seconds.append(time.monotonic() - began)
            first.append(found["reward_first"])
            last.append(found["reward_last"])
            print(f"seed {seed}: {first[-1]:.3f} -> {last[-1]:.3f} in {seconds[-1]:.0f} s")
    kept = kept_kv_gain(1, conversations=8) if options.quick else kept_kv_gain(5)
    for name, rate in kept.tokens_per_cpu_s.items():
        again = kept.reprefilled_tokens[name]
        print(f"{name:6} {kept.cpu_s[name]:6.2f} CPU s {rate:8,.0f} tokens/CPU s, {again:,} computed again")
    claims = {
        "reward_first": max(first),
        "reward_last": min(last),
        "seconds": max(seconds),
        "kv_kept_gain": kept.gain,
    }
    spread = {
        "reward_first": (min(first), max(first)),
        "reward_last": (min(last), max(last)),
        "seconds": (min(seconds), max(seconds)),
        "kv_kept_gain": kept.spread,
    }
    report("environments", claims, spread, options.json, extra={"tokens_per_cpu_s": kept.tokens_per_cpu_s})


if __name__ == "__main__":
    main()
