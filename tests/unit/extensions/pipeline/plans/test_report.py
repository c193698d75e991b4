from dataclasses import replace

import pytest

from swarmnode.extensions.pipeline.plans.report import (
    Figures,
    Found,
    figures_of,
    find_full,
    seconds_for,
    study,
)
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import PlacementEffort
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

SKIPPING = Instance(
    names=tuple("abcdefg"),
    forward_s=(1.0, 1.0, 1.0, 2.0, 1.0, 1.5, 1.0),
    hop_s=tuple(tuple(0.1 if i == j else 1.0 + abs(i - j) / 3 for j in range(7)) for i in range(7)),
    memory=(2, 2, 2, 2, 2, 1, 1),
    stages=((0, 1), (2,), (3,), (4, 5)),
    path_length=2,
    waves=2,
)
"""4 in flight with skipping, 2 without; node 6 is in no stage."""

STEPS = SearchBudget(steps=60)
LITTLE = PlacementEffort(starts=2, moves=50, judged=1, polish=500, schedule=500)


def figures(instance: Instance = SKIPPING, effort: PlacementEffort | None = None) -> Figures:
    return study(instance, seed=1, budget=STEPS, effort=effort).figures


def test_all_contenders_process_the_same_micro_batches() -> None:
    found = figures(effort=LITTLE)
    assert [each.name for each in found.compared] == [
        "full pipeline",
        "full pipeline, own map",
        "skipping",
        "skipping, own map",
    ]
    assert [each.skips for each in found.compared] == [False, False, True, True]
    assert {each.in_flight * each.waves for each in found.compared} == {8.0}
    assert [each.in_flight for each in found.compared] == [2, 2, 4, 4]


def test_the_saving_is_against_the_fastest_full_pipeline() -> None:
    found = figures(effort=LITTLE)
    full_s = min(each.seconds for each in found.compared[:2])
    ours_s = min(each.seconds for each in found.compared[2:])
    assert found.saved_vs_full == 1 - ours_s / full_s
    assert found.makespan_s == ours_s


def test_a_broken_number_of_waves_lies_between_its_neighbours() -> None:
    plan = Plan(SKIPPING, ((0, 2), (0, 3), (1, 4), (1, 5)))
    two_s, three_s = (simulate(replace(plan, instance=replace(SKIPPING, waves=w))).makespan_s for w in (2, 3))
    assert seconds_for(plan, 8) == two_s
    assert seconds_for(plan, 9) == pytest.approx(0.75 * two_s + 0.25 * three_s)
    assert two_s < three_s


def test_the_full_pipeline_may_do_without_a_far_data_node() -> None:
    near = Instance(
        names=("far", "near", "other"),
        forward_s=(1.0, 1.0, 1.0),
        hop_s=((0.0, 50.0, 50.0), (50.0, 0.0, 1.0), (50.0, 1.0, 0.0)),
        memory=(1, 1, 1),
        stages=((0, 1), (2,)),
        path_length=2,
        waves=2,
    )
    found = find_full(near, 4, 0, STEPS)
    assert found.plan.paths == ((1, 2),)
    assert found.plan.instance.waves == 4


def test_an_instance_that_skips_nothing_is_compared_with_nothing() -> None:
    found = figures(replace(SKIPPING, path_length=4))
    assert [(each.name, each.skips) for each in found.compared] == [("full pipeline", False)]
    assert found.saved_vs_full is None
    assert found.skip_ratio == 0


def test_the_figures_are_those_of_the_plan() -> None:
    result = study(SKIPPING, seed=1, budget=STEPS)
    found, plan = result.figures, result.plan
    assert found.violations == ()
    assert found.bound_s <= found.makespan_s == simulate(plan).makespan_s
    assert found.gap == found.makespan_s / found.bound_s - 1
    assert (found.micro_batches, found.in_flight, found.waves) == (8, 4, 2)
    assert found.skip_ratio == 0.5
    assert (found.slots_used, found.slots) == (8, 12)
    assert (found.stages[0].visits, found.stages[0].slots) == (4, 4)
    assert sum(use.visits for use in found.stages) == found.slots_used
    assert all(use.visits >= use.least_visits > 0 for use in found.stages)
    assert [(use.node, use.stage) for use in found.nodes][-2:] == [(5, 3), (6, -1)]
    by_node = {use.node: use for use in found.nodes}
    assert found.stages[3].utilisation == (by_node[4].utilisation + by_node[5].utilisation) / 2
    assert by_node[6].utilisation == by_node[6].slots_used == 0


def test_a_plan_that_breaks_rules_says_so() -> None:
    broken = Plan(SKIPPING, ((0, 2), (0, 2), (1, 2), (1, 3)))
    told = figures_of(Found(broken, 1.0, 0, 0.0), simulate(broken), seed=0)
    assert "node 2 (c) has 3 agents and 2 slots" in told.violations
    assert "stage 3 has 0 visits a wave, it needs 1" in told.violations


def test_own_maps_have_a_bound_of_their_own() -> None:
    given, own = figures(), figures(effort=LITTLE)
    assert given.any_map_bound_s is None
    assert own.any_map_bound_s is not None
    assert own.any_map_bound_s <= own.makespan_s <= given.makespan_s


def test_equal_steps_and_seeds_give_equal_figures() -> None:
    def timeless(found: Figures) -> Figures:
        compared = tuple(replace(each, cpu_s=0.0) for each in found.compared)
        return replace(found, compared=compared, plan_cpu_s=0.0)

    assert timeless(figures(effort=LITTLE)) == timeless(figures(effort=LITTLE))
