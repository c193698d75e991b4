"""Contenders of a study process the same micro-batches, and each is given what helps it."""

from dataclasses import replace

import pytest

from benchmarks.pipeline_study import find, find_full, seconds_for
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
LITTLE = PlacementEffort(starts=2, swaps=20, steps=60)


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
    assert found.paths == ((1, 2),)
    assert found.instance.waves == 4


def test_a_stage_map_of_its_own_is_no_slower_than_the_given_one() -> None:
    own, again = (find(SKIPPING, 1, STEPS, LITTLE) for _ in range(2))
    assert own == again
    assert simulate(own).makespan_s <= simulate(find(SKIPPING, 1, STEPS)).makespan_s
