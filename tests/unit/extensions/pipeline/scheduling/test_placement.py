"""Nodes to stages: the map is better, obeys every rule, and is the same for everybody."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import (
    PlacementEffort,
    PlacementTable,
    first_plan,
    search,
)
from swarmnode.extensions.pipeline.scheduling.plan import violations
from swarmnode.extensions.pipeline.scheduling.schedule import Scheduled
from swarmnode.extensions.pipeline.scheduling.simulator import simulate

LITTLE = PlacementEffort(starts=3, swaps=150, steps=300)
NEAR_S, FAR_S = 0.1, 5.0


def cities(*, count: int = 2, stages: int = 4, path_length: int = 2, memory: int = 1) -> Instance:
    """`count` cities of `stages` nodes each; given is the worst map, a stage in each city."""
    nodes = range(count * stages)
    hop_s = tuple(
        tuple(0.0 if i == j else NEAR_S if i % count == j % count else FAR_S for j in nodes) for i in nodes
    )
    given_stages = tuple(tuple(range(stage * count, (stage + 1) * count)) for stage in range(stages))
    return Instance(
        names=tuple(f"city {i % count} node {i // count}" for i in nodes),
        forward_s=(1.0,) * len(nodes),
        hop_s=hop_s,
        memory=(memory,) * len(nodes),
        stages=given_stages,
        path_length=path_length,
        waves=1,
    )


def uneven(seed: int) -> tuple[Instance, PlacementTable]:
    """Random links, speeds and slots; not every node can hold every stage, the given map can be held."""
    rng = random.Random(seed)
    count, width = 9, 3
    hop_s = tuple(tuple(0.0 if i == j else rng.uniform(0.1, 3) for j in range(count)) for i in range(count))
    stages = ((0, 1, 2), (3, 4, 5), (6, 7))
    held = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
    table = PlacementTable(
        tuple(tuple(rng.uniform(0.5, 2) for _ in range(width)) for _ in range(count)),
        tuple(
            tuple(rng.choice((1, 2, 3) if held.get(node) == stage else (0, 1, 2)) for stage in range(width))
            for node in range(count)
        ),
    )
    return Instance(
        names=tuple(map(str, range(count))),
        forward_s=tuple(table.forward_s[node][held.get(node, 0)] for node in range(count)),
        hop_s=hop_s,
        memory=tuple(max(1, table.memory[node][held.get(node, 0)]) for node in range(count)),
        stages=stages,
        path_length=2,
        waves=2,
    ), table


def check(found: Scheduled, table: PlacementTable | None = None) -> None:
    """What must hold of every answer."""
    instance = found.plan.instance
    assert violations(found.plan) == []
    assert simulate(found.plan).makespan_s == pytest.approx(found.makespan_s)
    assert all(instance.stages)
    for stage, nodes in enumerate(instance.stages if table else ()):
        assert table is not None
        for node in nodes:
            assert 1 <= instance.memory[node] == table.memory[node][stage]
            assert instance.forward_s[node] == table.forward_s[node][stage]


def test_paths_stay_within_a_city_once_nodes_may_move():
    """Each city gets a data node and enough others: then no path crosses, and none has to wait."""
    given_map = cities()
    spread = replace(given_map, stages=((0, 2), (1, 3), (4, 6), (5, 7)))
    found = search(spread, seed=1, effort=LITTLE)
    check(found)
    home = [{node % 2 for node in path} for path in found.plan.paths]
    assert all(len(towns) == 1 for towns in home)
    assert found.makespan_s < simulate(first_plan(spread)).makespan_s


def test_the_answer_is_never_worse_than_what_was_given():
    for seed in range(5):
        instance, table = uneven(seed)
        found = search(instance, seed=seed, effort=PlacementEffort(1, 50, 20), table=table)
        assert found.makespan_s <= simulate(first_plan(instance)).makespan_s


def test_stages_keep_their_sizes():
    instance, table = uneven(3)
    found = search(instance, seed=3, effort=LITTLE, table=table).plan.instance
    assert [len(nodes) for nodes in found.stages] == [3, 3, 2]


def test_the_same_seed_gives_the_same_map_and_another_seed_may_not():
    instance, table = uneven(4)
    found = [search(instance, seed=seed, effort=LITTLE, table=table) for seed in (7, 7, 8)]
    assert found[0] == found[1]
    assert found[2].plan != found[0].plan


def test_a_spare_node_behind_a_better_link_comes_in():
    base = cities(count=1, stages=3, path_length=2)
    far = tuple(
        tuple(0.0 if i == j else FAR_S if 1 in (i, j) else NEAR_S for j in range(3)) for i in range(3)
    )
    given_map = replace(base, hop_s=far, stages=((0,), (1,)))
    found = search(given_map, seed=1, effort=LITTLE).plan.instance
    assert {node for nodes in found.stages for node in nodes} == {0, 2}


def test_no_path_steps_over_more_stages_than_it_may():
    instance = replace(cities(stages=5, path_length=3, memory=2), max_gap=2)
    for seed in range(3):
        check(search(instance, seed=seed, effort=LITTLE))


@settings(max_examples=25, deadline=None, derandomize=True)
@example(2_778_507_018)
@given(st.integers(0, 2**32))
def test_no_rule_is_broken_and_no_memory_exceeded(seed: int):
    instance, table = uneven(seed)
    effort = PlacementEffort(starts=2, swaps=30, steps=20)
    found = search(instance, seed=seed, effort=effort, table=table)
    check(found, table)


def test_a_node_that_cannot_hold_its_stage_is_refused():
    instance, table = uneven(6)
    nothing = tuple((0, 0, 0) for _ in table.memory)
    with pytest.raises(ConfigError, match="memory"):
        search(instance, seed=1, table=PlacementTable(table.forward_s, nothing))
