"""Whoever has the turn to plan may do nothing with it, or name what it likes: small peer ids cost nothing."""

import asyncio

import msgspec

from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership_messages import Hold, Request, Status, TakeAssignment
from tests.unit.extensions.pipeline.membership.test_membership import (
    KEYS,
    Home,
    Node,
    now_s,
    run,
    told,
    until,
)

SETTINGS = MembershipSettings("home", "big")


def idle(node: Node) -> None:
    """Answers everybody, and never plans."""

    async def nothing() -> bool:
        return False

    node.membership._convener.run = nothing  # type: ignore[method-assign]


def test_a_first_plan_comes_without_a_convener_that_plans_nothing():
    async def story() -> None:
        here = Home()
        try:
            (first,) = await here.add(KEYS[0], settings=SETTINGS, trains=False)
            idle(first)
            others = await here.add(*KEYS[1:5], settings=SETTINGS)
            await until(lambda: all(node.places for node in others), 180)
            await asyncio.sleep(1500)
            assert [len(node.places) for node in others] == [1, 1, 1, 1]
        finally:
            await here.close()

    run(story())


def test_a_death_is_planned_around_without_a_convener_that_plans_nothing():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        idle(nodes[0])
        await here.kill(nodes[4])
        died_s = now_s()
        await until(lambda: all(node.place.epoch > first.epoch for node in nodes[1:4]), 180)
        assert now_s() - died_s < 120
        assert nodes[4].peer_id not in nodes[1].place.members

    told(story, settings=SETTINGS)


def test_an_iteration_that_nobody_is_near_is_not_taken_and_the_next_member_plans():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        convener = nodes[0].membership._convener
        real = convener._ask

        async def ask(peer: str, request: Request) -> Status:
            if isinstance(request, Hold | TakeAssignment):
                request = msgspec.structs.replace(request, iteration=2**53)
            return await real(peer, request)

        convener._ask = ask
        await here.kill(nodes[4])
        await until(lambda: all(node.place.epoch > first.epoch for node in nodes[1:4]), 600)
        assert {node.place.iteration for node in nodes[1:4]} <= set(range(1000))

    told(story, settings=SETTINGS)
