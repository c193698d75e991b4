"""Whoever has the turn to plan may name what it likes: small peer ids cost nothing."""

from dataclasses import replace

import msgspec
import pytest

from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership_messages import Hold, Request, Status, TakeAssignment
from tests.unit.extensions.pipeline import pretend_members as pretend
from tests.unit.extensions.pipeline.membership.test_membership import (
    KEYS,
    Home,
    Node,
    agree,
    run,
    told,
    until,
)

SETTINGS = MembershipSettings("home", "big")


def test_an_iteration_that_nobody_is_near_is_not_taken_and_the_next_member_plans():
    async def story(here: Home, nodes: list[Node]) -> None:
        first = await here.settled()
        convener = nodes[0].membership._convener
        real = convener._ask

        async def ask(peer: str, request: Request, timeout_s: float) -> Status:
            if isinstance(request, Hold | TakeAssignment):
                request = msgspec.structs.replace(request, iteration=2**53)
            return await real(peer, request, timeout_s)

        convener._ask = ask
        await here.kill(nodes[4])
        await until(lambda: all(node.place.epoch > first.epoch for node in nodes[1:4]), 600)
        assert {node.place.iteration for node in nodes[1:4]} <= set(range(1000))

    told(story, settings=SETTINGS)


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 2), (2, 3)])
def test_newcomers_are_taken_into_a_pipeline_that_is_thousands_of_iterations_old(old: int, new: int):
    async def story() -> None:
        here, free = Home(), 4000 * pretend.MB
        try:
            settings = replace(SETTINGS, at_least=old)
            veterans = await here.add(*KEYS[:old], settings=settings, free=free)
            await until(lambda: agree(tuple(veterans)))
            for node in veterans:
                node.iteration = 5000
                node.membership.stepped(5000)
            newcomers = await here.add(*KEYS[3 : 3 + new], settings=SETTINGS, free=free)
            await until(lambda: agree((*veterans, *newcomers)), 60)
        finally:
            await here.close()

    run(story())
