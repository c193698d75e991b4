"""A data node finds out who does nothing, and blames nobody else for it."""

from swarmnode.extensions.pipeline.membership.fault_log import FAULT, FAULT_EVERY_S, MEMORY_S, FaultLog
from swarmnode.extensions.pipeline.membership.membership_messages import Presence
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.observations import is_broken
from swarmnode.extensions.pipeline.plans.planning import FormerStages, PlanInputs, compute_plan
from tests.unit.extensions.pipeline import pretend_members as pretend

SETTINGS = pretend.settings(stages=3, skip=0.33, waves=2)
COSTS = [pretend.costs(name, free=800 * pretend.MB) for name in "abcdef"]
FORMER = FormerStages((2, 4, 6), {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2})
PLAN = compute_plan(PlanInputs(pretend.announced(COSTS), SETTINGS, FORMER, 1))


def presences(session: int = 1, without: str = "") -> dict[str, Presence]:
    said = {each.peer_id: CostAnnouncement(each, {}, {}) for each in COSTS}
    return {
        peer: Presence(session=session, sequence=1, terms={}, costs=one)
        for peer, one in said.items()
        if peer not in {"a", without}
    }


def seen(*silent: str, every_s: float = 30.0) -> FaultLog:
    """By iteration, those that did not answer."""
    outcomes = FaultLog("a")
    for number, peers in enumerate(silent):
        outcomes.add(PLAN, [*peers], presences(), number * every_s)
    return outcomes


def test_members_that_do_their_part_are_as_fast_as_they_claim():
    found = seen("", "", "").observed(60.0)
    own = PLAN.node_of("a")
    on_paths = {PLAN.peers[node] for path in PLAN.plan.paths if path[0] == own for node in path[1:]}
    assert found.keys() == on_paths and all(said.slowdown == 1.0 for said in found.values())


def test_one_bad_iteration_leaves_no_trace():
    on_path = min(seen("").observed(0.0))
    assert seen("", on_path, "").observed(60.0)[on_path].slowdown == 1.0


def test_who_does_not_answer_though_it_lives_is_found_broken_after_a_while_and_not_at_once():
    quick = seen(*["c"] * 9, every_s=FAULT_EVERY_S / 8).observed(FAULT_EVERY_S)
    assert quick["c"].slowdown == FAULT and not is_broken(quick["c"])
    assert is_broken(seen(*["c"] * 3).observed(60.0)["c"])


def test_of_who_died_or_was_restarted_nothing_is_remembered():
    dead, anew = seen(*["c"] * 3), seen(*["c"] * 3)
    dead.keep(presences(without="c"))
    anew.keep(presences(session=2))
    assert "c" not in dead.observed(60.0)
    assert anew.observed(60.0) == {}


def test_what_was_seen_long_ago_says_nothing():
    assert seen("").observed(MEMORY_S + 1) == {}
