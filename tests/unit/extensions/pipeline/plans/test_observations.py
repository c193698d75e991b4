"""What one member says of another changes a plan a little, what most data nodes say leaves a member out."""

import msgspec

from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, Observation
from swarmnode.extensions.pipeline.plans.observations import (
    ENOUGH,
    LONE,
    corrected_costs,
    useless_members,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, PlanInputs, compute_plan
from tests.unit.extensions.pipeline import pretend_members as pretend

WEIGHTS = 800 * pretend.MB
USELESS = Observation(20.0, ENOUGH)
FORMER = FormerStages((2, 4, 6), {"a": 0, "b": 0, "c": 0, "d": 1, "e": 2, "f": 1})


def said(**of: dict[str, Observation]) -> tuple[CostAnnouncement, ...]:
    """By member, what it says of others."""
    members = [pretend.costs(name, free=WEIGHTS) for name in "abcdef"]
    return tuple(
        msgspec.structs.replace(each, observed=of.get(each.member.peer_id, {}))
        for each in pretend.announced(members)
    )


def times_slower(announcements: tuple[CostAnnouncement, ...], peer: str) -> float:
    found = {each.peer_id: each for each in corrected_costs(announcements, FORMER.stage_of)}
    return found[peer].timings[0].forward_s / pretend.costs(peer).timings[0].forward_s


def plan_of(announcements: tuple[CostAnnouncement, ...], former: FormerStages | None = FORMER) -> AgreedPlan:
    return compute_plan(PlanInputs(announcements, pretend.settings(stages=3, skip=0.33), former, 2))


def test_one_witness_alone_slows_a_member_down_a_little_and_leaves_nobody_out():
    alone = said(a={"d": Observation(1000.0, 10**6)})
    assert 1.0 < times_slower(alone, "d") <= LONE
    assert useless_members(alone, FORMER.stage_of) == frozenset()
    assert plan_of(alone).stage_of("d") == 1


def test_others_than_data_nodes_are_no_witnesses():
    liars = said(e={"d": USELESS}, f={"d": USELESS})
    assert times_slower(liars, "d") == 1.0
    assert plan_of(liars).stage_of("d") == 1


def test_nobody_is_made_faster_than_it_claims():
    assert times_slower(said(a={"d": Observation(0.01, 99)}, b={"d": Observation(0.01, 99)}), "d") == 1.0


def test_who_does_nothing_by_the_word_of_most_data_nodes_gets_no_stage():
    plan = plan_of(said(a={"d": USELESS}, b={"d": USELESS}))
    assert plan.spare == ("d",) and plan.members == {*"abcdef"}
    assert plan.as_former.stage_of == {peer: at for peer, at in FORMER.stage_of.items() if peer != "d"}


def test_two_of_five_data_nodes_leave_nobody_out():
    stage_of = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 0, "f": 0}
    assert useless_members(said(a={"d": USELESS}, b={"d": USELESS}), stage_of) == frozenset()
    assert useless_members(said(a={"d": USELESS}, b={"d": USELESS}, c={"d": USELESS}), stage_of) == {"d"}


def test_one_fault_is_not_enough():
    once = Observation(20.0, ENOUGH - 1)
    assert useless_members(said(a={"d": once}, b={"d": once}), FORMER.stage_of) == frozenset()


def test_who_cannot_be_done_without_stays():
    """It alone has the memory for its stage."""
    costs = [pretend.costs(name, free=(WEIGHTS if name == "d" else 260 * pretend.MB)) for name in "abd"]
    observed = {"a": {"d": USELESS}, "b": {"d": USELESS}, "d": {}}
    announcements = tuple(
        msgspec.structs.replace(each, observed=observed[each.member.peer_id])
        for each in pretend.announced(costs)
    )
    former = FormerStages((2, 6), {"a": 0, "b": 0, "d": 1})
    plan = compute_plan(PlanInputs(announcements, pretend.settings(stages=2), former, 2))
    assert plan.stage_of("d") == 1
