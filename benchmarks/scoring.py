"""What judges cost a node: answers scored a second, and how long a round waits for scores after its last one.

python benchmarks/scoring.py [--quick] [--json FILE]

`cpu_*`, `wait_*`: scored completions a second of a judge that computes (a millisecond an answer) and of one
that waits (50 ms a group), in groups of 8, by one and two processes, and by a plain call in this process,
which nothing can end when it hangs. The three take turns.

`wait_share`: seconds from the last answer of a round to its last score, over the seconds of the round, as the
node itself counts them; real nodes with the tiny policy, the worse of the built-in tasks as the preset has
them (rounds of 0.1 s) and of the judge that waits (32 groups of 8 in 64 slots, answers of up to 128 tokens,
refill: rounds of some seconds). Beside it the same with one process, and with 8 groups a round, where 50 ms
are more.

`rounds_lost`: rounds that a node did not finish whose judge hangs now and then, those after an error that
ended it among them; `deadlines`: how long rounds waited for each hang, in deadlines; `rounds_ratio`: rounds a
second beside one whose judge never hangs.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from common import MODELS, arguments, interleaved, middle, parts, ratios, report, rounds

import swarmnode as sn
from swarmnode.errors import TaskError
from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.task import Task

EXAMPLES = """
import random, time

def examples(seed):
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choice("abcdefgh") for _ in range(4))
        yield f"story {word} {rng.randrange(10**6)}", word

def share(text, letters):
    return sum(map(text.count, letters)) / (1 + len(text))

def reward(completions, answer, **columns):
"""
RETURN = "    return [share(text, word) for text, word in zip(completions, answer)]\n"
JUDGES = {
    "cpu": "    sum(number * number for number in range(16_000 * len(completions)))\n" + RETURN,
    "wait": "    time.sleep(0.05)\n" + RETURN,
}
HANGS = "    import zlib\n    while zlib.crc32(completions[0].encode()) % {one_in} == 7: pass\n" + RETURN
NEVER = 2**32
ANSWERS = [f"answer {number} abcdefgh" for number in range(8)]
SKIPPED = 2
"""Rounds that begin a run and are not counted: processes start, the engine is timed."""
ALONE = {
    "exchange.enabled": False,
    "network.listen": "127.0.0.1",
    "node.eval_every": 0,
    "node.seed": 0,
    "tasks.score_timeout_s": 5.0,
}
LONG_ROUNDS = {
    "rollout.mode": "refill",
    "rollout.overlap": "on",
    "rollout.max_tokens": 128,
    "rollout.slots": 64,
}
DEADLINE_S = 1.0
ONE_IN = 60
"""Groups of which one hangs the runaway judge."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    repeats: int
    groups: int
    short_rounds: int
    long_rounds: int
    groups_a_round: int


FULL = Plan(7, 48, 60, 8, 32)
QUICK = Plan(1, 4, 4, 1, 4)


def main() -> None:
    options = arguments("scored completions a second, and how long rounds wait for scores")
    plan = QUICK if options.quick else FULL
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(MODELS)
        throughput(Path(folder), plan, claims, spread)
        waiting(Path(folder), model, plan, claims, spread)
        runaway(Path(folder), model, plan, claims, spread)
    report("scoring", claims, spread, options.json)


def task_file(folder: Path, name: str, judge: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(EXAMPLES + judge)
    return str(path)


# ---- scored completions a second ----


def throughput(
    folder: Path, plan: Plan, claims: dict[str, float], spread: dict[str, tuple[float, float]]
) -> None:
    """One judge after the other, its three contenders in turns."""
    for (judge, body), share in parts(list(JUDGES.items())):
        path = task_file(folder, judge, body)
        contenders = {
            "in_process": (load_task(path), 1),
            "1_worker": (isolate(path, 60.0, workers=1), 1),
            "2_workers": (isolate(path, 60.0, workers=2), 2),
        }
        found = interleaved(
            {
                name: partial(per_second, task, threads, plan.groups)
                for name, (task, threads) in contenders.items()
            },
            plan.repeats,
            share=0.3 * share,
        )
        for task, _ in contenders.values():
            if isinstance(task, IsolatedTask):
                task.close()
        compared = {
            **{f"{judge}_{name}_per_s": values for name, values in found.items()},
            f"{judge}_2_workers_vs_1": ratios(found["2_workers"], found["1_worker"]),
            f"{judge}_2_workers_vs_in_process": ratios(found["2_workers"], found["in_process"]),
        }
        for name, values in compared.items():
            claims[name], spread[name] = middle(values)
            print(f"{name:<32} {claims[name]:8.4g} ({spread[name][0]:.4g}-{spread[name][1]:.4g})", flush=True)


def per_second(task: Task, threads: int, groups: int) -> float:
    """Completions scored a second, by so many threads that ask."""
    examples = list(islice(task.examples(0), groups + threads))
    with ThreadPoolExecutor(threads) as asking:
        score: Callable[[Any], Any] = partial(_score, task)
        list(asking.map(score, examples[groups:] * 2))  # processes start
        began = time.perf_counter()
        list(asking.map(score, examples[:groups]))
        return groups * len(ANSWERS) / (time.perf_counter() - began)


def _score(task: Task, example: Any) -> None:
    task.score(example, ANSWERS)


# ---- rounds of a node ----


@dataclass(frozen=True)
class NodeRun:
    """What a run came to after the rounds that are skipped."""

    rounds: int
    seconds: float
    wait_s: float
    lost_groups: int
    lost_rounds: int
    """Rounds that were asked for and not finished."""

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.seconds


def run_node(task: str, model: Path, count: int, settings: Mapping[str, Any]) -> NodeRun:
    """A node alone, in a home of its own."""
    seen: list[tuple[float, NodeStatus]] = []
    with tempfile.TemporaryDirectory() as home:
        node = sn.Node(
            task,
            model=model,
            preset="tiny",
            rounds=SKIPPED + count,
            home=home,
            settings={**ALONE, **settings},
            on_round=lambda status: seen.append((time.perf_counter(), status)),
            log=False,
        )
        try:
            node.run()
        except TaskError as error:
            print(
                f"the node ended after {len(seen)} of {SKIPPED + count} rounds: {error.message}", flush=True
            )
    return summed_up(seen, count)


def summed_up(seen: Sequence[tuple[float, NodeStatus]], count: int) -> NodeRun:
    """What a run came to of which so many rounds were asked for, besides those that are skipped. `seen`:
    the end of each round that was finished, and the status at it. Raises SystemExit where there is nothing
    to measure."""
    if len(seen) < SKIPPED + 1:
        raise SystemExit(f"{len(seen)} rounds were finished: too few to measure anything")
    (began, before), (ended, after) = seen[SKIPPED - 1], seen[-1]
    return NodeRun(
        len(seen) - SKIPPED,
        ended - began,
        after.generation.score_wait_s - before.generation.score_wait_s,
        after.generation.unjudged_groups - before.generation.unjudged_groups,
        SKIPPED + count - len(seen),
    )


def waiting(
    folder: Path, model: Path, plan: Plan, claims: dict[str, float], spread: dict[str, tuple[float, float]]
) -> None:
    """The share of a round in which nothing is left to generate and scores are missing."""
    judge = task_file(folder, "wait", JUDGES["wait"])
    kinds: dict[str, tuple[str, int, dict[str, Any]]] = {
        "wait_share_builtin": ("builtin", plan.short_rounds, {}),
        "wait_share_50ms": (
            judge,
            plan.long_rounds,
            {**LONG_ROUNDS, "rollout.groups": plan.groups_a_round},
        ),
    }
    if plan is FULL:
        kinds["wait_share_50ms_1_worker"] = judge, plan.long_rounds, {**LONG_ROUNDS, "tasks.workers": 1}
        short = {**LONG_ROUNDS, "rollout.groups": 8}
        kinds["wait_share_50ms_short_rounds"] = judge, plan.long_rounds, short
    found: dict[str, list[NodeRun]] = {name: [] for name in kinds}
    for _ in rounds(1 if plan is QUICK else 2, share=0.7):
        for name, (task, count, settings) in kinds.items():
            found[name].append(run_node(task, model, count, settings))
    for name, several in found.items():
        shares = [one.wait_share for one in several]
        claims[name], spread[name] = max(shares), (min(shares), max(shares))
        round_s = fmean(one.seconds / one.rounds for one in several)
        print(f"{name:<32} {claims[name]:8.3f}, rounds of {round_s:.2f} s", flush=True)
    worst = max("wait_share_builtin", "wait_share_50ms", key=lambda name: claims[name])
    claims["wait_share"], spread["wait_share"] = claims[worst], spread[worst]


def runaway(
    folder: Path, model: Path, plan: Plan, claims: dict[str, float], spread: dict[str, tuple[float, float]]
) -> None:
    """A judge that hangs on some answers, beside one that looks at them as closely and never hangs."""
    settings = {
        **LONG_ROUNDS,
        "rollout.groups": plan.groups_a_round,
        "tasks.score_timeout_s": DEADLINE_S,
        "tasks.max_failures": 10,
    }
    hanging = task_file(folder, "hanging", HANGS.format(one_in=ONE_IN))
    calm = task_file(folder, "calm", HANGS.format(one_in=NEVER))
    count = plan.long_rounds
    undisturbed, disturbed = (run_node(task, model, count, settings) for task in (calm, hanging))
    hangs = max(1, disturbed.lost_groups)
    figures = {
        "rounds_lost": float(disturbed.lost_rounds),
        "hangs": float(disturbed.lost_groups),
        "deadlines": (disturbed.wait_s - undisturbed.wait_s) / (hangs * DEADLINE_S),
        "rounds_ratio": (disturbed.rounds / disturbed.seconds) / (undisturbed.rounds / undisturbed.seconds),
    }
    for name, value in figures.items():
        claims[name], spread[name] = value, (value, value)
        print(f"{name:<32} {value:8.3g}", flush=True)


if __name__ == "__main__":
    main()
