"""Assigns nodes to stages by their links, before the paths are planned in detail.

instance_from_costs.py, or a file -> Instance -> [search] -> Plan on another stage map -> schedule

Replicas of a stage average gradients and neighbouring stages pass activations, so both belong behind fast
links (Holmes, arXiv 2312.03549; DT-FM, arXiv 2206.01288). DT-FM and SkipPipe score a map by the slowest pair
inside stages and a tour over bottleneck matchings of neighbouring stages. That overlooks that a path which
may skip chooses its neighbours: a map is worth what its paths can do. So both are searched together:

1. Anneal: swap two nodes (each takes over the other's paths), or trade places between two paths. The price is
   cheap and incremental: the uncontended round trips of all agents (a high power mean stands in for the
   slowest, which decides). Several starts, each from another random map.
2. Judge: the maps found are run on the exact simulator.
3. The best few are given to the scheduler for a few steps, which also chooses orders; the best one stays.

Deterministic by steps: the same instance, seed and effort give the same map on every machine. Prices are
sums, products and roots, rounded alike everywhere; a logarithm enters only where it is compared with chance.
"""

import random
from dataclasses import dataclass, replace
from math import exp

from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement_moves import (
    PlacementPrice,
    PlacementState,
    PlacementTable,
    Snapshot,
)
from swarmnode.extensions.pipeline.scheduling.plan import Plan, violations
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import Simulator

HOT, COLD = 0.03, 0.0005
"""First and last temperature of annealing, in relation to the price."""
FINALISTS = 6
"""Maps that are given to the scheduler."""


@dataclass(frozen=True, slots=True)
class PlacementEffort:
    """Length of the search, in steps and not in seconds: members on unequal machines must agree."""

    starts: int = 24
    """Random maps to anneal from."""
    moves: int = 10_000
    """Annealing moves from each start."""
    schedule: int = 1_500_000
    """Tasks that the scheduler simulates for each of the FINALISTS, so that larger pipelines are simulated
    less often."""


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan on a stage map of its own, and its exact makespan."""

    plan: Plan
    makespan_s: float

    @classmethod
    def of(cls, plan: Plan) -> "PlacedPlan":
        return cls(plan, Simulator(plan.instance).run(plan.paths).makespan_s)


def search(
    instance: Instance,
    *,
    seed: int,
    effort: PlacementEffort | None = None,
    table: PlacementTable | None = None,
) -> PlacedPlan:
    """Search maps and paths together. Never worse than the given map with the first paths laid for it.

    Stages keep their numbers of nodes. Without `table`, nodes keep their speed and slots wherever they are.
    Raises ConfigError if a node cannot hold the stage where the given map has it.
    """
    effort = effort or PlacementEffort()
    table = table or _uniform(instance)
    given = first_plan(_with_stages(instance, instance.stages, table))
    rng = random.Random(seed)
    found = [PlacedPlan.of(given)]
    for start in range(effort.starts):
        state = PlacementState(given, table)
        if start:
            _shuffle(state, rng)
        plan = _anneal(state, rng, effort.moves)
        # Slots change with the map, and with them how often a stage has to be visited.
        if not violations(plan):
            found.append(PlacedPlan.of(plan))
    fastest = sorted(found, key=_makespan_s)[:FINALISTS]
    ordered = [_ordered(each, seed, effort.schedule) for each in fastest]
    return min(*fastest, *ordered, key=_makespan_s)


def _makespan_s(placed: PlacedPlan) -> float:
    return placed.makespan_s


def _ordered(candidate: PlacedPlan, seed: int, tasks: int) -> PlacedPlan:
    """Return the same map after a short search by the scheduler."""
    plan = candidate.plan
    # A micro-batch has two tasks at each stage, and the loss.
    steps = max(1, tasks // (plan.micro_batches * (2 * plan.instance.path_length + 1)))
    found = schedule(plan.instance, seed=seed, budget=SearchBudget(steps=steps), start=plan)
    return PlacedPlan(found.plan, found.makespan_s)


def first_plan(instance: Instance) -> Plan:
    """Return some paths that keep every rule. Raises ConfigError if there are none."""
    return Plan(instance, tuple(first_paths(instance)))


def _shuffle(state: PlacementState, rng: random.Random) -> None:
    """Exchange nodes at random, for another start."""
    count = state.instance.node_count
    for _ in range(4 * count):
        change = state.exchange(rng.randrange(count), rng.randrange(count))
        if change is not None:
            state.commit(change)


def _anneal(state: PlacementState, rng: random.Random, moves: int) -> Plan:
    """Minimise the cheap price. Returns the plan with the lowest price met."""
    price = PlacementPrice(state)
    best, kept = price.value, state.snapshot()
    for move in range(moves):
        change = state.propose(rng)
        if change is None:
            continue
        after = price.after(change)
        heat = price.value * HOT * (COLD / HOT) ** (move / moves)
        if after <= price.value or rng.random() < exp((price.value - after) / heat):
            state.commit(change)
            price.commit(change)
            if price.value < best:
                best, kept = price.value, state.snapshot()
    return _plan(state, kept)


def _plan(state: PlacementState, kept: Snapshot) -> Plan:
    stage_of, paths = kept
    stages = tuple(
        tuple(node for node, at in enumerate(stage_of) if at == stage) for stage in range(len(state.stages))
    )
    return Plan(_with_stages(state.instance, stages, state.table), paths)


def _with_stages(instance: Instance, stages: tuple[tuple[int, ...], ...], table: PlacementTable) -> Instance:
    """Return the instance of another map: speeds and slots follow the stages."""
    forward_s, memory = list(instance.forward_s), list(instance.memory)
    for stage, nodes in enumerate(stages):
        for node in nodes:
            forward_s[node], memory[node] = table.forward_s[node][stage], table.memory[node][stage]
    return replace(instance, stages=stages, forward_s=tuple(forward_s), memory=tuple(memory))


def _uniform(instance: Instance) -> PlacementTable:
    """Return a table in which every node has the same speed and slots in all stages."""
    width = len(instance.stages)
    return PlacementTable(
        tuple((seconds,) * width for seconds in instance.forward_s),
        tuple((slots,) * width for slots in instance.memory),
    )
