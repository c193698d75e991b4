"""What a newcomer has of the swarm's library: CPU seconds until it knows what its veterans know.

five specialists, 100 rounds -> their libraries, lent over a network in memory -> a sixth one, from its start

Nodes are those of sapo.py (sapo_node.py): the real learner and the real exchange, whose libraries are asked
for page by page, judged, mended and caught up by as in a running node. Each was made unsure of all but two
tasks; the newcomer's two are none of the veterans'. While it learns, the veterans lend and do nothing else:
nothing comes to it by gossip. Each of several newcomers, who differ in what they draw, runs four times: with
the libraries; with three liars among eight lenders (newcomer_liars.py); and without any, as plain GRPO and
with a book of its own finds. Whom a newcomer admits first decides much: one alone tells little, so claims are
means over all of them.

- catch_up_cpu_share: CPU seconds of the newcomer until it has 95 % of its veterans' held-out reward at their
  end, over those that a veteran took to get there. All that it costs counts: lending, judging, mending.
- newcomer_vs_alone: its held-out reward then, minus that of the better one of those without a library
  after as many CPU seconds.
- library_poisoned_share: how much of that is left with three liars of eight, after as many CPU seconds.
- later_vs_veterans: held-out reward of the first two newcomers, with the libraries, over their veterans': the
  mean of 60, 70 and 80 rounds after the goal, when their rounds have long been usual ones.

A newcomer that never gets there counts with all that it spent.

Measuring costs no CPU seconds of theirs. Nor does looking through six nodes' objects for garbage, a quarter
of a second each time: what is there when somebody begins is left out of that (`gc.freeze`), as in a node.

    python benchmarks/newcomer.py [--quick] [--json FILE] [--rounds 100] [--newcomers 5] [--seed 0]
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import functools
import gc
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import report
from newcomer_liars import LIARS, Liar
from sapo_models import models_of
from sapo_node import ROUND_S, Clock, SwarmNode, round_together, settled
from sapo_run import PRESET
from sapo_swarms import SWARMS
from sapo_worlds import MAX_TOKENS, tasks_of

from swarmnode.exchange.library.shelf import Shelf
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config

KINDS = (0, 1, 2, 0, 1)
"""Which of the four specialists each veteran is."""

NEWCOMER = 3
"""Which one the newcomer is."""

GOAL = 0.95
"""Share of the veterans' held-out reward."""

LOOK_EVERY = 2
"""Rounds of the newcomer after which held-out reward is measured; of the veterans five times as many."""

ALONE_RATE = 2e-3
"""Learning rate of those without a library: their best in sapo.py, as --rate is that of `book`."""

ALONE = {"alone": "sapo", "own book": "own_book"}
"""Rules of those without a library."""

MOST_ROUNDS = 100
"""The newcomer ends here if it never gets there."""

LATER, LATER_ROUNDS = 2, 80
"""Newcomers that go on after the goal, and for how many rounds."""

LENT_WITHIN_S = 3.0
"""How long a round waits at most for what is lent: in a node all the time of a round is there for it."""

WORLD = "builtin"


@dataclass
class Curve:
    """Held-out reward by CPU seconds, as it was measured."""

    cpu_s: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    story: dict[str, Any] = field(default_factory=dict)

    def add(self, cpu_s: float, held_out: float, rounds: int) -> None:
        self.cpu_s.append(cpu_s)
        self.held_out.append(held_out)
        self.rounds.append(rounds)

    def until(self, goal: float) -> float | None:
        """CPU seconds until the goal, in a straight line between two measurements; None: never."""
        looks = list(zip(self.cpu_s, self.held_out, strict=True))
        for (s0, h0), (s1, h1) in itertools.pairwise(looks):
            if h1 >= goal:
                return s0 + (s1 - s0) * max(0.0, goal - h0) / (h1 - h0) if h1 > h0 else s0
        return None

    def at(self, cpu_s: float) -> float:
        """Held-out reward after so many CPU seconds, in a straight line between two measurements."""
        looks = list(zip(self.cpu_s, self.held_out, strict=True))
        for (s0, h0), (s1, h1) in itertools.pairwise(looks):
            if s1 >= cpu_s:
                return h0 + (h1 - h0) * (cpu_s - s0) / (s1 - s0)
        return self.held_out[-1]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    started = time.monotonic()
    result = asyncio.run(measured(options))
    result["seconds"] = round(time.monotonic() - started)
    claims = result.pop("claims")
    report("newcomer", claims, {}, options.json, result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="30 rounds of the veterans: does it run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument("--rounds", type=int, default=100, help="of the veterans")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate of who shares")
    parser.add_argument("--newcomers", type=int, default=5, help="of which each begins from nothing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.newcomers = min(options.rounds, 30), min(options.newcomers, 2)
    return options


def config_of(options: argparse.Namespace, **settings: Any) -> Config:
    flags = {
        "rollout.max_tokens": MAX_TOKENS[WORLD],
        "tasks.eval_examples": 128,
        "training.learning_rate": options.rate,
        **SWARMS["specialists"].settings,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    return load_config(preset=PRESET, environ={}, flags=flags).config


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    models = models_of(SWARMS["specialists"])
    tasks = tasks_of(WORLD)
    network, clock = MemoryNetwork(seed=options.seed), Clock()

    def node(kind: int, name: str, config: Config, *, shares: bool = True) -> SwarmNode:
        return SwarmNode(
            config,
            models[kind],
            tasks,
            name=f"{options.seed}/{name}",
            seed=1000 * options.seed + sum(name.encode()),
            network=network if shares else None,
            clock=clock,
            shelf=Shelf() if shares else None,
        )

    async with AsyncExitStack() as stack:
        veterans = [node(kind, f"veteran {place}", config_of(options)) for place, kind in enumerate(KINDS)]
        for one in veterans:
            await stack.enter_async_context(one)
            if one is not veterans[0]:
                await connect(one, veterans[0])
        curves = await grown_up(veterans, options, clock)
        for one in veterans:
            await lends_only(one)
        veterans_end = fmean(curve.held_out[-1] for curve in curves)
        goal = GOAL * veterans_end
        spent = fmean(curve.until(goal) or curve.cpu_s[-1] for curve in curves)
        print(f"veterans: {veterans_end:.3f} held out, {spent:.1f} CPU s to", end="")
        print(
            f" {goal:.3f}; libraries of {[len(v.exchange.library.shelf) for v in veterans]} groups",
            flush=True,
        )
        found = []
        for number in range(options.newcomers):
            newcomer = functools.partial(node, NEWCOMER, f"newcomer {number}")
            async with liars(network, tasks, clock, options) as lying:
                later = number < LATER
                curves = await four_runs(newcomer, options, veterans, lying, clock, goal=goal, later=later)
            found.append(Newcomer(curves, goal, spent))
            print(f"newcomer {number}: {found[-1].summary}", flush=True)
    gain = fmean(one.gain for one in found)
    claims = {
        "catch_up_cpu_share": fmean(one.cpu_share for one in found),
        "newcomer_vs_alone": gain,
        "library_poisoned_share": fmean(one.left for one in found) / gain,
        "later_vs_veterans": fmean(one.later for one in found[:LATER]) / veterans_end,
    }
    if not all(one.reached for one in found):
        print("a newcomer never got there: catch_up_cpu_share is a lower bound", flush=True)
    return {
        "claims": claims,
        "goal": goal,
        "veteran_cpu_s": spent,
        "cpu_shares": [round(one.cpu_share, 3) for one in found],
        "gains": [round(one.gain, 3) for one in found],
        "curves": [{name: vars(curve) for name, curve in one.curves.items()} for one in found],
    }


async def four_runs(
    newcomer: Callable[..., SwarmNode],
    options: argparse.Namespace,
    veterans: Sequence[SwarmNode],
    lying: "Sequence[Liar]",
    clock: Clock,
    *,
    goal: float,
    later: bool,
) -> dict[str, Curve]:
    """One newcomer's runs, by what it has: until the goal with the libraries, then for as long without. If
    `later`, the first of them goes on after that."""
    curves = dict[str, Curve]()
    async with newcomer(config_of(options)) as one:
        curves["library"] = await learnt(one, veterans, clock, goal=goal)
        if later:
            curves["later"] = await went_on(one, clock)
    until_s = curves["library"].until(goal) or curves["library"].cpu_s[-1]
    async with newcomer(config_of(options)) as one:
        curves["library with liars"] = await learnt(one, [*veterans, *lying], clock, cpu_s=until_s)
    for name, rule in ALONE.items():
        config = config_of(
            options, exchange__enabled=False, exchange__rule=rule, training__learning_rate=ALONE_RATE
        )
        async with newcomer(config, shares=False) as one:
            curves[name] = await learnt(one, [], clock, cpu_s=until_s)
    return curves


@dataclass(frozen=True)
class Newcomer:
    """One newcomer's four runs."""

    curves: dict[str, Curve]
    goal: float
    veteran_s: float

    @property
    def reached(self) -> bool:
        return self.curves["library"].until(self.goal) is not None

    @property
    def until_s(self) -> float:
        """CPU seconds with the libraries until the goal."""
        return self.curves["library"].until(self.goal) or self.curves["library"].cpu_s[-1]

    @property
    def cpu_share(self) -> float:
        return self.until_s / self.veteran_s

    @property
    def gain(self) -> float:
        """Held-out reward over the better one of those without a library."""
        return self._over_alone("library")

    @property
    def left(self) -> float:
        """The same among liars."""
        return self._over_alone("library with liars")

    @property
    def later(self) -> float:
        """Held-out reward long after the goal."""
        return fmean(self.curves["later"].held_out[-3:])

    @property
    def summary(self) -> str:
        return f"share {self.cpu_share:.3f}, over alone {self.gain:.3f}, among liars {self.left:.3f}"

    def _over_alone(self, name: str) -> float:
        best = max(self.curves[alone].at(self.until_s) for alone in ALONE)
        return self.curves[name].at(self.until_s) - best


async def grown_up(veterans: Sequence[SwarmNode], options: argparse.Namespace, clock: Clock) -> list[Curve]:
    """The veterans' rounds, in lock-step as in sapo.py. What all do together is shared out among them."""
    curves, cpu_s = [Curve() for _ in veterans], 0.0
    leave_out_of_collections()
    for number in range(1, options.rounds + 1):
        began = time.process_time()
        clock.now += ROUND_S
        await round_together(veterans)
        cpu_s += time.process_time() - began
        if number % (5 * LOOK_EVERY) == 0 or number == options.rounds:
            for one, curve in zip(veterans, curves, strict=True):
                curve.add(cpu_s / len(veterans), held_out(one), number)
            print(f"veterans, round {number}: {fmean(c.held_out[-1] for c in curves):.3f}", flush=True)
    return curves


async def learnt(
    one: SwarmNode,
    lenders: "Sequence[SwarmNode | Liar]",
    clock: Clock,
    *,
    goal: float = 2.0,
    cpu_s: float = float("inf"),
) -> Curve:
    """A newcomer from its start until it has the goal, or has used up the seconds."""
    curve, spent = Curve(), 0.0
    curve.add(0.0, held_out(one), 0)
    leave_out_of_collections()
    began = time.process_time()
    for lender in lenders:
        await connect(one, lender)
    for number in range(1, MOST_ROUNDS * (1 if cpu_s == float("inf") else 10) + 1):
        clock.now += ROUND_S
        await lent(one)
        groups = one.generate()
        await one.publish(groups)
        one.train(groups, await one.collect())
        spent += time.process_time() - began
        if number % LOOK_EVERY == 0 or spent >= cpu_s:
            curve.add(spent, held_out(one), number)
            if curve.until(goal) is not None or spent >= cpu_s:
                break
        began = time.process_time()
    if one.exchange is not None and one.exchange.library is not None:
        library, state = one.exchange.library, one.catching_up
        curve.story = {"borrowed": library.groups, "lenders": len(library.lenders),
                       "refused": dict(library.refused), "answers": state.answers,
                       "phase": state.phase, "rounds": state.rounds,
                       "rounds_worth": state.rounds_worth}  # fmt: skip
        dropped = one.exchange.stats().dropped
        curve.story["dropped"] = dict(dropped)
    print(f"  rounds {curve.rounds} held out {[round(h, 3) for h in curve.held_out]}", flush=True)
    print(f"  CPU s {[round(s, 2) for s in curve.cpu_s]} {curve.story}", flush=True)
    return curve


async def went_on(one: SwarmNode, clock: Clock) -> Curve:
    """What follows for a newcomer that has the goal. CPU seconds are not counted."""
    curve = Curve()
    for number in range(1, LATER_ROUNDS + 1):
        clock.now += ROUND_S
        await round_together([one])
        if number % (5 * LOOK_EVERY) == 0:
            curve.add(0.0, held_out(one), one.rounds)
    print(f"  later: rounds {curve.rounds} held out {[round(h, 3) for h in curve.held_out]}", flush=True)
    return curve


async def lent(one: SwarmNode) -> None:
    """Wait until as much was lent and judged as a round takes, so that a busy machine changes nothing."""
    library = None if one.exchange is None else one.exchange.library
    until = time.monotonic() + LENT_WITHIN_S
    while library is not None and time.monotonic() < until and not library.is_done:
        if library.waiting >= one.catching_up.groups_to_borrow(one.config):
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def liars(
    network: MemoryNetwork, tasks: Any, clock: Clock, options: argparse.Namespace
) -> "AsyncIterator[list[Liar]]":
    async with AsyncExitStack() as stack:
        found = [Liar(kind, network, tasks, clock, seed=options.seed) for kind in LIARS]
        for liar in found:
            await stack.enter_async_context(liar)
        yield found


async def lends_only(one: SwarmNode) -> None:
    """From now on it fetches and judges nothing of others: that would be its own learning."""
    assert one.exchange is not None
    await one.exchange.collect(0, one.learner.policy_version, deadline_s=0.0)


def leave_out_of_collections() -> None:
    """The garbage collector looks through nothing that is there now."""
    gc.collect()
    gc.freeze()


async def connect(one: SwarmNode, other: "SwarmNode | Liar") -> None:
    assert one.host is not None and other.host is not None
    await one.host.connect((await other.host.addresses())[0])
    await settled()


def held_out(one: SwarmNode) -> float:
    one.evaluate()
    return one.record.held_out[one.rounds]


if __name__ == "__main__":
    main()
