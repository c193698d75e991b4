"""Whoever has the turn to plan may do nothing with it: small peer ids cost nothing. Or it has its reasons."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from swarmnode.extensions.pipeline.membership.convener import IDLE_AFTER, MAX_AGAIN
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership_messages import (
    Hold,
    ProposalProgress,
    Request,
    Status,
)
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, PlanInputs
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

SETTINGS = MembershipSettings("home", "big", ping_s=4.0, poll_s=2.0)
IDLE_S = IDLE_AFTER * SETTINGS.retry_s
FOUR_STAGES = pretend.settings(stages=4)
HASTY = replace(SETTINGS, prepare_s=200.0, iteration_s=100.0, assignment_s=60.0, catch_up_s=10.0)
HALF_WAY_S = (
    (MAX_AGAIN + 1) * HASTY.prepare_s + HASTY.iteration_s + 2 * (HASTY.assignment_s + HASTY.catch_up_s)
)
"""Time from the first proposal after which a convener that leaves it half-way is passed over."""

LEFT_OUT = "out of pipeline plans"
"""What the log says of a member that is barred."""


def idle(node: Node) -> None:
    """Answers everybody, and never plans."""

    async def nothing() -> bool:
        return False

    node.membership._convener.run = nothing  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]


def never_holds(node: Node) -> None:
    """Proposes plans, and goes no further."""
    convener = node.membership._convener  # pyright: ignore[reportPrivateUsage]
    real = convener._ask  # pyright: ignore[reportPrivateUsage]

    async def ask(peer: str, request: Request, timeout_s: float) -> Status:
        if isinstance(request, Hold):
            await asyncio.Event().wait()
        return await real(peer, request, timeout_s)

    convener._ask = ask  # pyright: ignore[reportPrivateUsage]


def passed(node: Node) -> frozenset[str]:
    """Members whose turn has passed, as this one sees it."""
    return node.membership._convener._idle()  # pyright: ignore[reportPrivateUsage]


def left_out(node: Node) -> list[str]:
    """Living members that this one does not plan with."""
    members = node.membership._members  # pyright: ignore[reportPrivateUsage]
    return sorted({*members.living()} - {*members.usable(now_s())})


async def without_data_nodes(here: Home, nodes: list[Node]) -> list[Node]:
    """Kill all data nodes of the plan. Returns the others, without the convener."""
    data = nodes[0].place.partition.stages[0].peers
    assert nodes[0].peer_id not in data
    for node in [node for node in nodes if node.peer_id in data]:
        await here.kill(node)
    return [node for node in nodes[1:] if node.peer_id not in data]


async def cut(here: Home, one: Node, others: list[Node], *, still: Node) -> None:
    """From now on these do not reach one member, which `still` reaches."""
    for other in others:
        await one.host.disconnect(other.peer_id, barred_s=1e6)
    here.network.unlink(one.peer_id)
    await one.host.connect(still.host.address)


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
        others = await here.add(*KEYS[1:5], settings=SETTINGS, trains=False)
        await until(lambda: agree(tuple(others)), IDLE_S + 15)
        await asyncio.sleep(600)
        assert [len(node.places) for node in others] == [1, 1, 1, 1]
        assert [left_out(node) for node in others] == [[], [], [], []], "nobody is left out for it"
        assert [passed(node) for node in others] == [frozenset()] * 4, "it has its turn again"

    newly(story)


def test_two_that_propose_nothing_cost_the_time_of_two():
    async def story(here: Home) -> None:
        for node in await here.add(*KEYS[:2], settings=SETTINGS, trains=False):
            idle(node)
        others = await here.add(*KEYS[2:6], settings=SETTINGS, trains=False)
        await until(lambda: agree(tuple(others)), 2 * IDLE_S + 15)

    newly(story)


@pytest.mark.parametrize(
    ("misbehaves", "settings", "limit_s"),
    [(idle, SETTINGS, IDLE_S), (never_holds, HASTY, HALF_WAY_S)],
    ids=["that proposes nothing", "that never goes on"],
)
def test_the_death_of_all_data_nodes_is_planned_around_without_a_convener(
    misbehaves: Callable[[Node], None], settings: MembershipSettings, limit_s: float
):
    async def story(here: Home, nodes: list[Node]) -> None:
        await here.settled()
        misbehaves(nodes[0])
        others = await without_data_nodes(here, nodes)
        await until(lambda: agree(tuple(others)), settings.silence_s + limit_s + 15)

    told(story, settings=settings, trains=False, free=800 * pretend.MB)


def test_a_data_node_that_came_back_empty_gets_a_stage_without_a_convener_that_proposes_nothing():
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        assert plan.partition.stages[0].peers == (nodes[3].peer_id,)
        idle(nodes[0])
        await here.kill(nodes[3])
        (again,) = await here.add(KEYS[3], settings=SETTINGS, trains=False, plan=FOUR_STAGES)
        assert again.peer_id in nodes[1].membership.members(), "its death went unnoticed"
        await until(lambda: agree((*nodes[1:3], again)), IDLE_S + 60)

    told(story, count=4, settings=SETTINGS, trains=False, plan=FOUR_STAGES, free=800 * pretend.MB)


def test_a_first_plan_comes_without_a_convener_that_never_goes_on():
    async def story(here: Home) -> None:
        never_holds((await here.add(KEYS[0], settings=HASTY, trains=False))[0])
        others = await here.add(*KEYS[1:4], settings=HASTY, trains=False)
        await until(lambda: all(node.membership.status().proposed for node in others))
        await until(lambda: agree(tuple(others)), HALF_WAY_S + 15)

    newly(story)


def test_a_convener_that_says_for_ever_that_it_plans_is_believed_for_as_long_as_planning_may_take():
    async def story(here: Home) -> None:
        (first,) = await here.add(KEYS[0], settings=SETTINGS, trains=False)
        idle(first)
        says(first, lambda said: msgspec.structs.replace(said, progress=ProposalProgress.PLANNING))
        others = await here.add(*KEYS[1:4], settings=SETTINGS, trains=False)
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
        nodes = await here.add(KEYS[0], *KEYS[2:5], settings=SETTINGS, trains=False)
        await here.settled()
        await nodes[far].host.disconnect(key.peer_id, barred_s=1e6)
        (late,) = await here.add(key, settings=SETTINGS, trains=False)
        await asyncio.sleep(120)
        plan, taken = nodes[0].place, [len(node.places) for node in nodes]
        assert (late.peer_id in plan.members) == (far != 0), (
            "whom the convener cannot reach is not planned with"
        )
        await asyncio.sleep(600)
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
            nodes[2:3] = await here.add(KEYS[2], settings=SETTINGS, trains=False)
            again = await here.settled(within_s=40)
            await asyncio.sleep(200)
            assert {node.place.digest for node in nodes} == {again.digest}
            assert [left_out(node) for node in nodes] == [[]] * 5

    told(story, settings=SETTINGS, trains=False)


@pytest.mark.parametrize("plans_s", [120, 600])
def test_a_convener_that_takes_long_to_plan_is_waited_for(plans_s: int):
    async def story(here: Home) -> None:
        nodes = await here.add(*KEYS[:4], settings=SETTINGS, trains=False)
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

    told(story, settings=SETTINGS, trains=False, load_s=SETTINGS.prepare_s - 30)


def test_a_convener_that_tries_a_member_three_times_which_never_loads_in_time_keeps_its_turn(
    caplog: pytest.LogCaptureFixture,
):
    async def story(here: Home) -> None:
        nodes = await here.add(*KEYS[:3], settings=HASTY, trains=False)
        await here.add(KEYS[4], settings=HASTY, trains=False, load_s=10 * HASTY.prepare_s)
        await until(lambda: agree(tuple(nodes)), (MAX_AGAIN + 1) * (HASTY.prepare_s + 15))
        assert "changes of plan half-way" not in caplog.text

    newly(story)


def test_a_convener_that_comes_while_another_ones_first_plan_is_loaded_has_as_long_as_that_one(
    caplog: pytest.LogCaptureFixture,
):
    async def story(here: Home) -> None:
        nodes = await here.add(*KEYS[1:4], settings=HASTY, trains=False)
        await here.add(KEYS[4], settings=HASTY, trains=False, load_s=10 * HASTY.prepare_s)
        await asyncio.sleep(30)
        nodes += await here.add(KEYS[0], settings=HASTY, trains=False)
        await until(lambda: agree(tuple(nodes)), (MAX_AGAIN + 2) * (HASTY.prepare_s + 15))
        assert "changes of plan half-way" not in caplog.text

    newly(story)


def test_who_comes_while_others_load_under_a_first_plan_waits_for_them(caplog: pytest.LogCaptureFixture):
    async def story(here: Home) -> None:
        nodes = await here.add(KEYS[0], settings=SETTINGS, trains=False)
        nodes += await here.add(KEYS[4], settings=SETTINGS, trains=False, load_s=300)
        await until(lambda: bool(nodes[0].membership.status().proposed))
        nodes += await here.add(KEYS[1], settings=SETTINGS, trains=False)
        await asyncio.sleep(280)
        assert "it was their turn" not in caplog.text
        await here.settled(within_s=60)
        assert [len(node.places) for node in nodes] == [2, 2, 1]

    newly(story)


def test_where_nobody_finds_a_plan_the_convener_has_its_turn_again():
    async def story(here: Home, nodes: list[Node]) -> None:
        await until(lambda: bool(passed(nodes[1])), IDLE_S + 15)
        await asyncio.sleep(10)
        assert passed(nodes[1]) == frozenset()
        assert [left_out(node) for node in nodes] == [[]] * 3

    told(story, count=3, settings=SETTINGS, free=100 * pretend.MB)


def test_a_member_of_an_inner_stage_that_only_the_convener_reaches_splits_nobody_off(
    caplog: pytest.LogCaptureFixture,
):
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        assert any(stage.peers == (nodes[4].peer_id,) for stage in plan.partition.stages[1:])
        await cut(here, nodes[4], nodes[1:4], still=nodes[0])
        await asyncio.sleep(600)
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert LEFT_OUT not in caplog.text

    told(story, settings=SETTINGS, trains=False, plan=pretend.settings(stages=5), free=800 * pretend.MB)


def test_a_data_node_that_only_the_convener_reaches_splits_nobody_off_while_steps_are_taken(
    caplog: pytest.LogCaptureFixture,
):
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        assert plan.partition.stages[0].peers == (nodes[3].peer_id,)
        await cut(here, nodes[3], nodes[1:3], still=nodes[0])
        await until(lambda: nodes[3].peer_id not in nodes[1].membership.members())
        await asyncio.sleep(300)
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert LEFT_OUT not in caplog.text

    told(story, count=4, settings=SETTINGS, plan=FOUR_STAGES, free=800 * pretend.MB)


def test_a_single_member_that_does_not_reach_the_data_node_splits_nobody_off(
    caplog: pytest.LogCaptureFixture,
):
    async def story(here: Home, nodes: list[Node]) -> None:
        plan = await here.settled()
        assert plan.partition.stages[0].peers == (nodes[3].peer_id,)
        await cut(here, nodes[3], [nodes[1]], still=nodes[0])
        await until(lambda: nodes[3].peer_id not in nodes[1].membership.members())
        await asyncio.sleep(600)
        assert {node.place.digest for node in nodes} == {plan.digest}
        assert LEFT_OUT not in caplog.text

    told(story, count=4, settings=SETTINGS, trains=False, plan=FOUR_STAGES, free=800 * pretend.MB)


def test_who_could_hold_everything_waits_for_a_convener_that_waits_for_more_members():
    async def story(here: Home) -> None:
        (first,) = await here.add(KEYS[0], settings=replace(SETTINGS, at_least=3), free=800 * pretend.MB)
        (second,) = await here.add(KEYS[1], settings=replace(SETTINGS, at_least=1), free=800 * pretend.MB)
        await asyncio.sleep(600)
        assert first.places == second.places == []
        (third,) = await here.add(KEYS[4], settings=SETTINGS)
        await here.settled(within_s=40)
        assert [len(node.places) for node in (first, second, third)] == [1, 1, 1]

    newly(story)
