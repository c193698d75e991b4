"""Searches that studies of the planner share: a plan on some stage map, and the full pipeline beside it.

Instance, SearchBudget -> [find, find_full] -> pipeline_schedule.py, pipeline_run.py, pipeline_training.py

Fair pairing. Every contender processes the same micro-batches, is searched with the same budget and judged
by the same exact simulator. Without skipping fewer micro-batches fit in at once, so an iteration takes more
waves: the time of a broken number of waves is interpolated between the whole numbers beside it.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort, search
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

TRIAL_SHARE = 0.1
"""Share of the budget for each choice of data nodes of the full pipeline."""

MAX_LAYOUTS = 20
"""Bound of the choices of data nodes that are tried: two full searches more than any other contender gets."""


def find(instance: Instance, seed: int, budget: SearchBudget, effort: PlacementEffort | None = None) -> Plan:
    """Returns the best plan on the given stage map, or, with `effort`, on a searched one."""
    start = None
    if effort is not None:
        start = search(instance, seed=seed, effort=effort).plan
        instance = start.instance
    return schedule(instance, seed=seed, budget=budget, start=start).plan


def find_full(instance: Instance, micro_batches: int, seed: int, budget: SearchBudget) -> Plan:
    """Returns the best plan through all stages, with as many micro-batches in flight as fit.

    Not every data node is needed then, and some are far away: short searches choose among them.
    """
    whole = replace(instance, path_length=len(instance.stages))
    in_flight = len(agents(whole))
    whole = replace(whole, waves=max(micro_batches // in_flight, 1))
    trial = _part(budget, TRIAL_SHARE)
    tried = [
        schedule(layout, seed=seed, budget=trial)
        for layout in islice(_data_node_choices(whole, in_flight), MAX_LAYOUTS)
    ]
    start = min(tried, key=lambda each: each.makespan_s).plan
    return schedule(start.instance, seed=seed, budget=budget, start=start).plan


def seconds_for(plan: Plan, micro_batches: float) -> float:
    """Returns the seconds of the plan's paths for this number of micro-batches, interpolated between whole
    numbers of waves."""
    waves = micro_batches / len(plan.paths)
    below = max(int(waves), 1)
    below_s = _waves_s(plan, below)
    return below_s if waves == below else below_s + (_waves_s(plan, below + 1) - below_s) * (waves - below)


def _waves_s(plan: Plan, waves: int) -> float:
    return simulate(replace(plan, instance=replace(plan.instance, waves=waves))).makespan_s


def _data_node_choices(whole: Instance, in_flight: int) -> Iterator[Instance]:
    """Yields the instance, and those whose data nodes are a subset with exactly the needed slots."""
    yield whole
    data_nodes, others = whole.stages[0], whole.stages[1:]
    for size in range(1, len(data_nodes)):
        for nodes in combinations(data_nodes, size):
            if sum(whole.memory[node] for node in nodes) == in_flight:
                yield replace(whole, stages=(nodes, *others))


def _part(budget: SearchBudget, share: float) -> SearchBudget:
    steps = None if budget.steps is None else max(1, int(budget.steps * share))
    return SearchBudget(steps, None if budget.seconds is None else budget.seconds * share)
