"""Claims of members: bounded, corrected by what others see, and made into an instance."""

import random

import msgspec
import pytest

from swarmnode.errors import ConfigError, Rejected
from swarmnode.extensions.pipeline.plans.member_costs import (
    MAX_AGE_S,
    MAX_CLOCK_SKEW_S,
    CostAnnouncement,
    LinkCosts,
    MemberCosts,
    Observation,
    StageTiming,
    backward_s,
    check,
    forward_s,
)
from swarmnode.extensions.pipeline.plans.observations import corrected_costs
from swarmnode.extensions.pipeline.plans.partition import Partition, PlannedStage
from swarmnode.extensions.pipeline.plans.plan_settings import LayerCost, ModelCosts, PlanSettings
from swarmnode.extensions.pipeline.plans.planning_costs import PlanningCosts

NOW_S = 1_000_000.0
NAN, INF = float("nan"), float("inf")
GB = 10**9


def member(name: str = "a", **changes: object) -> MemberCosts:
    costs = MemberCosts(
        peer_id=name,
        free_bytes=4 * GB,
        memory_slots=3,
        holds_data=True,
        timings=(StageTiming(1, 1e-5, 2e-5), StageTiming(4, 4e-5, 8e-5)),
        measured_at_s=NOW_S,
    )
    return msgspec.structs.replace(costs, **changes)


def announcement(of: MemberCosts | None = None, **changes: object) -> CostAnnouncement:
    said = CostAnnouncement(of or member(), {"b": LinkCosts(0.02, 1e7)}, {"b": Observation(1.0, 10)})
    return msgspec.structs.replace(said, **changes)


def arrives(said: CostAnnouncement, author: str = "a") -> CostAnnouncement:
    """As in a message: the types bound what is decoded, `check` the rest."""
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=CostAnnouncement)
    check(told, author=author, now_s=NOW_S)
    return told


def test_an_announcement_arrives_as_it_was_sent():
    assert arrives(announcement()) == announcement()


hostile_members = {
    "speed NaN": member(timings=(StageTiming(1, NAN, 1e-5),)),
    "speed infinite": member(timings=(StageTiming(1, 1e-5, INF),)),
    "takes no time": member(timings=(StageTiming(1, 0.0, 1e-5),)),
    "takes negative time": member(timings=(StageTiming(1, -1.0, 1e-5),)),
    "takes for ever": member(timings=(StageTiming(1, 1e9, 1e-5),)),
    "no timing": member(timings=()),
    "a thousand timings": member(timings=tuple(StageTiming(n, 1.0, 1.0) for n in range(1, 501))),
    "no layers": member(timings=(StageTiming(0, 1e-5, 1e-5),)),
    "timings out of order": member(timings=(StageTiming(4, 1e-5, 1e-5), StageTiming(1, 1e-5, 1e-5))),
    "layers twice": member(timings=(StageTiming(4, 1e-5, 1e-5), StageTiming(4, 2e-5, 1e-5))),
    "negative memory": member(free_bytes=-1),
    "endless memory": member(free_bytes=2**60),
    "no slot": member(memory_slots=0),
    "endless slots": member(memory_slots=10**6),
    "measured at NaN": member(measured_at_s=NAN),
    "no name": member(""),
    "a long name": member("a" * 53),
}
hostile_links = {
    "latency NaN": LinkCosts(NAN, 1e6),
    "latency negative": LinkCosts(-0.1, 1e6),
    "latency of hours": LinkCosts(3600.0, 1e6),
    "bandwidth NaN": LinkCosts(0.1, NAN),
    "bandwidth infinite": LinkCosts(0.1, INF),
    "bandwidth zero": LinkCosts(0.1, 0.0),
}


@pytest.mark.parametrize("claim", hostile_members.values(), ids=hostile_members.keys())
def test_a_hostile_claim_of_a_member_is_refused(claim: MemberCosts):
    with pytest.raises((msgspec.ValidationError, Rejected)):
        arrives(announcement(claim), author=claim.peer_id)


@pytest.mark.parametrize("claim", hostile_links.values(), ids=hostile_links.keys())
def test_a_hostile_claim_of_a_link_is_refused(claim: LinkCosts):
    with pytest.raises(msgspec.ValidationError):
        arrives(announcement(links={"b": claim}))


@pytest.mark.parametrize("slowdown", [NAN, INF, 0.0, -1.0, 1e6])
def test_a_hostile_observation_is_refused(slowdown: float):
    with pytest.raises(msgspec.ValidationError):
        arrives(announcement(observed={"b": Observation(slowdown, 1)}))


def test_a_member_speaks_for_itself_only():
    for said in (
        announcement(member("b")),
        announcement(links={"a": LinkCosts(0.1, 1e6)}),
        announcement(observed={"a": Observation(1.0, 1)}),
    ):
        with pytest.raises(Rejected, match="not_own"):
            arrives(said)


@pytest.mark.parametrize("age_s", [MAX_AGE_S + 1, -MAX_CLOCK_SKEW_S - 1])
def test_a_claim_from_too_long_ago_or_from_the_future_is_refused(age_s: float):
    with pytest.raises(Rejected, match="stale"):
        arrives(announcement(member(measured_at_s=NOW_S - age_s)))


def test_time_grows_with_the_layers_between_and_beyond_what_was_measured():
    bent = member(timings=(StageTiming(2, 3.0, 5.0), StageTiming(4, 7.0, 9.0)))
    assert [forward_s(bent, layers) for layers in (1, 2, 3, 4, 8)] == [1.5, 3.0, 5.0, 7.0, 14.0]
    assert backward_s(bent, 3) == 7.0


def swarm(slowdowns: dict[str, float], micro_batches: int = 1000) -> list[CostAnnouncement]:
    """Honest "a" and one announcement for each observer of it."""
    said = [announcement(member("a"), links={}, observed={})]
    for name, slowdown in slowdowns.items():
        seen = {"a": Observation(slowdown, micro_batches)}
        said.append(announcement(member(name), links={}, observed=seen))
    return said


def believed(said: list[CostAnnouncement]) -> tuple[MemberCosts, ...]:
    """What a plan counts with where all of them hold data."""
    return corrected_costs(said, {each.member.peer_id: 0 for each in said})


def test_a_member_that_lies_about_its_speed_is_corrected():
    """It is four times as slow as it says: with many micro-batches seen, that is what is believed."""
    true = believed(swarm({"b": 4.0, "c": 4.0, "d": 4.0}, micro_batches=400))[0]
    assert forward_s(true, 4) == pytest.approx(4 * forward_s(member("a"), 4), rel=0.02)
    assert backward_s(true, 4) == pytest.approx(4 * backward_s(member("a"), 4), rel=0.02)


def test_few_observations_weigh_less_than_many():
    few, many = (forward_s(believed(swarm({"b": 4.0}, n))[0], 4) for n in (1, 100))
    assert forward_s(member("a"), 4) < few < many


def test_without_observers_a_claim_stands():
    assert believed(swarm({}))[0] == member("a")


def test_a_minority_of_liars_cannot_make_a_member_look_slow():
    costs = believed(swarm({"b": 1.0, "c": 1.0, "d": 1.0, "liar": 1000.0, "other liar": 1000.0}))
    assert forward_s(costs[0], 4) == pytest.approx(forward_s(member(), 4))


def test_announcements_in_another_order_are_believed_alike():
    said = swarm({"b": 1.5, "c": 2.0, "d": 1.0, "e": 8.0})
    shuffled = said.copy()
    random.Random(1).shuffle(shuffled)
    assert believed(said) == believed(shuffled)
    assert [each.peer_id for each in believed(said)] == ["a", "b", "c", "d", "e"]


LAYER = LayerCost(held_bytes=GB, forward_s=1e-5, activation_bytes=1)
SETTINGS = PlanSettings(ModelCosts(LAYER, 6, LAYER), micro_batch_tokens=100, token_bytes=1000, waves=2)
PARTS = Partition(
    (
        PlannedStage(0, 2, 2 * GB, GB, ("c", "a")),
        PlannedStage(2, 6, 3 * GB + GB // 4, GB // 4, ("b",)),
    ),
    path_length=2,
)
LINKS = {
    ("a", "b"): LinkCosts(0.1, 1e5),
    ("b", "a"): LinkCosts(0.2, 2e5),
    ("b", "c"): LinkCosts(0.1, 1e6),
}


def costs_of(names: str) -> dict[str, MemberCosts]:
    return {name: member(name, free_bytes=5 * GB) for name in names}


def test_an_instance_holds_what_was_measured():
    told = [member("b", free_bytes=5 * GB), member("a"), member("c", holds_data=True), member("unplaced")]
    costs = {each.peer_id: each for each in told}
    instance, table = PlanningCosts(costs, LINKS, SETTINGS).measured(PARTS)
    assert instance.names == ("a", "b", "c")
    assert instance.stages == ((0, 2), (1,))
    assert instance.forward_s == pytest.approx((2e-3, 4e-3, 2e-3))
    assert instance.memory == (2, 3, 2)
    assert instance.backward_factor == pytest.approx(2.0)
    assert table.memory[0] == (2, 3)


def test_of_two_measurements_of_a_link_the_worse_counts_and_unmeasured_links_are_worse_still():
    instance, _ = PlanningCosts(costs_of("abc"), LINKS, SETTINGS).measured(PARTS)
    size_bytes = 100 * 1000
    assert instance.hop_s[0][1] == instance.hop_s[1][0] == pytest.approx(0.2 + size_bytes / 1e5)
    assert instance.hop_s[1][2] == pytest.approx(0.1 + size_bytes / 1e6)
    assert instance.hop_s[0][2] == pytest.approx(0.4 + size_bytes / 5e4)
    assert instance.hop_s[0][0] == 0.0


def test_who_does_not_hold_data_or_has_no_memory_has_no_slot():
    small = member("b", free_bytes=3 * GB + GB // 2, holds_data=False)
    costs = {"a": member("a", free_bytes=3 * GB), "c": member("c"), "b": small}
    _, table = PlanningCosts(costs, LINKS, SETTINGS).measured(PARTS)
    assert table.memory[1] == (0, 1)
    assert table.memory[0] == (1, 0)


def test_nobody_has_more_slots_than_the_settings_ask_for_whatever_it_claims():
    liar = member("b", memory_slots=1024, free_bytes=2**50)
    _, table = PlanningCosts(costs_of("abc") | {"b": liar}, LINKS, SETTINGS).measured(PARTS)
    assert table.memory[1] == (SETTINGS.slots, SETTINGS.slots)


def test_costs_and_links_in_another_order_give_the_same_instance():
    backwards = dict(reversed(LINKS.items()))
    other = PlanningCosts(costs_of("cba"), backwards, SETTINGS)
    assert PlanningCosts(costs_of("abc"), LINKS, SETTINGS).measured(PARTS) == other.measured(PARTS)


def test_without_links_there_is_no_instance():
    with pytest.raises(ConfigError, match="no link"):
        PlanningCosts(costs_of("abc"), {}, SETTINGS).measured(PARTS)
