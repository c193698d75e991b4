"""What two nodes behind routers learn from each other, beside the same two nodes without routers.

python benchmarks/homes.py [--quick] [--json FILE]

Real `swarmnode join` processes, each on a machine of its own in network namespaces
(swarmnode/extensions/trial_swarm/nat_lab.py): two specialists that know different things and a
`swarmnode seed` between them. Needs root, `ip` and `nft`.

- `groups_share`: groups of the other that a round trained on, over the same where all are on one machine and
  dial each other; the worst of four kinds of routers. Counted over a time that begins when both have begun
  their rounds: how long either took to start says nothing about routers.
- `first_group_s`: from that moment to the first group of the other that each has judged; the slowest.
- `seed_dies_share`: the share where the seed is killed after a third of the time, and a third node can be
  reached.
- `healed_s`: from the end of a time without any network to the next group of the other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments, report

from swarmnode.extensions.trial_swarm.nat_lab import Lab, LabMachine, stop, why_not
from swarmnode.extensions.trial_swarm.specialists import build_specialists

PROGRAM = [sys.executable, "-P", "-m", "swarmnode"]
PATIENCE_S = 240.0
ROUTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cone-cone": ({"nat": "cone"}, {"nat": "cone"}),
    "cone-symmetric": ({"nat": "cone"}, {"nat": "symmetric"}),
    "symmetric-symmetric": ({"nat": "symmetric"}, {"nat": "symmetric"}),
    "double": ({"nat": "cone", "double": True}, {"nat": "cone"}),
}


@dataclass
class Node:
    home: Path
    process: "subprocess.Popen[str]"

    def records(self) -> list[dict[str, Any]]:
        """What the node has written down so far, oldest first."""
        path = self.home / "state/logs/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def since(self, at: float, authors: Sequence[str]) -> tuple[float, float]:
        """Groups of these authors that it trained on since then, and its rounds."""
        rounds = [one for one in self.records() if one.get("event") == "round" and one["time"] >= at]
        if len(rounds) < 2:
            return 0.0, 0.0
        trained = [sum(one.get(f"exchange.trained.{author}", 0.0) for author in authors) for one in rounds]
        return trained[-1] - trained[0], rounds[-1]["progress.round"] - rounds[0]["progress.round"]

    @property
    def peer(self) -> str:
        return self.records()[0]["peer"]

    def first(self, name: str, above: float = 0.0) -> float | None:
        """When a number was first written down above a bound."""
        return next((one["time"] for one in self.records() if one.get(name, 0.0) > above), None)


class Stage:
    """A seed and nodes in a lab; all of them end with it."""

    def __init__(self, stack: ExitStack, models: Sequence[str]) -> None:
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homes-")))
        self._models = models
        self._number = 0

    def seed(self, machine: LabMachine) -> "tuple[subprocess.Popen[str], str]":
        process = self._start(machine, ["seed", "--home", str(self._folder / "seed")], "seed")
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def node(self, machine: LabMachine, *addresses: str) -> Node:
        number, self._number = self._number, self._number + 1
        home = self._folder / f"node-{number}"
        options = [
            "join",
            *addresses,
            "--home",
            str(home),
            "--model",
            self._models[number],
            "--preset",
            "tiny",
        ]
        settings = ["network.wait_for_peers=1"]
        options += ["--seed", str(number)]
        options += [part for one in settings for part in ("--set", one)]
        return Node(home, self._start(machine, options, f"node-{number}"))

    def _start(self, machine: LabMachine, options: Sequence[str], name: str) -> "subprocess.Popen[str]":
        errors = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        process = machine.start([*PROGRAM, *options], env=os.environ, stdout=subprocess.PIPE, stderr=errors)

        def end() -> None:
            stop(process)
            assert process.stdout is not None
            process.stdout.close()

        self._stack.callback(end)
        return process


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError("the nodes took too long")
        time.sleep(0.2)


def begun(nodes: Sequence[Node]) -> float:
    """Wait until all have done a round; returns when the last of them had."""
    until(lambda: all(node.first("progress.round") for node in nodes))
    return max(node.first("progress.round") or 0.0 for node in nodes)


def a_round(nodes: Sequence[Node], since: float) -> float:
    """Groups of one another that these nodes trained on, per round, since then."""
    found = [node.since(since, [other.peer for other in nodes if other is not node]) for node in nodes]
    return sum(groups for groups, _ in found) / max(sum(rounds for _, rounds in found), 1.0)


def together(
    models: Sequence[str], seconds: float, routers: "tuple[dict[str, Any], ...] | None"
) -> tuple[float, float]:
    """Two nodes behind these routers, or all on one machine: groups of the other a round trains on, and
    seconds to the first."""
    with ExitStack() as stack:
        lab, stage = stack.enter_context(Lab()), Stage(stack, models)
        public = lab.public()
        machines = [public, public] if routers is None else [lab.home(**one)[0] for one in routers]
        _, address = stage.seed(public)
        nodes = [stage.node(machine, address) for machine in machines]
        at = begun(nodes)
        time.sleep(seconds)
        firsts = [node.first("exchange.accepted") for node in nodes]
        first_s = max(float("inf") if first is None else first - at for first in firsts)
        return a_round(nodes, at), max(first_s, 0.0)


def seed_dies(models: Sequence[str], seconds: float) -> float:
    """Groups of the other that a round of two homes trains on; their seed dies, a third node goes on."""
    with ExitStack() as stack:
        lab, stage = stack.enter_context(Lab()), Stage(stack, models)
        seed, address = stage.seed(lab.public())
        third = stage.node(lab.public(), address)
        homes = [stage.node(lab.home()[0], address) for _ in range(2)]
        at = begun([third, *homes])
        time.sleep(seconds / 3)
        seed.kill()
        time.sleep(2 * seconds / 3)
        return a_round(homes, at)


def healed(models: Sequence[str], offline_s: float) -> float:
    """Seconds from the end of a time without network to the next group of the other."""
    with ExitStack() as stack:
        lab, stage = stack.enter_context(Lab()), Stage(stack, models)
        _, address = stage.seed(lab.public())
        (cut,), (other,) = lab.home(), lab.home()
        node, _ = stage.node(cut, address), stage.node(other, address)
        until(lambda: node.first("exchange.accepted", 10) is not None)
        with cut.unplugged():
            time.sleep(offline_s)
            before = node.records()[-1].get("exchange.accepted", 0.0)
        back = time.time()
        until(lambda: node.first("exchange.accepted", before) is not None)
        return max(first - back, 0.0) if (first := node.first("exchange.accepted", before)) else float("inf")


def main() -> None:
    options = arguments(__doc__ or "")
    if reason := why_not():
        raise SystemExit(f"no homes can be built here: {reason}")
    seconds = 8.0 if options.quick else 20.0
    with tempfile.TemporaryDirectory() as folder:
        models = [str(path) for path in build_specialists(Path(folder), 3)]
        alone, _ = together(models, seconds, None)
        print(f"{'on one machine':22} {alone:.1f} groups of the other a round", flush=True)
        shares: dict[str, float] = {}
        firsts: dict[str, float] = {}
        for name, routers in list(ROUTERS.items())[: 1 if options.quick else None]:
            found, firsts[name] = together(models, seconds, routers)
            shares[name] = found / alone
            told = f"share {shares[name]:.2f}, the first after {firsts[name]:.1f} s"
            print(f"{name:22} {found:.1f} groups of the other a round, {told}", flush=True)
        claims = {"groups_share": min(shares.values()), "first_group_s": max(firsts.values())}
        if not options.quick:
            claims["seed_dies_share"] = seed_dies(models, seconds) / alone
            print(f"{'the seed dies':22} share {claims['seed_dies_share']:.2f}", flush=True)
            claims["healed_s"] = healed(models, 60.0)
            print(f"{'60 s without network':22} healed after {claims['healed_s']:.1f} s", flush=True)
    spread = {
        "groups_share": (min(shares.values()), max(shares.values())),
        "first_group_s": (min(firsts.values()), max(firsts.values())),
    }
    report("homes", claims, spread, options.json)


if __name__ == "__main__":
    main()
