"""Members over the real network: three daemons on loopback agree, and go on without the one that dies."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.membership.membership_messages import ProposalProgress
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.identity import key_file
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.daemon.p2pd_host import P2pdHost
from tests.unit.extensions.pipeline import pretend_members as pretend

QUICK = MembershipSettings("home", "big", at_least=3, ping_s=0.3, silence_s=3.0, settle_s=1.0, poll_s=0.1)


class Place:
    """Remembers the places that a member was given."""

    def __init__(self) -> None:
        self.now: AgreedPlan | None = None

    async def prepare(self, agreed: AgreedPlan) -> None:
        """Load nothing."""

    async def take(self, agreed: AgreedPlan) -> None:
        self.now = agreed


def member(
    host: P2pdHost, streams: MemberStreams, key: NodeKey, place: Place, names: list[str]
) -> Membership:
    return Membership(
        host,
        streams,
        key,
        settings=QUICK,
        plan=pretend.settings(),
        model="tiny",
        announcement=lambda: CostAnnouncement(
            pretend.costs(key.peer_id, at_s=time.time()), pretend.links(key.peer_id, names), {}
        ),
        prepare=place.prepare,
        on_agreed=place.take,
    )


async def settled(members: list[Membership], places: list[Place], names: set[str]) -> None:
    """Wait until all of them work under one plan of exactly these members."""
    async with asyncio.timeout(60):
        while True:
            said = [each.status() for each in members]
            ready = all(each.progress == ProposalProgress.BEGUN for each in said)
            same = len({each.plan for each in said}) == 1
            if ready and same and all(place.now and place.now.members == names for place in places):
                return
            await asyncio.sleep(0.05)


async def test_three_daemons_agree_and_two_go_on(tmp_path: Path):
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))
    paths = [tmp_path / f"{number}.key" for number in range(3)]
    mine = [key_file.load_or_create(path) for path in paths]
    names = [key.peer_id for key in mine]
    places = [Place() for _ in mine]
    async with AsyncExitStack() as most, AsyncExitStack() as last:
        hosts = [
            await (last if number == 2 else most).enter_async_context(P2pdHost(path))
            for number, path in enumerate(paths)
        ]
        for one, other in ((0, 1), (1, 2), (0, 2)):
            await hosts[one].connect((await hosts[other].addresses())[0])
        members: list[Membership] = []
        for number, host in enumerate(hosts):
            stack = last if number == 2 else most
            streams = await stack.enter_async_context(MemberStreams(host))
            one = member(host, streams, mine[number], places[number], names)
            members.append(await stack.enter_async_context(one))
        await settled(members, places, set(names))
        await last.aclose()
        members[0].lost(names[2], "its stream ended")
        await settled(members[:2], places[:2], set(names[:2]))
