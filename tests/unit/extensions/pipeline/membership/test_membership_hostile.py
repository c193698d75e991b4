"""What one member can say or do to keep the others from a plan: nothing that lasts, once it is seen."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.membership.convener import OutbidReports
from swarmnode.extensions.pipeline.membership.follower import MAX_EPOCH_LEAP, Follower
from swarmnode.extensions.pipeline.membership.known_members import FORGIVEN_S, FREE_LOSSES, KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Introduce,
    Ping,
    Presence,
    ProposalProgress,
    Propose,
    Request,
    Status,
    open_presence,
    seal_presence,
)
from swarmnode.extensions.pipeline.membership.proposal_round import ProposalRound
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, StageTiming, forward_s
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, PlanInputs, compute_plan
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal, Refused
from swarmnode.identity.node_key import NodeKey
from tests.unit.extensions.pipeline import pretend_members as pretend
from tests.unit.extensions.pipeline.membership.test_membership import (
    KEYS,
    SETTINGS,
    Home,
    Hostile,
    Node,
    run,
    told,
    until,
)

INPUTS = PlanInputs(pretend.announced([pretend.costs(name) for name in "abc"]), pretend.settings(), None, 1)
PLAN = compute_plan(INPUTS)
ROUND = replace(SETTINGS, poll_s=0.01)


def status(**changes: object) -> Status:
    return Status(**{"session": 1, "sequence": 1, "iteration": 0, "busy": False, **changes})  # type: ignore[arg-type]


def presence(key: NodeKey, session: int = 1, *, timings: tuple[StageTiming, ...] = ()) -> bytes:
    costs = pretend.costs(key.peer_id)
    costs = msgspec.structs.replace(costs, timings=timings or costs.timings)
    said = Presence(session=session, sequence=1, terms={}, costs=CostAnnouncement(costs, {}, {}))
    return seal_presence(key, said, topic="t")


# What is announced (1, 15).


def test_times_too_short_to_divide_by_are_not_taken():
    short = (StageTiming(6, 5e-324, 1e-5), StageTiming(100, 1e-3, 1e-3))
    with pytest.raises(Rejected, match="malformed"):
        open_presence(presence(KEYS[0], timings=short), topic="t", now_s=1e6)


def test_between_very_different_times_none_rounds_to_zero():
    # The least claim, after what observers make of it.
    steep = (StageTiming(3, 100.0, 1.0), StageTiming(4, 1e-15, 1.0), StageTiming(100, 1e-5, 1.0))
    costs = msgspec.structs.replace(pretend.costs("c"), timings=steep)
    assert all(forward_s(costs, layers) > 0 for layers in range(1, 120))


@pytest.mark.parametrize("time_s", [1e-12, 100.0])
@pytest.mark.parametrize("free", [0, 400 * pretend.MB, 2**50])
def test_whatever_one_member_claims_the_others_find_a_plan(time_s: float, free: int):
    said = [pretend.costs(name) for name in "abc"]
    timings = (StageTiming(512, time_s, 1e-12),)
    said[2] = msgspec.structs.replace(said[2], free_bytes=free, timings=timings)
    assert compute_plan(PlanInputs(pretend.announced(said), pretend.settings(), None, 1)).members == {*"abc"}


@pytest.mark.parametrize("ends", [(2, 2, 6), (5, 3, 6), (6, 6)])
def test_stages_without_layers_are_not_taken(ends: tuple[int, ...]):
    message = msgspec.msgpack.encode(["propose", 1, ends, {}, [b"x"]])
    with pytest.raises(msgspec.ValidationError, match="without layers"):
        msgspec.msgpack.decode(message, type=Propose)
    with pytest.raises(ValueError, match="without layers"):
        status(ends=ends)


def test_an_error_that_nobody_foresaw_fails_the_epoch_and_not_the_member():
    async def story(here: Home, nodes: list[Node]) -> None:
        async def broken(agreed: AgreedPlan) -> None:
            nodes[1].membership._jobs.on_agreed = nodes[1].take_place  # pyright: ignore[reportPrivateUsage]
            raise ZeroDivisionError("what a peer sent")

        nodes[1].membership._jobs.on_agreed = broken  # pyright: ignore[reportPrivateUsage]
        plan = await here.settled()
        assert plan.epoch > 1

    told(story, count=3)


def test_a_place_that_takes_for_ever_is_given_up():
    async def story(here: Home, nodes: list[Node]) -> None:
        async def hangs(agreed: AgreedPlan) -> None:
            await asyncio.Event().wait()

        nodes[1].membership._jobs.on_agreed = hangs  # pyright: ignore[reportPrivateUsage]
        await until(lambda: nodes[1].membership.status().progress == ProposalProgress.FAILED, 60)

    told(story, count=3, settings=replace(SETTINGS, assignment_s=10.0), trains=False)


# What is answered to a convener (11, 12).


@pytest.mark.parametrize("how", ["refuses", "claims an epoch"])
def test_who_speaks_of_a_better_proposal_is_named(how: str):
    async def ask(peer: str, request: Request, timeout_s: float) -> Status:
        evil = peer == "evil"
        if evil and how == "refuses" and isinstance(request, Propose):
            raise MemberRefused(Refused(Refusal.OUTBID))
        return status(epoch=6 if evil else 5, progress=ProposalProgress.PREPARED, proposed="a" * 64)

    async def hold() -> None:
        round_ = ProposalRound(ask, "own", ["own", "good", "evil"], ROUND, lambda: None)
        outcome = await round_.run(Propose(5, (), {}, (b"x",)))
        assert [*outcome.outbid] == ["evil"] and not outcome.failed

    run(hold())


def test_only_who_speaks_of_other_proposals_without_end_keeps_others_from_planning():
    outbid = OutbidReports()
    assert outbid.told(["a", "b"], in_force=3, now_s=0.0) == {"a": 0.0, "b": 0.0}
    assert outbid.told(["a"], in_force=3, now_s=5.0) == {"a": 5.0}
    assert outbid.told(["a", "b"], in_force=3, now_s=9.0) == {"a": 9.0, "b": 0.0}
    assert outbid.told(["a"], in_force=4, now_s=20.0) == {"a": 0.0}, "a plan has come into force meanwhile"


def says(node: Node, what: Callable[[Status], Status]) -> None:
    """From now on a member says this of itself."""
    member = node.membership
    honest = member.status
    for each in (member, member._liveness, member._convener):  # pyright: ignore[reportPrivateUsage]
        name = "status" if each is member else "_status"
        setattr(each, name, lambda: what(honest()))


def test_a_member_that_always_knows_of_a_better_proposal_is_left_out_of_the_next_plans():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        others = [nodes[0], nodes[1], nodes[3], nodes[4]]
        says(nodes[2], lambda said: msgspec.structs.replace(said, epoch=said.epoch + 1))
        await here.kill(nodes[4])
        await here.settled(*others[:3], within_s=60)
        assert nodes[0].place.epoch > first.epoch

    told(story)


def test_a_member_that_takes_its_place_and_denies_it_causes_one_plan_more_and_not_one_after_the_other():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        before = nodes[0].place.epoch
        says(nodes[2], lambda said: msgspec.structs.replace(said, plan="", in_force=0))
        await asyncio.sleep(SETTINGS.barred_s - 5)
        assert nodes[0].place.epoch <= before + 2
        assert nodes[2].peer_id not in nodes[0].place.members

    told(story)


# What a convener orders (13, 14).


def test_a_convener_that_begins_again_and_again_is_seen_to_stop_us():
    follower, time_s = Follower("b", catch_up_s=60.0), 0.0
    inputs = replace(INPUTS, announcements=pretend.announced([pretend.costs(name) for name in "ab"]))
    for epoch in range(1, 6):
        again = replace(inputs, former=follower.former, epoch=epoch)
        follower.propose("a", again, time_s)
        plan = compute_plan(again)
        follower.planned(again, plan)
        follower.prepared(plan)
        follower.hold("a", epoch, 0, time_s)
        follower.take("a", epoch, 0, time_s)
        job = follower.job(time_s)
        assert isinstance(job, AgreedPlan)
        follower.taking()
        follower.taken(job)
        time_s += 60
    assert follower.stopped_since_s == 0.0
    follower.begin("a", 5, time_s)
    assert follower.stopped_since_s is None


def test_a_convener_that_was_passed_over_may_not_propose_for_a_while():
    members = KnownMembers("z", SETTINGS, "t", {})
    author = KEYS[0].peer_id
    members.introduce(presence(KEYS[0]), sender=author, wall_s=1e6, now_s=0.0)
    members.heard(author, status(), 0.0)
    members.pass_over(author, "it left a change half-way", 0.0)
    assert not members.may_convene(author, SETTINGS.barred_s - 1)
    assert members.may_convene(author, SETTINGS.barred_s + 1)


def told_to_take(names: str) -> tuple[Follower, AgreedPlan]:
    """Member b, which is to take a plan of these members."""
    inputs = replace(INPUTS, announcements=pretend.announced([pretend.costs(name) for name in names]))
    follower, plan = Follower("b", catch_up_s=60.0), compute_plan(inputs)
    follower.propose("a", inputs, 0.0)
    follower.planned(inputs, plan)
    follower.prepared(plan)
    follower.hold("a", 1, 0, 0.0)
    follower.take("a", 1, 0, 0.0)
    return follower, plan


@pytest.mark.parametrize(("names", "needed"), [("ab", 1), ("abc", 2), ("abcd", 2), ("abcdefg", 4)])
def test_a_plan_is_taken_when_more_than_two_thirds_of_its_living_members_told_us_of_the_same_one(
    names: str, needed: int
):
    follower, plan = told_to_take(names)
    others = [name for name in names if name != "b"]
    for liar in others[needed:]:
        follower.hear(liar, status(epoch=1, proposed="0" * 64), 0.0)
    for number, name in enumerate(others[:needed]):
        assert follower.job(0.0, others) is None, f"{number} others are too few"
        follower.hear(name, status(epoch=1, proposed=plan.digest), 0.0)
    assert isinstance(follower.job(0.0, others), AgreedPlan)


def test_of_two_plans_that_one_liar_tells_of_one_at_most_is_taken():
    """It convenes, and gives each half of the honest ones another plan and its own word for it."""
    follower, plan = told_to_take("abcde")
    for name, said in zip("acde", (plan.digest, plan.digest, "0" * 64, "0" * 64), strict=True):
        follower.hear(name, status(epoch=1, proposed=said), 0.0)
    assert follower.job(0.0, "acde") is None


def test_a_newcomer_does_not_use_up_the_epochs_on_one_members_word():
    last = 2**53
    with pytest.raises(Rejected, match=Refusal.EPOCH_LEAP):
        Follower("b", catch_up_s=60.0).propose("a", replace(INPUTS, epoch=last), 0.0)
    late = Follower("b", catch_up_s=60.0)
    late.propose("a", replace(INPUTS, epoch=3 * MAX_EPOCH_LEAP), 0.0, usual_epoch=3 * MAX_EPOCH_LEAP - 1)
    assert late.epoch == 3 * MAX_EPOCH_LEAP


# Who comes and goes (16, 17).


def test_taking_leave_does_not_wipe_out_what_was_lost():
    members, author = KnownMembers("z", SETTINGS, "t", {}), KEYS[0].peer_id
    for session in range(FREE_LOSSES + 1):
        at_s = float(session)
        members.introduce(presence(KEYS[0], session), sender=author, wall_s=1e6, now_s=at_s)
        members.heard(author, status(session=session), at_s)
        assert members.usable(at_s) == [author]
        members.left(author, at_s)
        assert members.living() == []
    members.introduce(presence(KEYS[0], 99), sender=author, wall_s=1e6, now_s=5.0)
    members.heard(author, status(session=99), 5.0)
    assert members.living() == [author] and members.usable(5.0) == []


def test_losses_are_forgotten_one_after_the_other_while_a_member_lives():
    members, author, at_s = KnownMembers("z", SETTINGS, "t", {}), KEYS[0].peer_id, 0.0
    for session in range(10):
        members.introduce(presence(KEYS[0], session), sender=author, wall_s=1e6, now_s=at_s)
        members.heard(author, status(session=session), at_s)
        assert members.usable(at_s) == [author], "a restart now and then keeps nobody out"
        at_s += FORGIVEN_S
        members.heard(author, status(session=session), at_s)
        members.left(author, at_s)
        at_s += 1e4


def test_newcomers_without_end_do_not_put_off_the_plan_around_a_death():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        flood = asyncio.ensure_future(come_anew(here, nodes[:4], KEYS[7]))
        await here.kill(nodes[4])
        try:
            await until(lambda: nodes[4].peer_id not in nodes[0].place.members, 60)
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
        assert nodes[0].place.epoch > first.epoch

    told(story)


async def come_anew(here: Home, nodes: list[Node], key: NodeKey) -> None:
    """One key, a new session every other second."""
    bad = Hostile(here, key)

    async with bad.host:
        await bad.tell(bad.status)
        await bad.host.connect(nodes[0].host.address)
        while True:
            bad.session += 1
            sealed = bad.presence()
            for node in nodes:
                await bad.ask(node, Introduce(sealed))
                await bad.ask(node, Ping(bad.status()))
            await asyncio.sleep(2.0)
