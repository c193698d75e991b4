"""Whoever has the turn to plan may do nothing with it: small peer ids cost nothing. Or it has its reasons."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from swarmnode.extensions.pipeline.membership.convener import IDLE_AFTER
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Hold,
    ProposalProgress,
    Request,
    Status,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, PlanInputs
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.identity.node_key import NodeKey
from tests.unit.extensions.pipeline import pretend_members as pretend
from tests.unit.extensions.pipeline.membership.test_membership import (
    KEYS,
    Home,
    Node,
    agree,
    now_s,
    run,
    told,
    until,
)
from tests.unit.extensions.pipeline.membership.test_membership_hostile import says

SETTINGS = MembershipSettings("home", "big")
IDLE_S = IDLE_AFTER * SETTINGS.retry_s
HALF_WAY_S = (
    SETTINGS.prepare_s + SETTINGS.iteration_s + 2 * (SETTINGS.assignment_s + SETTINGS.catch_up_s)
)
"""Time from the first proposal after which a convener that leaves it half-way is passed over."""


def idle(node: Node) -> None:
    """Answers everybody, and never plans."""

    async def nothing() -> bool:
        return False

    node.membership._convener.run = nothing  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]


def never_holds(node: Node) -> None:
    """Proposes plans, and goes no further."""
    convener = node.membership._convener  # pyright: ignore[reportPrivateUsage]
    real = convener._ask  # pyright: ignore[reportPrivateUsage]

    async def ask(peer: str, request: Request) -> Status:
        if isinstance(request, Hold):
            await asyncio.Event().wait()
        return await real(peer, request)

    convener._ask = ask  # pyright: ignore[reportPrivateUsage]


def passed(node: Node) -> frozenset[str]:
    """Members whose turn has passed, as this one sees it."""
    return node.membership._convener._idle()  # pyright: ignore[reportPrivateUsage]


def left_out(node: Node) -> list[str]:
    """Living members that this one does not plan with."""
    members = node.membership._members  # pyright: ignore[reportPrivateUsage]
    return sorted({*members.living()} - {*members.usable(now_s())})


def needed(plan: AgreedPlan, *, without: Node) -> list[str]:
    """All members of a stage in which this member is not."""
    return next(list(stage.peers) for stage in plan.partition.stages if without.peer_id not in stage.peers)


def newly(work: Callable[[Home], Awaitable[None]]) -> None:
    """A story that begins without members."""

    async def story() -> None:
        here = Home()
        try:
            await work(here)
        finally:
            await here.close()

    run(story())


# Who does nothing with its turn.


def test_a_first_plan_comes_without_a_convener_that_proposes_nothing():
    async def story(here: Home) -> None:
        idle((await here.add(KEYS[0], settings=SETTINGS, trains=False))[0])
        others = await here.add(*KEYS[1:5], settings=SETTINGS)
        await until(lambda: agree(tuple(others)), IDLE_S + 15)
        await asyncio.sleep(1500)
        assert [len(node.places) for node in others] == [1, 1, 1, 1]
        assert [left_out(node) for node in others] == [[], [], [], []], "nobody is left out for it"

    newly(story)


def test_two_that_propose_nothing_cost_the_time_of_two():
    async def story(here: Home) -> None:
        for node in await here.add(*KEYS[:2], settings=SETTINGS, trains=False):
            idle(node)
        others = await here.add(*KEYS[2:8], settings=SETTINGS)
        await until(lambda: agree(tuple(others)), 2 * IDLE_S + 15)

    newly(story)


def test_a_stage_without_members_is_planned_around_without_a_convener_that_proposes_nothing():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        idle(nodes[0])
        dead = needed(first, without=nodes[0])
        for node in [node for node in nodes if node.peer_id in dead]:
            await here.kill(node)
        others = tuple(node for node in nodes[1:] if node.peer_id not in dead)
        await until(lambda: agree(others), SETTINGS.silence_s + IDLE_S + 15)

    told(story, settings=SETTINGS, free=800 * pretend.MB)


def test_a_member_that_came_back_empty_gets_a_stage_without_a_convener_that_proposes_nothing():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        idle(nodes[0])
        (only,) = (node for node in nodes if needed(first, without=nodes[0]) == [node.peer_id])
        await here.kill(only)
        (again,) = await here.add(only.key, settings=SETTINGS)
        assert only.peer_id in nodes[0].membership.members(), "its death went unnoticed"
        await until(lambda: agree((nodes[2], again)), IDLE_S + 60)

    told(story, count=3, settings=SETTINGS)


def test_a_first_plan_comes_without_a_convener_that_never_goes_on():
    async def story(here: Home) -> None:
        never_holds((await here.add(KEYS[0], settings=SETTINGS, trains=False))[0])
        others = await here.add(*KEYS[1:5], settings=SETTINGS)
        await until(lambda: all(node.membership.status().proposed for node in others))
        await until(lambda: agree(tuple(others)), HALF_WAY_S + 15)

    newly(story)


def test_a_stage_without_members_is_planned_around_without_a_convener_that_never_goes_on():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        never_holds(nodes[0])
        dead = needed(first, without=nodes[0])
        for node in [node for node in nodes if node.peer_id in dead]:
            await here.kill(node)
        others = tuple(node for node in nodes[1:] if node.peer_id not in dead)
        await until(lambda: agree(others), SETTINGS.silence_s + HALF_WAY_S + 15)

    told(story, settings=SETTINGS, free=800 * pretend.MB)


def test_a_convener_that_says_for_ever_that_it_plans_is_believed_for_as_long_as_planning_may_take():
    async def story(here: Home) -> None:
        (first,) = await here.add(KEYS[0], settings=SETTINGS, trains=False)
        idle(first)
        says(first, lambda said: msgspec.structs.replace(said, progress=ProposalProgress.PLANNING))
        others = await here.add(*KEYS[1:5], settings=SETTINGS)
        await until(lambda: agree(tuple(others)), SETTINGS.prepare_s + 15)

    newly(story)


# Who has reasons.


@pytest.mark.parametrize("wait_s", [90, 130, 200, 300])
def test_two_that_wait_for_the_memory_of_a_third_meet_it_however_late_it_comes(wait_s: int):
    async def story(here: Home, nodes: list[Node]) -> None:
        await asyncio.sleep(wait_s)
        assert [node.places for node in nodes] == [[], []]
        nodes += await here.add(KEYS[4], settings=SETTINGS, free=500 * pretend.MB)
        await here.settled(within_s=40)
        assert [len(node.places) for node in nodes] == [1, 1, 1]
        assert [left_out(node) for node in nodes] == [[], [], []]

    told(story, count=2, settings=SETTINGS, free=200 * pretend.MB)


@pytest.mark.parametrize("far", [0, 2])
@pytest.mark.parametrize("key", [KEYS[5], KEYS[1]], ids=["larger peer id", "smaller peer id"])
def test_a_newcomer_that_cannot_reach_one_member_costs_the_others_nothing(key: NodeKey, far: int):
    async def story(here: Home) -> None:
        nodes = await here.add(KEYS[0], *KEYS[2:5], settings=SETTINGS)
        await here.settled()
        await nodes[far].host.disconnect(key.peer_id, barred_s=1e6)
        (late,) = await here.add(key, settings=SETTINGS)
        await asyncio.sleep(120)
        plan, taken = nodes[0].place, [len(node.places) for node in nodes]
        assert (late.peer_id in plan.members) == (far != 0), "whom the convener cannot reach is not planned with"
        await asyncio.sleep(1200)
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert [len(node.places) for node in nodes] == taken
        assert [left_out(node) for node in nodes] == [[], [], [], []]
        # A smaller peer id proposes by itself, sees the others refuse, and leaves them out for a while.
        assert key is KEYS[1] or left_out(late) == []

    newly(story)


def test_who_is_left_out_for_a_while_costs_the_others_nothing():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        for _ in range(3):
            nodes[0].membership._members.bar(nodes[3].peer_id, "it fails", now_s())  # pyright: ignore[reportPrivateUsage]
        await here.settled(*nodes[:3], nodes[4])
        second = nodes[0].place
        assert second.epoch == first.epoch + 1
        await asyncio.sleep(100)
        assert {node.place.digest for node in (*nodes[:3], nodes[4])} == {second.digest}
        await here.settled(within_s=30)
        assert nodes[0].place.epoch <= second.epoch + 2

    told(story, settings=SETTINGS)


def test_a_convener_that_was_left_out_three_times_has_its_turn_again_afterwards():
    async def story(here: Home) -> None:
        nodes = await here.add(*KEYS[:3], settings=SETTINGS, free=200 * pretend.MB)
        await asyncio.sleep(20)
        for node in nodes[1:]:
            for _ in range(3):
                node.membership._members.bar(nodes[0].peer_id, "it fails", now_s())  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(150)
        assert [left_out(node) for node in nodes[1:]] == [[], []]
        nodes += await here.add(KEYS[4], settings=SETTINGS, free=500 * pretend.MB)
        await here.settled(within_s=40)
        assert [len(node.places) for node in nodes] == [1, 1, 1, 1]

    newly(story)


def test_five_that_work_take_back_one_that_restarts_with_one_plan():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        for _ in range(3):
            await here.kill(nodes[2])
            nodes[2:3] = await here.add(KEYS[2], settings=SETTINGS)
            again = await here.settled(within_s=40)
            await asyncio.sleep(400)
            assert {node.place.digest for node in nodes} == {again.digest}
            assert [left_out(node) for node in nodes] == [[]] * 5

    told(story, settings=SETTINGS)


@pytest.mark.parametrize("plans_s", [120, 600])
def test_a_convener_that_takes_long_to_plan_is_waited_for(plans_s: int):
    async def story(here: Home) -> None:
        nodes = await here.add(*KEYS[:4], settings=SETTINGS)
        jobs = nodes[0].membership._jobs  # pyright: ignore[reportPrivateUsage]
        real = jobs._do  # pyright: ignore[reportPrivateUsage]

        async def slow(job: PlanInputs | AgreedPlan) -> None:
            if isinstance(job, PlanInputs):
                await asyncio.sleep(plans_s)
            await real(job)

        jobs._do = slow  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
        await until(lambda: bool(nodes[0].membership.status().proposed), plans_s + 30)
        assert [passed(node) for node in nodes] == [frozenset()] * 4
        await here.settled(within_s=20)
        assert {node.membership._follower.by for node in nodes} == {nodes[0].peer_id}  # pyright: ignore[reportPrivateUsage]
        assert [len(node.places) for node in nodes] == [1] * 4

    newly(story)


def test_members_that_load_for_long_under_a_first_plan_are_waited_for():
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled(within_s=SETTINGS.prepare_s)
        assert {node.place.epoch for node in nodes} == {1}
        assert [left_out(node) for node in nodes] == [[]] * 5

    told(story, settings=SETTINGS, load_s=SETTINGS.prepare_s - 30)


def test_who_cannot_reach_the_only_member_of_a_stage_that_others_reach_takes_nobody_along():
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        only = next(node for node in nodes if node.peer_id in needed(plan, without=nodes[0]))
        for other in [node for node in nodes[1:] if node is not only][:1]:
            await only.host.disconnect(other.peer_id, barred_s=1e6)
        await asyncio.sleep(1500)
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert [left_out(node) for node in nodes] == [[]] * len(nodes)

    told(story, count=4, settings=SETTINGS, plan=pretend.settings(stages=4), free=800 * pretend.MB)

