"""A path that loses nodes goes on by others, or without them; copies are kept near and spread."""

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.extensions.pipeline.plans.recovery import (
    neighbours,
    predicted_s,
    repaired_path,
)
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.placement import first_plan
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import simulate


def instance(
    sizes: tuple[int, ...] = (2, 3, 3, 2), *, seed: int = 1, memory: int = 4, length: int = 3
) -> Instance:
    rng = random.Random(seed)
    count = sum(sizes)
    nodes = iter(range(count))
    return Instance(
        names=tuple(map(str, range(count))),
        forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(count)),
        hop_s=tuple(
            tuple(0.0 if i == j else rng.uniform(0.1, 3) for j in range(count)) for i in range(count)
        ),
        memory=(memory,) * count,
        stages=tuple(tuple(next(nodes) for _ in range(size)) for size in sizes),
        path_length=min(length, len(sizes)),
        waves=2,
    )


@given(st.integers(0, 10**6))
def test_a_repaired_path_is_of_living_untried_nodes_with_slots_in_the_same_order(seed: int):
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 5)))
    plan = first_plan(instance(sizes, seed=seed, length=rng.randint(2, 4)))
    path = rng.choice(plan.paths)
    everyone = range(plan.instance.node_count)
    lost = {node for node in everyone if rng.random() < 0.3}
    tried = {node for node in everyone if rng.random() < 0.2}
    load = {node: rng.randint(0, 4) for node in everyone}
    found = repaired_path(plan, path, lost, tried, load)
    if path[0] in lost:
        assert found is None
        return
    stage_of = plan.instance.stage_of
    living = [node for node in everyone if stage_of[node] > 0 and node not in lost]
    if found is None:
        assert living and not set(living) - tried
        return
    assert found[0] == path[0]
    assert not (lost | tried) & set(found[1:])
    stages = [stage_of[node] for node in found]
    assert len(set(stages)) == len(stages)
    assert (len(found) == 1) == (not living)
    kept = [node for node in path if node in found]
    assert kept == [node for node in found if node in path]
    planned = Counter(node for each in plan.paths for node in each)
    for node in set(found) - set(path):
        full = max(planned[node], load[node]) >= plan.instance.memory[node]
        assert not full or len(found) == 2


def two_paths(**changes: object) -> Plan:
    """Data node 0; stages (1, 2, 3) and (4, 5). Node 3 is nearest to everyone, node 2 farther, and so on."""
    hop_s = tuple(
        tuple(0.0 if i == j else float(abs(i - 3) + abs(j - 3)) for j in range(6)) for i in range(6)
    )
    base = Instance(
        ("0", "1", "2", "3", "4", "5"), (1.0,) * 6, hop_s, (2,) * 6, ((0,), (1, 2, 3), (4, 5)), 3, 1
    )
    return Plan(replace(base, **changes), ((0, 1, 4), (0, 2, 4)))  # type: ignore[arg-type]


def test_the_nearest_free_replica_takes_over():
    assert repaired_path(two_paths(), (0, 1, 4), {1}, (), {}) == (0, 3, 4)


def test_slots_of_the_plan_and_slots_in_use_are_not_free():
    assert repaired_path(two_paths(), (0, 1, 4), {1}, (), {3: 2}) == (0, 2, 4)
    assert repaired_path(two_paths(memory=(2, 1, 1, 1, 2, 2)), (0, 1, 4), {1}, (), {3: 1}) == (0, 4)


def test_a_slow_replica_is_farther_away():
    slow = two_paths(forward_s=(1.0, 1.0, 1.0, 9.0, 1.0, 1.0))
    assert repaired_path(slow, (0, 1, 4), {1}, (), {}) == (0, 2, 4)


def test_who_refused_is_not_asked_again_and_a_stage_without_others_is_left_out():
    assert repaired_path(two_paths(), (0, 1, 4), (), {1, 3}, {}) == (0, 2, 4)
    assert repaired_path(two_paths(), (0, 1, 4), {1}, {2, 3}, {}) == (0, 4)


def test_two_stages_are_kept_while_anyone_lives_even_if_that_is_another_stage():
    assert repaired_path(two_paths(), (0, 1), {1, 2, 3}, (), {}) == (0, 5)
    assert repaired_path(two_paths(), (0, 1, 4), {1, 2, 3, 4, 5}, (), {}) == (0,)


def test_nobody_left_to_ask_is_no_path():
    assert repaired_path(two_paths(), (0, 1, 4), {0}, (), {}) is None
    assert repaired_path(two_paths(), (0, 1, 4), {4, 5}, {1, 2, 3}, {}) is None


@given(st.integers(0, 10**6))
def test_everyone_has_a_keeper_in_another_stage_and_nobody_keeps_two_more_than_needed(seed: int):
    rng = random.Random(seed)
    given_ = instance(tuple(rng.randint(1, 5) for _ in range(rng.randint(2, 5))), seed=seed)
    found = neighbours(given_)
    stage_of, count = given_.stage_of, given_.node_count
    largest = max(map(len, given_.stages))
    most = -(-largest // (count - largest))
    keeps = Counter(found)
    assert None not in keeps
    assert all(stage_of[keeper] != stage_of[node] for node, keeper in enumerate(found) if keeper is not None)
    assert max(keeps.values()) <= most + 1


def test_a_copy_goes_to_the_nearest_where_nobody_else_wants_it():
    hop_s = tuple(tuple(0.0 if i == j else 1.0 if i + j == 3 else 5.0 for j in range(4)) for i in range(4))
    four = Instance(("a", "b", "c", "d"), (1.0,) * 4, hop_s, (2,) * 4, ((0, 1), (2, 3)), 2, waves=1)
    plan = first_plan(four)
    assert neighbours(plan.instance) == (3, 2, 1, 0)


def test_a_single_stage_has_no_neighbour():
    alone = Instance(("a",), (1.0,), ((0.0,),), (2,), ((0,),), 1, waves=1)
    assert neighbours(alone) == (None,)


def test_the_time_of_a_micro_batch_is_what_the_plan_predicts():
    plan = first_plan(instance())
    ends = {(task.agent, task.wave): 0.0 for task in simulate(plan).tasks}
    for task in simulate(plan).tasks:
        ends[task.agent, task.wave] = max(ends[task.agent, task.wave], task.end_s)
    for agent, waves in enumerate(predicted_s(plan)):
        assert sum(waves) <= ends[agent, 1] + 1e-9
        assert all(seconds > 0 for seconds in waves)
