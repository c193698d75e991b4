"""Figures of a plan, and those of the pipeline without skipping on the same nodes.

Instance, SearchBudget -> [study] -> Study (plan, figures) -> extensions/pipeline/pipeline_commands.py:
    tables, JSON, Gantt chart

Fair pairing. Every contender processes the same micro-batches, is searched with the same budget and judged
by the same exact simulator. Without skipping fewer micro-batches fit in at once, so an iteration takes more
waves: the time of a broken number of waves is interpolated between the whole numbers beside it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice

from swarmnode.extensions.pipeline.plans.bounds import free_map_bound_s
from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents, least_visits
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort, search
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest, violations
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import Timeline, simulate

TRIAL_SHARE = 0.1
"""Share of the budget for each choice of data nodes of the full pipeline."""

MAX_LAYOUTS = 20
"""Bound of the choices of data nodes that are tried: two full searches more than any other contender gets."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one search."""

    plan: Plan
    bound_s: float
    """Lower bound for plans on this stage map."""
    steps: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to process the same micro-batches."""

    name: str
    skips: bool
    seconds: float
    """Seconds for all micro-batches of the comparison."""
    in_flight: int
    """Micro-batches in flight at once."""
    waves: float
    """Micro-batches of the comparison over those in flight; a fractional number is interpolated."""
    cpu_s: float
    """CPU seconds of its search."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    node: int
    name: str
    stage: int
    """-1 for a node in no stage."""
    utilisation: float
    """Share of the iteration in which it computes."""
    slots_used: int
    """Micro-batches that have reserved one of its `slots`."""
    slots: int


@dataclass(frozen=True, slots=True)
class StageUse:
    stage: int
    nodes: tuple[int, ...]
    utilisation: float
    """Mean utilisation of its nodes."""
    visits: int
    """Micro-batches of a wave that visit the stage; each holds one of the `slots`."""
    least_visits: int
    """Visits that the stage needs to learn as fast as the others."""
    slots: int
    averaging_s: float
    """0 if there is nothing to average."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that the command prints, and its JSON object in this order of keys."""

    makespan_s: float
    bound_s: float
    """Lower bound for plans on the plan's stage map."""
    gap: float
    """makespan / bound - 1: a perfect search could gain less than this."""
    any_map_bound_s: float | None
    """Lower bound for plans on any stage map. None if the map was given."""
    micro_batches: int
    in_flight: int
    waves: int
    skip_ratio: float
    """Mean share of stages, over the planned paths, that a micro-batch does not visit."""
    slots_used: int
    slots: int
    seed: int
    steps: int
    plan_cpu_s: float
    """CPU seconds of the search that found the plan."""
    violations: tuple[str, ...]
    """Rules that the plan breaks; must be empty."""
    compared: tuple[Contender, ...]
    saved_vs_full: float | None
    """1 - seconds / those of the fastest full pipeline. None if the instance skips nothing."""
    stages: tuple[StageUse, ...]
    nodes: tuple[NodeUse, ...]
    """Nodes sorted by stage, those in none last."""
    paths: tuple[tuple[int, ...], ...]
    digest: str
    """SHA-256 of the plan. Members compare it before they run a plan."""


@dataclass(frozen=True, slots=True)
class Study:
    plan: Plan
    timeline: Timeline
    figures: Figures


def study(
    instance: Instance, *, seed: int, budget: SearchBudget, effort: PlacementEffort | None = None
) -> Study:
    """Plan an iteration, and compare it with the full pipeline; with `effort`, also on searched stage maps.

    Every search gets the whole budget, so that with steps alone, equal seeds give equal figures, CPU seconds
    aside. Raises ConfigError when the instance has no feasible plan.
    """
    micro_batches = len(agents(instance)) * instance.waves
    skips = instance.skip_ratio > 0
    found = [("skipping" if skips else "full pipeline", find(instance, seed, budget))]
    full: list[tuple[str, Found]] = []
    if skips:
        full.append(("full pipeline", find_full(instance, micro_batches, seed, budget)))
    if effort is not None:
        found.append((f"{found[0][0]}, own map", find(instance, seed, budget, effort)))
        if full:
            whole = full[0][1].plan.instance
            full.append(("full pipeline, own map", find(whole, seed, budget, effort)))
    compared = tuple(_contender(name, each, micro_batches) for name, each in (*full, *found))
    fastest = min(range(len(found)), key=lambda i: compared[len(full) + i].seconds)
    ours_s = compared[len(full) + fastest].seconds
    full_s = min((each.seconds for each in compared[: len(full)]), default=None)
    chosen = found[fastest][1]
    timeline = simulate(chosen.plan)
    figures = figures_of(chosen, timeline, seed)
    return Study(
        chosen.plan,
        timeline,
        replace(
            figures,
            compared=compared,
            saved_vs_full=None if full_s is None else 1 - ours_s / full_s,
            any_map_bound_s=None if effort is None else free_map_bound_s(instance, len(chosen.plan.paths)),
        ),
    )


def find(instance: Instance, seed: int, budget: SearchBudget, effort: PlacementEffort | None = None) -> Found:
    """Return the best plan on the given stage map, or, with `effort`, on a searched one."""
    started_s = time.process_time()
    start = None
    if effort is not None:
        placed = search(instance, seed=seed, effort=effort)
        instance, start = placed.instance, placed.plan
    found = schedule(instance, seed=seed, budget=budget, start=start)
    return Found(found.plan, found.bound_s, found.steps, time.process_time() - started_s)


def find_full(instance: Instance, micro_batches: int, seed: int, budget: SearchBudget) -> Found:
    """Return the best plan through all stages, with as many micro-batches in flight as fit.

    Not every data node is needed then, and some are far away: short searches choose among them.
    """
    started_s = time.process_time()
    whole = replace(instance, path_length=len(instance.stages))
    in_flight = len(agents(whole))
    whole = replace(whole, waves=max(micro_batches // in_flight, 1))
    trial = _part(budget, TRIAL_SHARE)
    tried = [
        schedule(layout, seed=seed, budget=trial)
        for layout in islice(_data_node_choices(whole, in_flight), MAX_LAYOUTS)
    ]
    start = min(tried, key=lambda each: each.makespan_s).plan
    found = schedule(start.instance, seed=seed, budget=budget, start=start)
    steps = found.steps + sum(each.steps for each in tried)
    return Found(found.plan, found.bound_s, steps, time.process_time() - started_s)


def seconds_for(plan: Plan, micro_batches: float) -> float:
    """Return the seconds of the plan's paths for this number of micro-batches, interpolated between whole
    numbers of waves."""
    waves = micro_batches / len(plan.paths)
    below = max(int(waves), 1)
    below_s = _waves_s(plan, below)
    return below_s if waves == below else below_s + (_waves_s(plan, below + 1) - below_s) * (waves - below)


def _waves_s(plan: Plan, waves: int) -> float:
    return simulate(replace(plan, instance=replace(plan.instance, waves=waves))).makespan_s


def _data_node_choices(whole: Instance, in_flight: int) -> Iterator[Instance]:
    """Yield the instance, and those whose data nodes are a subset with exactly the needed slots."""
    yield whole
    data_nodes, others = whole.stages[0], whole.stages[1:]
    for size in range(1, len(data_nodes)):
        for nodes in combinations(data_nodes, size):
            if sum(whole.memory[node] for node in nodes) == in_flight:
                yield replace(whole, stages=(nodes, *others))


def _part(budget: SearchBudget, share: float) -> SearchBudget:
    steps = None if budget.steps is None else max(1, int(budget.steps * share))
    return SearchBudget(steps, None if budget.seconds is None else budget.seconds * share)


def _contender(name: str, found: Found, micro_batches: int) -> Contender:
    plan = found.plan
    return Contender(
        name=name,
        skips=plan.instance.skip_ratio > 0,
        seconds=seconds_for(plan, micro_batches),
        in_flight=len(plan.paths),
        waves=micro_batches / len(plan.paths),
        cpu_s=found.cpu_s,
    )


def figures_of(found: Found, timeline: Timeline, seed: int) -> Figures:
    """Return the figures of a plan alone, without comparison and without the bound of any map."""
    plan, instance = found.plan, found.plan.instance
    nodes, stages = _node_uses(plan, timeline), _stage_uses(plan, timeline)
    visited = sum(len(path) for path in plan.paths) / len(plan.paths)
    return Figures(
        makespan_s=timeline.makespan_s,
        bound_s=found.bound_s,
        gap=timeline.makespan_s / found.bound_s - 1,
        any_map_bound_s=None,
        micro_batches=plan.micro_batches,
        in_flight=len(plan.paths),
        waves=instance.waves,
        skip_ratio=1 - visited / len(instance.stages),
        slots_used=sum(use.slots_used for use in nodes),
        slots=sum(use.slots for use in nodes),
        seed=seed,
        steps=found.steps,
        plan_cpu_s=found.cpu_s,
        violations=tuple(violations(plan)),
        compared=(),
        saved_vs_full=None,
        stages=stages,
        nodes=nodes,
        paths=plan.paths,
        digest=digest(plan),
    )


def _node_uses(plan: Plan, timeline: Timeline) -> tuple[NodeUse, ...]:
    instance, stage_of = plan.instance, plan.instance.stage_of
    held = Counter(node for path in plan.paths for node in path)
    return tuple(
        NodeUse(
            node,
            instance.names[node],
            stage_of[node],
            timeline.utilisation[node],
            held[node],
            instance.memory[node],
        )
        for node in by_stage(instance)
    )


def _stage_uses(plan: Plan, timeline: Timeline) -> tuple[StageUse, ...]:
    instance = plan.instance
    visits = Counter(stage for agent in range(len(plan.paths)) for stage in plan.stages(agent))
    least = least_visits(instance, len(plan.paths))
    return tuple(
        StageUse(
            stage,
            nodes,
            sum(timeline.utilisation[node] for node in nodes) / len(nodes),
            visits[stage],
            least[stage],
            instance.slots(stage),
            instance.averaging_s(stage),
        )
        for stage, nodes in enumerate(instance.stages)
    )


def by_stage(instance: Instance) -> list[int]:
    """Return all nodes in the order of stages, within a stage as it lists them; those in none last."""
    placed = [node for nodes in instance.stages for node in nodes]
    return placed + sorted(set(range(instance.node_count)) - set(placed))
