"""What a member may be told while plans change, and what a convener makes of what members say."""

import pytest

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.membership.follower import MAX_EPOCH_LEAP, Follower
from swarmnode.extensions.pipeline.membership.membership_messages import ProposalProgress, Status
from swarmnode.extensions.pipeline.membership.proposal_round import (
    former_stages,
    next_epoch,
    target_iteration,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, PlanInputs, compute_plan
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from tests.unit.extensions.pipeline import pretend_members as pretend

INPUTS = PlanInputs(pretend.announced([pretend.costs(name) for name in "abc"]), pretend.settings(), None, 1)
PLAN = compute_plan(INPUTS)


def said(**changes: object) -> Status:
    return Status(**{"session": 1, "sequence": 1, "iteration": 0, "busy": False, "stage": 0, **changes})  # type: ignore[arg-type]


def prepared(plan: AgreedPlan = PLAN) -> Follower:
    follower = Follower(plan.partition.stages[0].peers[0], catch_up_s=60.0)
    follower.propose("a", INPUTS, 0.0)
    assert isinstance(follower.job(0.0), PlanInputs)
    follower.planned(INPUTS, plan)
    follower.prepared(plan)
    assert follower.progress == ProposalProgress.PREPARED
    return follower


def begun(iteration: int = 0) -> Follower:
    follower = prepared()
    follower.hold("a", 1, iteration, 0.0)
    follower.take("a", 1, iteration, 0.0)
    job = follower.job(0.0)
    assert isinstance(job, AgreedPlan) and job.iteration == iteration
    follower.taken(job)
    assert not follower.may_begin(iteration)
    follower.begin("a", 1, 0.0)
    assert follower.may_begin(iteration)
    return follower


def test_an_iteration_that_runs_is_not_held_but_the_next_one_is():
    follower = begun()
    follower.busy = True
    again = PlanInputs(INPUTS.announcements, INPUTS.settings, PLAN.as_former, 2)
    follower.propose("a", again, 0.0)
    follower.planned(again, compute_plan(again))
    with pytest.raises(Rejected, match=Refusal.BEGUN):
        follower.hold("a", 2, 0, 0.0)
    assert follower.may_begin(0)
    follower.hold("a", 2, 1, 0.0)
    follower.take("a", 2, 1, 0.0)
    assert follower.job(0.0) is None and not follower.may_begin(1)
    follower.busy = False
    assert follower.job(59.0) is None and isinstance(follower.job(60.0), AgreedPlan)
    follower.iteration = 1
    assert isinstance(follower.job(0.0), AgreedPlan)


def behind(iteration: int) -> Follower:
    """Told to take its place for iteration 5, with this many steps of its own."""
    follower = begun()
    follower.iteration = iteration
    again = PlanInputs(INPUTS.announcements, INPUTS.settings, PLAN.as_former, 3)
    follower.propose("a", again, 0.0)
    follower.planned(again, compute_plan(again))
    follower.hold("a", 3, 5, 0.0)
    follower.take("a", 3, 5, 0.0)
    return follower


def test_who_slept_through_several_iterations_or_a_plan_has_no_step_to_wait_for():
    assert behind(4).job(0.0) is None
    assert isinstance(behind(2).job(0.0), AgreedPlan)
    missed = behind(4)
    missed.hear("b", said(in_force=3), 0.0)
    assert missed.job(0.0) is None
    missed.hear("b", said(in_force=2), 0.0)
    assert isinstance(missed.job(0.0), AgreedPlan)


def test_a_step_that_closes_and_one_that_data_nodes_have_begun_are_waited_for_one_after_the_other():
    follower = behind(3)
    assert follower.job(0.0) is None
    follower.stepped(4, 50.0)
    assert follower.job(109.0) is None, "the next step has its own time to come"
    follower.stepped(5, 109.0)
    assert isinstance(follower.job(109.0), AgreedPlan)


def test_of_two_proposals_the_higher_epoch_wins_then_the_smaller_peer_id():
    follower = Follower("c", catch_up_s=60.0)
    follower.propose("b", INPUTS, 0.0)
    follower.propose("a", INPUTS, 0.0)
    with pytest.raises(Rejected, match=Refusal.OUTBID):
        follower.propose("b", INPUTS, 0.0)
    with pytest.raises(Rejected, match=Refusal.OTHER_EPOCH):
        follower.hold("b", 1, 0, 0.0)
    follower.propose("b", PlanInputs(INPUTS.announcements, INPUTS.settings, None, 2), 0.0)
    assert (follower.epoch, follower.by) == (2, "b")


def test_the_target_is_the_first_iteration_nobody_has_begun_and_liars_do_not_move_it():
    assert target_iteration([said(iteration=3), said(iteration=3)]) == 3
    assert target_iteration([said(iteration=3, busy=True), said(iteration=3)]) == 4
    assert target_iteration([said(iteration=4), said(iteration=3), said(iteration=3)]) == 4
    assert target_iteration([said(iteration=2**50, busy=True), said(iteration=3), said(iteration=3)]) == 3
    assert target_iteration([said(iteration=3), said(iteration=0, stage=-1)]) == 3


def test_the_next_epoch_is_above_all_but_the_absurd():
    assert next_epoch(3, [said(epoch=5), said(epoch=2)]) == 6
    assert next_epoch(3, [said(epoch=2**50), said(epoch=2)]) == 4
    assert next_epoch(0, [said(epoch=5000), said(epoch=5000), said(epoch=2**50)]) == 5001
    assert next_epoch(3, [said(epoch=3 + MAX_EPOCH_LEAP)]) == 4


def test_the_former_stages_are_those_that_most_hold():
    most, other = said(ends=(3, 6), stage=1), said(ends=(2, 6), stage=0)
    assert former_stages({"a": most, "b": other, "c": most}) == FormerStages((3, 6), {"a": 1, "c": 1})
    assert former_stages({"a": said(stage=-1)}) is None
