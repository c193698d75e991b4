"""Is the README's task learnt, whatever the seed? Its file and its command as they stand there, ten seeds.

    python benchmarks/first_task.py [--quick] [--json FILE]

The baseline is the policy before its first round, on the same held-out draws, in the same process. Each seed
trains alone: no other node could have taught it. Claims: the share of seeds whose held-out reward at the end
is at least 0.5, the latest round in which an answer was paid for the first time, the worst final reward, the
best first one, and CPU seconds of a whole process. `with_demonstrations`: the share of seeds 1, 2 and 3
that learn the task of last.py from two demonstrations; its baseline, without them, is printed beside it.
--quick: two seeds, then one.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import MODELS, arguments, report, rounds
from last import DEMONSTRATIONS
from learning import run

import swarmnode as sn
from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.machine.storage import resolve_paths

README = Path(__file__).parent.parent / "README.md"
SEEDS = (7, 2, 0, 1, 3, 4, 5, 6, 8, 9)
"""The slowest come first."""
LEARNT = 0.5
SHOWN_SEEDS = (1, 2, 3)
"""Of last.py, where none is ever right without demonstrations."""


def main() -> None:
    options = arguments(__doc__ or "")
    name, code, asked_rounds = task_of(README.read_text())
    seeds = SEEDS[:2] if options.quick else SEEDS
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / name
        task.write_text(code)
        model = build_tiny(Path(folder))
        for number in rounds(len(seeds)):
            home = Path(folder) / str(seeds[number])
            one = run(
                home, model, seeds[number], asked_rounds, "--task", str(task), "--set", "network.mdns=false"
            )
            first_paid = first_rewarded_round(resolve_paths(home).logs / "metrics.jsonl", asked_rounds)
            found.append({**one, "first_rewarded_round": first_paid})
            print(
                f"seed {seeds[number]}: {one['reward_first']:.3f} -> {one['reward_last']:.3f}, first paid in"
                f" round {first_paid}, {one['cpu_s']:.1f} CPU s",
                flush=True,
            )
    shown_seeds = SHOWN_SEEDS[:1] if options.quick else SHOWN_SEEDS
    shown = [with_demonstrations(seed) for seed in shown_seeds]
    alone = [with_demonstrations(seed, None) for seed in shown_seeds]
    for name, rewards in {"with two demonstrations": shown, "without them": alone}.items():
        print(f"{name}: {', '.join(f'{one:.3f}' for one in rewards)}", flush=True)
    of = {key: [one[key] for one in found] for key in ("reward_first", "reward_last", "cpu_s")}
    first_paid = [one["first_rewarded_round"] for one in found]
    learnt = [float(last >= LEARNT) for last in of["reward_last"]]
    claims = {
        "learnt_share": sum(learnt) / len(learnt),
        "with_demonstrations": sum(one >= LEARNT for one in shown) / len(shown),
        "first_rewarded_round_worst": max(first_paid),
        "reward_first": max(of["reward_first"]),
        "reward_last": min(of["reward_last"]),
        "cpu_s": max(of["cpu_s"]),
    }
    spread: dict[str, Sequence[float]] = {key: (min(values), max(values)) for key, values in of.items()}
    spread["first_rewarded_round_worst"] = (min(first_paid), max(first_paid))
    report("first_task", claims, spread, options.json, extra={"seeds": len(found), "rounds": asked_rounds})


def with_demonstrations(
    seed: int, given: Sequence[Mapping[str, str]] | None = tuple(DEMONSTRATIONS)
) -> float:
    """The held-out reward after 120 rounds of last.py alone, from two demonstrations or those `given`."""
    with tempfile.TemporaryDirectory() as home:
        settings = {"node.seed": seed, "exchange.enabled": False}
        summary = sn.run(
            Path(__file__).parent / "last.py",
            demonstrations=given,
            model=build_tiny(MODELS),
            rounds=120,
            home=home,
            preset="tiny",
            settings=settings,
            log=False,
        )
    return summary.reward_last or 0.0


def task_of(readme: str) -> tuple[str, str, int]:
    """The name and the text of the task file, and the rounds that the command beside it asks for."""
    file = re.search(r"```python\n# (\w+\.py)\n(.*?)```", readme, re.DOTALL)
    if file is None:
        raise SystemExit("the README shows no task file")
    command = re.search(rf"^swarmnode join --task {file[1]} --rounds (\d+)", readme, re.MULTILINE)
    if command is None:
        raise SystemExit(f"the README does not say for how many rounds {file[1]} is trained")
    return file[1], file[2], int(command[1])


def first_rewarded_round(metrics: Path, rounds: int) -> int:
    """The first round in which an answer was paid; one more than there were where none ever was."""
    for line in metrics.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "round" and event.get("reward.own", 0.0) > 0:
            return int(event["progress.round"])
    return rounds + 1


if __name__ == "__main__":
    main()
