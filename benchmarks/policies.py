"""Three policies in one process against three processes: samples per CPU second of all they start.

join --policies 3 | three times join, connected to each other -> CPU seconds of nodes and network processes

Both sides train the same three seeds for the same rounds on the same model, and each policy trains on groups
of the two others: three processes have them over libp2p on loopback, one process hands them on. Each is run
short and long: the long run as it is counts the start of Python, torch and the network; the difference of the
two is the steady state, which is the claim. What starting one process instead of three saves comes on top.

    python benchmarks/policies.py [--quick] [--json FILE]
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common

from swarmnode.extensions.demonstration.tiny import build_quick_tiny, build_tiny
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import read_running

POLICIES = 3
SHORT_ROUNDS = 2
GROUPS, GROUP_SIZE = 32, 8
"""Of the preset `tiny`: what a round generates."""
NEIGHBOURS = ("--policies", str(POLICIES), "--set", "network.wait_for_peers=0")
"""Policies of one process meet at once, and do not count as peers to wait for."""
START_S = 120.0
END_S = 900.0


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    folder: Path
    long_rounds: int
    repeats: int

    @property
    def steady_samples(self) -> int:
        return POLICIES * (self.long_rounds - SHORT_ROUNDS) * GROUPS * GROUP_SIZE

    @property
    def whole_samples(self) -> int:
        return POLICIES * self.long_rounds * GROUPS * GROUP_SIZE


def main() -> None:
    options = common.arguments(__doc__ or "")
    with tempfile.TemporaryDirectory(prefix="swarmnode-policies-") as name:
        folder = Path(name)
        build = build_quick_tiny if options.quick else build_tiny
        plan = Plan(
            model=build(folder / "models"),
            folder=folder,
            long_rounds=6 if options.quick else 42,
            repeats=1 if options.quick else 3,
        )
        found = common.interleaved(
            {
                "together, short": lambda: together(plan, SHORT_ROUNDS),
                "separate, short": lambda: separate(plan, SHORT_ROUNDS),
                "together, long": lambda: together(plan, plan.long_rounds),
                "separate, long": lambda: separate(plan, plan.long_rounds),
            },
            plan.repeats,
        )
    show(plan, found, options.json)


def show(plan: Plan, found: dict[str, list[float]], json_path: Path | None) -> None:
    steady = {
        name: [
            long - short for long, short in zip(found[f"{name}, long"], found[f"{name}, short"], strict=True)
        ]
        for name in ("together", "separate")
    }
    claim, spread = common.middle(common.ratios(steady["separate"], steady["together"]))
    whole, whole_spread = common.middle(common.ratios(found["separate, long"], found["together, long"]))
    rates = {
        "steady_samples_per_cpu_s": {
            name: plan.steady_samples / common.middle(seconds)[0] for name, seconds in steady.items()
        },
        "whole_samples_per_cpu_s": {
            name: plan.whole_samples / common.middle(found[f"{name}, long"])[0] for name in steady
        },
    }
    for kind, sides in rates.items():
        print(f"{kind}: together {sides['together']:.0f}, separate {sides['separate']:.0f}")
    print(f"steady state {claim:.2f}x, {plan.long_rounds} rounds with their start {whole:.2f}x")
    common.report(
        "policies",
        {"policies3_vs_separate": claim},
        {"policies3_vs_separate": spread},
        json_path,
        {"whole_processes": [whole, *whole_spread], "cpu_seconds": found, **rates},
    )


def together(plan: Plan, rounds: int) -> float:
    return cpu_of_children(lambda homes: end([start(plan, homes / "all", rounds, 0, *NEIGHBOURS)]))


def separate(plan: Plan, rounds: int) -> float:
    def run(homes: Path) -> None:
        first = start(plan, homes / "0", rounds, 0)
        address = address_of(homes / "0", first)
        others = [start(plan, homes / str(seed), rounds, seed, address) for seed in range(1, POLICIES)]
        end([first, *others])

    return cpu_of_children(run)


def start(plan: Plan, home: Path, rounds: int, seed: int, *more: str) -> "subprocess.Popen[bytes]":
    settings = ("network.listen=127.0.0.1", f"network.wait_for_peers={POLICIES - 1}", "tasks.eval_examples=1")
    command = [
        *(sys.executable, "-P", "-m", "swarmnode", "join", "--home", str(home), "--preset", "tiny"),
        *("--model", str(plan.model), "--rounds", str(rounds), "--seed", str(seed)),
        *[part for setting in settings for part in ("--set", setting)],
        *more,
    ]
    home.mkdir(parents=True)
    with (home / "story.txt").open("wb") as story:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=story, stderr=story)


def address_of(home: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (note := read_running(resolve_paths(home).running)) is not None and note.addresses:
            return note.addresses[0]
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise SystemExit(f"the first node did not start: {(home / 'story.txt').read_text()}")


def end(processes: "list[subprocess.Popen[bytes]]") -> None:
    try:
        codes = [process.wait(END_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        raise SystemExit(f"a node ended with exit codes {codes}")


def cpu_of_children(run: Callable[[Path], None]) -> float:
    """CPU seconds of the processes that `run` starts and waits for, and of theirs."""
    before = children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="swarmnode-homes-") as homes:
        run(Path(homes))
    return children_cpu_s() - before


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
