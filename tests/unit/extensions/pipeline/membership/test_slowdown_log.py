"""A data node finds out who is slow and who does nothing, and blames nobody else for it."""

import pytest

from swarmnode.extensions.pipeline.execution.member_records import IterationReport, RoundTrip
from swarmnode.extensions.pipeline.membership.membership_messages import Presence
from swarmnode.extensions.pipeline.membership.slowdown_log import FAULT, FAULT_EVERY_S, MEMORY_S, SlowdownLog
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.observations import is_broken
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, FormerStages, PlanInputs, compute_plan
from swarmnode.extensions.pipeline.plans.recovery import predicted_s
from tests.unit.extensions.pipeline import pretend_members as pretend

SETTINGS = pretend.settings(stages=3, skip=0.33, waves=2)
COSTS = [pretend.costs(name, free=800 * pretend.MB) for name in "abcdef"]
FORMER = FormerStages((2, 4, 6), {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2})
PLAN = compute_plan(PlanInputs(pretend.announced(COSTS), SETTINGS, FORMER, 1))


def claims(session: int = 1, without: str = "") -> dict[str, Presence]:
    return {
        each.peer_id: Presence(session=session, sequence=1, terms={}, costs=CostAnnouncement(each, {}, {}))
        for each in COSTS
        if each.peer_id not in {"a", without}
    }


def iteration(agreed: AgreedPlan = PLAN, *, slow: str = "", by_s: float = 0.0, factor: float = 1.0):
    """Micro-batches on all paths: `by_s` later past `slow`, all of them `factor` times as long as planned."""
    round_trips = [
        RoundTrip(
            path, planned_s * factor + by_s * (slow in {agreed.peers[node] for node in path}), planned_s
        )
        for path, waves in zip(agreed.plan.paths, predicted_s(agreed.plan), strict=True)
        for planned_s in waves
    ]
    return IterationReport(0, round_trips=round_trips)


def seen(*reports: IterationReport, silent: tuple[str, ...] = (), every_s: float = 30.0) -> SlowdownLog:
    outcomes = SlowdownLog(SETTINGS.micro_batch_tokens)
    for number, report in enumerate(reports):
        outcomes.add(PLAN, report, silent, claims(), number * every_s)
    return outcomes


def test_members_that_keep_to_the_plan_are_as_fast_as_they_claim():
    found = seen(*[iteration()] * 3).observed(60.0)
    on_paths = {PLAN.peers[node] for path in PLAN.plan.paths for node in path[1:]}
    assert found.keys() == on_paths and all(said.slowdown == 1.0 for said in found.values())


def test_what_slows_everybody_down_is_nobodys_fault():
    assert all(said.slowdown == 1.0 for said in seen(*[iteration(factor=4.0)] * 3).observed(60.0).values())


def test_a_slow_member_is_found_by_the_micro_batches_that_pass_it():
    forward_s = PLAN.plan.instance.forward_s[PLAN.peers.index("c")]
    late_s = 7 * forward_s * (1 + PLAN.plan.instance.backward_factor)
    found = seen(*[iteration(slow="c", by_s=late_s)] * 3).observed(60.0)
    assert found["c"].slowdown == pytest.approx(8.0, rel=0.01)
    assert [peer for peer, said in found.items() if said.slowdown > 1.0] == ["c"]


def test_one_bad_iteration_leaves_no_trace():
    assert seen(iteration(), iteration(slow="c", by_s=9.0), iteration()).observed(60.0)["c"].slowdown == 1.0


def test_who_does_not_answer_though_it_lives_is_found_broken_after_a_while_and_not_at_once():
    nothing = IterationReport(0, retried=1)
    quick = seen(*[nothing] * 9, silent=("c",), every_s=FAULT_EVERY_S / 8).observed(FAULT_EVERY_S)
    assert quick["c"].slowdown == FAULT and not is_broken(quick["c"])
    assert is_broken(seen(*[nothing] * 3, silent=("c",)).observed(60.0)["c"])


def test_of_who_died_or_was_restarted_nothing_is_remembered():
    nothing = IterationReport(0, retried=1)
    dead, anew = seen(*[nothing] * 3, silent=("c",)), seen(*[nothing] * 3, silent=("c",))
    dead.keep(claims(without="c"))
    anew.keep(claims(session=2))
    assert dead.observed(60.0) == anew.observed(60.0) == {}


def test_what_was_seen_long_ago_says_nothing():
    assert seen(iteration()).observed(MEMORY_S + 1) == {}
