"""Layers to stages by memory and speed: what every member must compute alike, and never get wrong."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts, StageTiming
from swarmnode.extensions.pipeline.plans.partition import Partition, partition, path_length
from swarmnode.extensions.pipeline.plans.plan_settings import LayerCost, ModelCosts, PlanSettings

MB = 10**6
LAYER = LayerCost(held_bytes=100 * MB, forward_s=1e-5, activation_bytes=10_000)
ENDS = LayerCost(held_bytes=200 * MB, forward_s=1e-5, activation_bytes=10_000)
WORK = PlanSettings(ModelCosts(LAYER, 6, ENDS), micro_batch_tokens=100, token_bytes=1, skip=0.33, slots=2)


def model(layers: int, **changes: object) -> PlanSettings:
    """Of this many equal layers."""
    return replace(WORK, model=ModelCosts(LAYER, layers, ENDS), **changes)  # type: ignore[arg-type]


def member(name: str, free_mb: int, speed: float = 1.0, holds_data: bool = True) -> MemberCosts:
    return costs_of(name, free_mb * MB, speed, holds_data)


def costs_of(name: str, free_bytes: int, speed: float = 1.0, holds_data: bool = True) -> MemberCosts:
    return MemberCosts(
        peer_id=name,
        free_bytes=free_bytes,
        memory_slots=2,
        holds_data=holds_data,
        timings=(StageTiming(1, LAYER.forward_s / speed, LAYER.forward_s / speed),),
        measured_at_s=0.0,
    )


def peers_of(answer: Partition) -> list[str]:
    return [peer for part in answer.stages for peer in part.peers]


def needed_bytes(answer: Partition, stage: int) -> int:
    part = answer.stages[stage]
    return part.held_bytes + WORK.slots * part.slot_bytes


def busiest_s(answer: Partition, speeds: dict[str, float], layer_s: float = LAYER.forward_s) -> float:
    """Seconds of the busiest stage for each token that goes through the pipeline."""
    share = (answer.path_length - 1) / (len(answer.stages) - 1)
    return max(
        ((part.end - part.first) * layer_s * share if part.first else part.end * layer_s + ENDS.forward_s)
        / sum(speeds[peer] for peer in part.peers)
        for part in answer.stages
    )


def test_equal_members_get_equal_stages_and_stage_0_less_for_its_ends():
    answer = partition(model(7, skip=0.0), [member(f"p{i}", 2000) for i in range(4)], stages=4)
    assert [(part.first, part.end) for part in answer.stages] == [(0, 1), (1, 3), (3, 5), (5, 7)]
    assert answer.path_length == 4


def test_a_skipped_stage_needs_fewer_replicas_than_stage_0():
    """SkipPipe's sizing rule: 5 data nodes and 3 for each of five stages of which three are visited."""
    even = replace(WORK, model=ModelCosts(LAYER, 12, replace(ENDS, forward_s=0.0)))
    answer = partition(even, [member(f"p{i:02}", 5000) for i in range(20)], stages=6)
    assert answer.path_length == 4
    assert sorted(len(part.peers) for part in answer.stages[1:]) == [3, 3, 3, 3, 3]
    assert len(answer.stages[0].peers) == 5


def test_a_fast_member_gets_more_layers():
    fast = [member("a", 4000), member("b", 4000, speed=2.0, holds_data=False)]
    answer = partition(model(8, skip=0.0), fast, stages=2)
    assert answer.stages[1].peers == ("b",)
    assert answer.stages[1].end - answer.stages[1].first > answer.stages[0].end


def test_only_willing_members_hold_stage_0():
    members = [member(f"p{i}", 3000, holds_data=i == 3) for i in range(6)]
    assert partition(model(6), members, stages=3).stages[0].peers == ("p3",)


def test_a_member_too_small_for_any_stage_is_spare():
    members = [member("a", 3000), member("b", 3000), member("c", 3000), member("tiny", 50)]
    answer = partition(model(6), members, stages=3)
    assert sorted(peers_of(answer)) == ["a", "b", "c"]


def test_too_little_memory_is_refused_with_the_missing_bytes():
    """Two stages of three layers and the ends: with 15 MB less than enough, 15 MB are missing."""
    work = model(6, skip=0.0)
    low, high = 0, 402 * MB * 2
    while low < high:
        middle = (low + high) // 2
        try:
            partition(work, [costs_of(name, middle) for name in "ab"], stages=2)
            high = middle
        except ModelError:
            low = middle + 1
    with pytest.raises(ModelError, match=f"each would need {15 * MB:,} bytes more"):
        partition(work, [costs_of(name, low - 15 * MB) for name in "ab"], stages=2)


def test_nobody_for_stage_0_is_refused():
    with pytest.raises(ModelError, match="no member holds data"):
        partition(model(6), [member(name, 3000, holds_data=False) for name in "ab"], stages=2)


@pytest.mark.parametrize("stages", [1, 7, 0, -1])
def test_an_impossible_number_of_stages_is_refused(stages: int):
    with pytest.raises(ConfigError, match="stages asked for"):
        partition(model(6), [member(f"p{i}", 3000) for i in range(9)], stages=stages)


def test_a_hostile_speed_counts_no_more_than_the_fastest_there_can_be():
    fast, faster = (
        partition(model(6), [member("a", 3000), member("b", 3000, speed=speed)], stages=2)
        for speed in (1e6, 1e7)
    )
    assert fast == faster


@pytest.mark.parametrize(("dear", "stages"), [(1, 3), (-1, 12)])
def test_without_a_number_of_stages_the_cheapest_that_skips_as_wanted_is_taken(dear: int, stages: int):
    members = [member(f"p{i:02}", 3000) for i in range(12)]
    answer = partition(model(24), members, stages=None, price=lambda each: dear * len(each.stages))
    assert len(answer.stages) == stages
    assert path_length(stages, WORK.skip) == answer.path_length


def test_without_a_number_of_stages_small_members_make_it_large():
    members = [member(f"p{i:02}", 650) for i in range(12)]
    answer = partition(model(24), members, stages=None)
    assert len(answer.stages) >= 6


def test_last_bits_of_a_measurement_change_nothing():
    members = [member(f"p{i}", 3000, speed=1.0 + i / 10) for i in range(8)]
    nudged = [member(f"p{i}", 3000, speed=(1.0 + i / 10) * (1 + 1e-12)) for i in range(8)]
    assert partition(model(12), members, stages=4) == partition(model(12), nudged, stages=4)


swarms = st.lists(
    st.tuples(st.integers(300, 3000), st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.booleans()),
    min_size=4,
    max_size=10,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(swarms, st.integers(0, 2**32), st.integers(2, 4))
def test_announcements_in_another_order_give_the_same_partition(
    swarm: list[tuple[int, float, bool]], seed: int, stages: int
):
    members = [member(f"p{i}", *each) for i, each in enumerate(swarm)] + [member("willing", 3000)]
    shuffled = members.copy()
    random.Random(seed).shuffle(shuffled)
    assert _outcome(members, stages) == _outcome(shuffled, stages)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(swarms, st.integers(2, 4))
def test_no_member_holds_more_than_it_can_and_every_layer_and_stage_is_held(
    swarm: list[tuple[int, float, bool]], stages: int
):
    members = [member(f"p{i}", *each) for i, each in enumerate(swarm)] + [member("willing", 3000)]
    answer = _outcome(members, stages)
    if isinstance(answer, str):
        assert "bytes more" in answer
        return
    by_name = {each.peer_id: each for each in members}
    bounds = [(part.first, part.end) for part in answer.stages]
    assert bounds[0][0] == 0 and bounds[-1][1] == 9
    assert all(former[1] == later[0] for former, later in pairwise(bounds))
    assert all(part.peers and part.first < part.end for part in answer.stages)
    assert len(peers_of(answer)) == len(answer.stage_of) and answer.stage_of.keys() <= by_name.keys()
    assert all(by_name[peer].holds_data for peer in answer.stages[0].peers)
    for stage, part in enumerate(answer.stages):
        assert all(by_name[peer].free_bytes >= needed_bytes(answer, stage) for peer in part.peers)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=2), st.integers(600, 900))
def test_two_stages_of_one_member_each_are_cut_where_it_is_best(speeds: list[float], free_mb: int):
    """Against all cuts and both assignments."""
    members = [member("a", free_mb, speeds[0]), member("b", free_mb, speeds[1])]
    whole = [
        max((ENDS.forward_s + cut * 1e-5) / first, (6 - cut) * 1e-5 / second)
        for first, second in (speeds, speeds[::-1])
        for cut in range(2, 5)
        if 200 + 100 * cut + 2 * (cut + 1) <= free_mb and 102 * (6 - cut) <= free_mb
    ]
    answer = partition(model(6, skip=0.0), members, stages=2)
    if whole:
        assert busiest_s(answer, dict(zip("ab", speeds, strict=True))) <= min(whole) * (1 + 1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(5, 8))
def test_among_equal_members_no_even_cut_is_faster(layer_time: int, count: int):
    """Against every cut into four stages of 1 to 3 layers, and every number of replicas."""
    layer = replace(LAYER, forward_s=1e-5 * layer_time)
    members = [member(f"p{i}", 3000) for i in range(count)]
    answer = partition(replace(WORK, model=ModelCosts(layer, 8, ENDS)), members, stages=4)
    assert answer.path_length == 3
    cuts = [(0, *cut, 8) for cut in combinations(range(1, 8), 3)]
    best = min(
        max(
            (layer_time * (end - first) + (first == 0)) * (1 if first == 0 else 2 / 3) / (until - since)
            for (first, end), (since, until) in zip(pairwise(cut), pairwise(replicas), strict=True)
        )
        for cut in cuts
        if max(end - first for first, end in pairwise(cut)) <= 3
        for replicas in [(0, *inner, count) for inner in combinations(range(1, count), 3)]
    )
    found = busiest_s(answer, dict.fromkeys(peers_of(answer), 1.0), layer.forward_s)
    assert found == pytest.approx(1e-5 * best)


def _outcome(members: list[MemberCosts], stages: int) -> Partition | str:
    try:
        return partition(model(9), members, stages=stages)
    except ModelError as error:
        return str(error)
