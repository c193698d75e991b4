"""All members come to one plan; a change of members moves nobody who need not move."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConfigError, ModelError
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, LinkCosts, MemberCosts
from swarmnode.extensions.pipeline.plans.plan_settings import PlanSettings, plan_terms
from swarmnode.extensions.pipeline.plans.planning import (
    AgreedPlan,
    FormerStages,
    PlanInputs,
    compute_plan,
    must_load,
)
from swarmnode.extensions.pipeline.scheduling.plan import violations
from tests.unit.extensions.pipeline import pretend_members as pretend
from tests.unit.extensions.pipeline.pretend_members import MB


def members(count: int, **changes: object) -> list[MemberCosts]:
    return [pretend.costs(f"p{number:02}", **changes) for number in range(count)]  # type: ignore[arg-type]


def inputs(
    of: list[MemberCosts],
    former: FormerStages | None = None,
    epoch: int = 1,
    settings: PlanSettings | None = None,
) -> PlanInputs:
    return PlanInputs(pretend.announced(of), settings or pretend.settings(), former, epoch)


def check(plan: AgreedPlan, of: list[MemberCosts]) -> None:
    """What must hold of every plan: rules kept, every layer held once, everyone used or spare."""
    assert violations(plan.plan) == []
    ends = [0, *(part.end for part in plan.partition.stages)]
    assert [part.first for part in plan.partition.stages] == ends[:-1]
    assert ends[-1] == 6
    assert plan.members == {each.peer_id for each in of}
    for each in of:
        part = plan.planned_stage_of(each.peer_id)
        assert part is None or part.held_bytes + part.slot_bytes <= each.free_bytes
        node = plan.node_of(each.peer_id)
        assert (node is None) == (part is None)
        if node is not None:
            assert plan.plan.instance.stage_of[node] == plan.stage_of(each.peer_id)
    assert all(plan.partition.stages[0].peers)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_any_order_of_announcements_gives_one_digest_and_no_rule_is_broken(seed: int):
    rng = random.Random(seed)
    of = [
        pretend.costs(
            f"p{n:02}", free=rng.randint(350, 900) * MB, speed=rng.uniform(0.5, 3), data=rng.random() < 0.7
        )
        for n in range(rng.randint(3, 7))
    ]
    of[0] = pretend.costs("p00", free=900 * MB)
    chosen = pretend.settings(skip=rng.choice((0.0, 0.33)))
    said = list(pretend.announced(of))
    first = compute_plan(PlanInputs(tuple(said), chosen, None, 1))
    check(first, of)
    rng.shuffle(said)
    assert compute_plan(PlanInputs(tuple(said), chosen, None, 1)).digest == first.digest


def unequal(rng: random.Random) -> tuple[list[MemberCosts], PlanSettings, AgreedPlan]:
    """Some members on three stages, and their first plan."""
    of = [
        pretend.costs(f"p{n:02}", free=rng.randint(450, 900) * MB, speed=rng.uniform(0.5, 3))
        for n in range(rng.randint(4, 8))
    ]
    chosen = pretend.settings(stages=3)
    return of, chosen, compute_plan(inputs(of, settings=chosen))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
@example(4323)
def test_one_death_moves_at_most_one_member(seed: int):
    rng = random.Random(seed)
    of, chosen, first = unequal(rng)
    victim = rng.choice(of)
    left = [each for each in of if each is not victim]
    second = compute_plan(inputs(left, first.as_former, 2, chosen))
    check(second, left)
    moved_to = [second.stage_of(peer) for peer in must_load(second, first.as_former)]
    emptied = [stage for stage, part in enumerate(first.partition.stages) if part.peers == (victim.peer_id,)]
    # Where no stage has become empty, only data nodes are worth a move, and only while stage 0 has fewer of
    # them than the other stages have replicas on average.
    assert moved_to == emptied or (not emptied and moved_to == [0])
    data_nodes, *others = (len(part.peers) for part in second.partition.stages)
    assert emptied or not moved_to or (data_nodes - 1) * len(others) < sum(others) + 1


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
@example(4323)
def test_the_same_members_again_move_nobody_not_even_after_a_first_plan(seed: int):
    of, chosen, first = unequal(random.Random(seed))
    second = compute_plan(inputs(of, first.as_former, 2, chosen))
    assert must_load(second, first.as_former) == ()
    third = compute_plan(inputs(of[1:], second.as_former, 3, chosen))
    fourth = compute_plan(inputs(of[1:], third.as_former, 4, chosen))
    assert must_load(fourth, third.as_former) == ()


WEIGHTS = 800 * MB
"""Enough for every stage."""


def tokens_of(plan: AgreedPlan) -> int:
    """Micro-batches of a step."""
    return len(plan.plan.paths) * plan.plan.instance.waves


def two_of_each(skip: float = 0.25) -> tuple[list[MemberCosts], PlanSettings, AgreedPlan]:
    """Three stages with two replicas each."""
    of, chosen = members(6, free=WEIGHTS), pretend.settings(stages=3, skip=skip)
    former = FormerStages((1, 4, 6), {each.peer_id: number // 2 for number, each in enumerate(of)})
    return of, chosen, compute_plan(inputs(of, former, 1, chosen))


@pytest.mark.parametrize("skip", [0.0, 0.25])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_a_newcomer_takes_the_place_of_a_data_node_that_died(skip: float, speed: float):
    of, chosen, first = two_of_each(skip)
    of = [*of[1:], pretend.costs("p99", free=WEIGHTS, speed=speed)]
    second = compute_plan(inputs(of, first.as_former, 2, chosen))
    assert must_load(second, first.as_former) == ("p99",) and second.stage_of("p99") == 0
    assert tokens_of(second) == tokens_of(first)


@pytest.mark.parametrize(("speed", "of_newcomer"), [(0.02, 0.02), (0.05, 0.3)])
def test_a_newcomer_becomes_a_data_node_though_it_would_save_more_time_elsewhere(
    speed: float, of_newcomer: float
):
    of, chosen, _ = two_of_each()
    slow = [pretend.costs(each.peer_id, free=WEIGHTS, speed=speed) for each in of[1:5]]
    newcomer = pretend.costs("p99", free=WEIGHTS, speed=of_newcomer)
    former = FormerStages((1, 4, 6), {"p00": 0, "p01": 1, "p02": 1, "p03": 2, "p04": 2})
    second = compute_plan(inputs([of[0], *slow, newcomer], former, 2, chosen))
    assert must_load(second, former) == ("p99",) and second.stage_of("p99") == 0


def test_a_newcomer_without_data_goes_elsewhere_and_a_replica_becomes_a_data_node():
    of, chosen, first = two_of_each()
    of = [*of[1:], pretend.costs("p99", free=WEIGHTS, data=False)]
    second = compute_plan(inputs(of, first.as_former, 2, chosen))
    assert second.stage_of("p99") != 0
    assert len(second.partition.stages[0].peers) == 2
    assert tokens_of(second) == tokens_of(first)


def test_of_those_that_are_left_one_moves_to_stage_0_and_the_tokens_of_a_step_come_back():
    of, chosen, first = two_of_each()
    second = compute_plan(inputs(of[1:], first.as_former, 2, chosen))
    (moved,) = must_load(second, first.as_former)
    assert second.stage_of(moved) == 0 and tokens_of(second) == tokens_of(first)
    third = compute_plan(inputs(of[1:], second.as_former, 3, chosen))
    assert must_load(third, second.as_former) == ()


def test_nobody_moves_to_stage_0_where_the_other_stages_have_no_slots_for_what_it_would_start():
    of, chosen, first = two_of_each(skip=0.0)
    second = compute_plan(inputs(of[1:], first.as_former, 2, chosen))
    assert must_load(second, first.as_former) == ()


def test_all_data_nodes_that_died_are_replaced():
    of, chosen, first = two_of_each()
    second = compute_plan(inputs(of[2:], first.as_former, 2, chosen))
    assert len(must_load(second, first.as_former)) == 2
    assert len(second.partition.stages[0].peers) == 2 and tokens_of(second) == tokens_of(first)


def test_the_only_newcomer_with_data_fills_stage_0_whatever_else_is_empty():
    _, chosen, first = two_of_each()
    without = [pretend.costs(peer, free=WEIGHTS, data=False) for peer in ("p02", "p03", "p99")]
    of = [*without, pretend.costs("p98", free=WEIGHTS)]
    second = compute_plan(inputs(of, first.as_former, 2, chosen))
    assert second.stage_of("p98") == 0 and second.stage_of("p99") == 2


def test_a_data_node_that_would_make_every_step_far_slower_is_not_wanted():
    of, chosen, _ = two_of_each()
    slow = [pretend.costs(each.peer_id, free=WEIGHTS, speed=0.1) for each in of[2:]]
    former = FormerStages((4, 5, 6), {each.peer_id: number // 2 for number, each in enumerate(of)})
    second = compute_plan(inputs([of[1], *slow], former, 2, chosen))
    assert must_load(second, former) == ()


def test_a_newcomer_takes_the_stage_that_it_helps_most_and_nobody_else_moves():
    for slow in (1, 2):
        of = [pretend.costs(f"p{n:02}", speed=0.2 if n == slow else 1.0) for n in range(3)]
        former = FormerStages((2, 4, 6), {each.peer_id: stage for stage, each in enumerate(of)})
        before = compute_plan(inputs(of, former, 1))
        after = compute_plan(inputs([*of, pretend.costs("p99", data=False)], former, 2))
        assert must_load(after, former) == ("p99",)
        assert after.stage_of("p99") == slow
        assert after.makespan_s < 0.75 * before.makespan_s


def test_a_gap_is_filled_by_a_newcomer_before_anyone_moves():
    of = members(4)
    first = compute_plan(inputs(of, settings=pretend.settings(stages=3)))
    gone = next(part.peers[0] for part in first.partition.stages[1:] if len(part.peers) == 1)
    left = [*(each for each in of if each.peer_id != gone), pretend.costs("p99")]
    second = compute_plan(inputs(left, first.as_former, 2, pretend.settings(stages=3)))
    assert must_load(second, first.as_former) == ("p99",)
    assert second.stage_of("p99") == first.stage_of(gone)


def test_slow_links_make_the_number_of_stages_small_and_the_skip_ratio_is_kept():
    of = members(12, free=3000 * MB)
    far = {each.peer_id: LinkCosts(5.0, 1e8) for each in of}
    announced = tuple(
        CostAnnouncement(each, {peer: link for peer, link in far.items() if peer != each.peer_id}, {})
        for each in of
    )
    plan = compute_plan(PlanInputs(announced, pretend.settings(24, skip=0.33), None, 1))
    assert (len(plan.partition.stages), plan.partition.path_length) == (3, 2)


def test_too_few_for_the_former_stages_divide_the_layers_anew():
    of = members(3, free=800 * MB)
    chosen = pretend.settings(stages=3)
    first = compute_plan(inputs(of, settings=chosen))
    second = compute_plan(inputs(of[:2], first.as_former, 2, chosen))
    check(second, of[:2])
    assert len(second.partition.stages) == 2
    third = compute_plan(inputs(of, second.as_former, 3, chosen))
    assert len(third.partition.stages) == 3


def test_the_last_one_holds_everything_and_shares_it_again_with_who_comes():
    of = members(2, free=800 * MB)
    alone = compute_plan(inputs(of[:1], compute_plan(inputs(of)).as_former, 2))
    assert violations(alone.plan) == [] and alone.plan.paths[0] == (0,)
    again = compute_plan(inputs(of, alone.as_former, 3))
    assert len(again.partition.stages) == 2
    small = [of[0], pretend.costs("p99", free=20 * MB)]
    kept = compute_plan(inputs(small, alone.as_former, 3))
    assert kept.spare == ("p99",) and must_load(kept, alone.as_former) == ()
    assert kept.why_spare(small[1]) == (
        "the smallest stage takes 627 MiB, and we give 19 MiB: raise --max-memory"
    )
    assert kept.why_spare(of[0]) == "the others are as fast without us"


def test_what_does_not_fit_is_said_in_bytes_with_advice():
    with pytest.raises(ModelError, match=r"would need .* bytes more.*add members"):
        compute_plan(inputs(members(2, free=150 * MB)))
    with pytest.raises(
        ModelError, match=r"only member left and lacks 257,000,000 bytes.*wait for other members"
    ):
        compute_plan(inputs(members(1)))
    with pytest.raises(ConfigError, match="no link"):
        compute_plan(
            PlanInputs(
                tuple(CostAnnouncement(each, {}, {}) for each in members(3)), pretend.settings(), None, 1
            )
        )


def test_the_same_plan_of_another_epoch_has_another_name():
    one, other = compute_plan(inputs(members(3))), compute_plan(inputs(members(3), epoch=2))
    assert one.plan == other.plan and one.digest != other.digest


def test_terms_name_what_differs_and_no_more():
    one, other = plan_terms(pretend.settings(), "tiny"), plan_terms(pretend.settings(skip=0.5), "tiny")
    assert {name for name in one if one[name] != other[name]} == {"skip"}
    costly = replace(pretend.settings(), model=pretend.model(7))
    assert plan_terms(costly, "tiny")["layer_costs"] != one["layer_costs"]
    assert all(len(text) <= 64 for text in one.values())
