"""Assigns nodes to stages by their links, before paths are planned in detail.

planning_costs.py, or a file -> Instance -> [search] -> Scheduled on another stage map -> schedule

Replicas of a stage average gradients, and neighbouring stages exchange activations, so both need fast links
(Holmes, arXiv 2312.03549; DT-FM, arXiv 2206.01288). DT-FM and SkipPipe score a map by the slowest pair inside
stages and a tour over bottleneck matchings of neighbouring stages. But a path that may skip stages chooses
its neighbours, so a map is only as good as its paths. Here a map's price is the exact simulator's result for
the first paths on that map:

1. Anneal by swapping two nodes, from several starts, each with another random map.
2. Give the best few maps to the scheduler for some steps, and keep the fastest.

The search is bounded by steps: the same instance, seed and effort give the same map on every machine.
"""

import random
from dataclasses import dataclass, replace
from math import exp, inf

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.first_paths import first_paths
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.schedule import Scheduled, SearchBudget, cost_s, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import Simulator

HOT, COLD = 0.02, 0.0004
"""First and last temperature of annealing, relative to the price."""
FINALISTS = 6
"""Number of maps that are given to the scheduler."""


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """Speed and slots of each node in each stage."""

    forward_s: tuple[tuple[float, ...], ...]
    """[node][stage]: seconds of one micro-batch's forward pass."""
    memory: tuple[tuple[int, ...], ...]
    """[node][stage]: micro-batches in flight; 0 if the node cannot or may not hold this stage."""


@dataclass(frozen=True, slots=True)
class PlacementEffort:
    """Length of the search, in steps instead of seconds: members on unequal machines must agree."""

    starts: int = 12
    """Number of maps to anneal from: the given one, and random ones."""
    swaps: int = 300
    """Swaps of two nodes to try from each start."""
    steps: int = 5000
    """Changes of paths that the scheduler tries for each of the FINALISTS."""


StageOf = tuple[int, ...]
"""A stage map: the stage of each node, or -1 for none."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A map that was tried, with its first paths. The plan is None if no paths keep every rule."""

    plan: Plan | None
    share_s: float
    """Seconds of an iteration per micro-batch in flight."""
    price_s: float


def search(
    instance: Instance,
    *,
    seed: int,
    effort: PlacementEffort | None = None,
    table: PlacementTable | None = None,
) -> Scheduled:
    """Search stage maps. The result is never worse than the given map with its first paths.

    Each stage keeps its number of nodes. Without `table`, nodes have the same speed and slots in every stage.
    Raises ConfigError if a node cannot hold its stage on the given map.
    """
    effort = effort or PlacementEffort()
    table = table or _uniform(instance)
    given, rng = instance.stage_of, random.Random(seed)
    first_plan(_on_map(instance, given, table))
    tried: dict[StageOf, _Placed] = {}
    for start in range(effort.starts):
        _anneal(tried, instance, _shuffled(given, table, rng) if start else given, table, rng, effort.swaps)
    fastest = sorted(tried.values(), key=lambda each: each.share_s)[:FINALISTS]
    budget = SearchBudget(steps=effort.steps)
    scheduled = [
        schedule(each.plan.instance, seed=seed, budget=budget, start=each.plan)
        for each in fastest
        if each.plan is not None
    ]
    return min(scheduled, key=lambda each: each.makespan_s / len(each.plan.paths))


def first_plan(instance: Instance) -> Plan:
    """Return some paths that keep every rule. Raises ConfigError if there are none."""
    return Plan(instance, tuple(first_paths(instance)))


def _anneal(
    tried: dict[StageOf, _Placed],
    instance: Instance,
    start: StageOf,
    table: PlacementTable,
    rng: random.Random,
    swaps: int,
) -> None:
    """Minimise the price, starting from this map. Every map on the way is added to `tried`."""
    at = start
    tried[at] = current = _placed(instance, at, table)
    for swap in range(swaps):
        swapped = _swapped(at, table, rng)
        if swapped is None:
            continue
        if swapped not in tried:
            tried[swapped] = _placed(instance, swapped, table)
        other, heat = tried[swapped], current.price_s * HOT * (COLD / HOT) ** (swap / swaps)
        is_cheaper = other.price_s <= current.price_s
        if is_cheaper or rng.random() < exp((current.price_s - other.price_s) / heat):
            at, current = swapped, other


def _placed(instance: Instance, stage_of: StageOf, table: PlacementTable) -> _Placed:
    try:
        plan = first_plan(_on_map(instance, stage_of, table))
    except ConfigError:
        # Slots depend on the map, and with them how many visits each stage needs.
        return _Placed(None, inf, inf)
    run = Simulator(plan.instance).run(plan.paths)
    # Per micro-batch: slots depend on the map, and with them how many micro-batches are in flight.
    count = len(plan.paths)
    return _Placed(plan, run.makespan_s / count, cost_s(run) / count)


def _shuffled(stage_of: StageOf, table: PlacementTable, rng: random.Random) -> StageOf:
    """Return a random map, to start from."""
    for _ in range(4 * len(stage_of)):
        stage_of = _swapped(stage_of, table, rng) or stage_of
    return stage_of


def _swapped(stage_of: StageOf, table: PlacementTable, rng: random.Random) -> StageOf | None:
    """Return the map with two random nodes swapped, or None if they cannot hold each other's stage."""
    one, other = rng.randrange(len(stage_of)), rng.randrange(len(stage_of))
    swapped = list(stage_of)
    swapped[one], swapped[other] = stage_of[other], stage_of[one]
    # A node that is in no stage (-1) holds nothing.
    can = all(swapped[node] < 0 or table.memory[node][swapped[node]] for node in (one, other))
    return tuple(swapped) if can and stage_of[one] != stage_of[other] else None


def _on_map(instance: Instance, stage_of: StageOf, table: PlacementTable) -> Instance:
    """Return the instance on another map: speeds and slots depend on the stages."""
    forward_s, memory = list(instance.forward_s), list(instance.memory)
    stages: list[list[int]] = [[] for _ in instance.stages]
    for node, stage in enumerate(stage_of):
        if stage >= 0:
            stages[stage].append(node)
            forward_s[node], memory[node] = table.forward_s[node][stage], table.memory[node][stage]
    return replace(
        instance,
        stages=tuple(map(tuple, stages)),
        forward_s=tuple(forward_s),
        memory=tuple(memory),
    )


def _uniform(instance: Instance) -> PlacementTable:
    """Return a table in which every node has the same speed and slots in all stages."""
    width = len(instance.stages)
    return PlacementTable(
        tuple((seconds,) * width for seconds in instance.forward_s),
        tuple((slots,) * width for slots in instance.memory),
    )
