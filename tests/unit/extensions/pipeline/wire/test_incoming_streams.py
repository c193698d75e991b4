"""Who may ask: members of a service, and strangers where a service is for everybody, within bounds."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from swarmnode.errors import NetworkError, PeerUnreachable, RequestTimeout
from swarmnode.extensions.pipeline.wire.frames import VERSION, encode, framed
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler, WireLimits
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, AnswerBody, MemberStreams
from swarmnode.extensions.pipeline.wire.refusals import BadAnswer, MemberRefused, Refusal
from swarmnode.extensions.pipeline.wire.services import LIMITS, MemberMessage, MemberService
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.network.streams import ByteStream
from tests.unit.extensions.pipeline import raw_wire

WIRE = WireLimits(
    max_stranger_streams=4, max_streams_per_stranger=2,
    max_inbound_bytes=100, max_inbound_bytes_per_peer=100, max_stranger_bytes=40,
)  # fmt: skip


class Hello(MemberMessage, frozen=True, tag="hello"):
    """A question."""


async def greet(incoming: Incoming[Hello]) -> Reply:
    return Reply("good day")


@asynccontextmanager
async def alone(
    count: int, **handlers: ServiceHandler
) -> AsyncGenerator[tuple[MemberStreams, list[MemoryHost]], None]:
    """A member with these services, and so many hosts that are connected to it."""
    network = MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host()) for _ in range(count + 1)]
        for other in hosts[1:]:
            await other.connect((await hosts[0].addresses())[0])
        streams = await stack.enter_async_context(MemberStreams(hosts[0], WIRE))
        for name, handler in handlers.items():
            streams.incoming.begin(MemberService[name], handler)
        yield streams, hosts[1:]


async def ask(
    host: MemoryHost, streams: MemberStreams, service: MemberService = MemberService.MEMBERSHIP
) -> str:
    async with MemberStreams(host) as asking:
        return await asking.ask(streams.peer_id, service, Hello(), str, timeout_s=1.0)


OPEN = ServiceHandler(Hello, greet, knows=None)


async def test_strangers_are_heard_by_services_for_everybody_and_by_no_other() -> None:
    closed = ServiceHandler(Hello, greet, knows=lambda peer_id: False)
    async with alone(1, MEMBERSHIP=OPEN, STATES=closed) as (streams, (stranger,)):
        assert await ask(stranger, streams) == "good day"
        for service in (MemberService.STATES, MemberService.HOPS):
            with pytest.raises(PeerUnreachable):
                await ask(stranger, streams, service)
        assert streams.incoming.refused == {Refusal.NOT_A_MEMBER: 2}


async def test_identities_that_wait_without_a_word_make_room_for_one_that_asks() -> None:
    async with alone(4, MEMBERSHIP=OPEN) as (streams, (one, other, third, honest)):
        silent = [await host.open_stream(streams.peer_id, PROTOCOL) for host in (one, one, other, other)]
        await asyncio.sleep(0.01)
        assert await ask(honest, streams) == "good day"
        with pytest.raises(PeerUnreachable):
            await silent[0].receive(1)
        begun = await third.open_stream(streams.peer_id, PROTOCOL)
        await begun.send(framed(MemberService.MEMBERSHIP, b"", 5.0)[:9])
        assert await ask(honest, streams) == "good day"


async def test_the_bound_on_streams_of_strangers_holds_when_many_come_at_once() -> None:
    async with alone(12, MEMBERSHIP=OPEN) as (streams, hosts):
        opening = (host.open_stream(streams.peer_id, PROTOCOL) for host in hosts for _ in range(2))
        kept = await asyncio.gather(*opening)
        await asyncio.sleep(0.01)
        assert len(streams.incoming._serving) == WIRE.max_stranger_streams
        assert len(kept) == 24


class Bytes(MemberMessage, frozen=True, tag="bytes"):
    """A message with bytes behind it."""

    size_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.size_bytes


async def take(incoming: Incoming[Bytes]) -> Reply:
    async with incoming.payload():
        return Reply("thank you")


async def give(host: MemoryHost, streams: MemberStreams, service: MemberService, size_bytes: int) -> str:
    async with MemberStreams(host) as asking:
        return await asking.ask(
            streams.peer_id, service, Bytes(size_bytes), str,
            timeout_s=1.0, payload=bytes(size_bytes),
        )  # fmt: skip


async def test_strangers_that_announce_bytes_and_send_none_leave_the_memory_of_members_alone() -> None:
    """However many they are, and a member's own streams from before it was one count as a member's."""
    known: set[str] = set()
    closed = ServiceHandler(Bytes, take, knows=lambda peer_id: peer_id in known)
    async with alone(4, PROBES=ServiceHandler(Bytes, take, knows=None), HOPS=closed) as (streams, hosts):
        member = hosts[0]
        async with MemberStreams(member) as asking:
            for service, size_bytes in ((MemberService.PROBES, 5), (MemberService.HOPS, 100)):
                given = bytes(size_bytes)
                answer = await asking.ask(
                    streams.peer_id, service, Bytes(size_bytes), str, timeout_s=1.0, payload=given
                )
                assert answer == "thank you"
                known.add(member.peer_id)
        silent = [await host.open_stream(streams.peer_id, PROTOCOL) for host in hosts[1:]]
        for stream in silent:
            await stream.send(framed(MemberService.PROBES, encode(Bytes(30)), 5.0))
        await asyncio.sleep(0.01)
        assert await give(member, streams, MemberService.HOPS, 100) == "thank you"
        with pytest.raises(MemberRefused, match="too_large"):
            await give(hosts[3], streams, MemberService.PROBES, 41)


async def test_one_stranger_has_few_streams_and_who_is_known_has_more() -> None:
    async with alone(2, MEMBERSHIP=OPEN) as (streams, (stranger, member)):
        known = ServiceHandler(Hello, greet, knows=lambda peer_id: peer_id == member.peer_id)
        streams.incoming.begin(MemberService.STATES, known)
        for _ in range(2):
            await stranger.open_stream(streams.peer_id, PROTOCOL)
        refused = await stranger.open_stream(streams.peer_id, PROTOCOL)
        with pytest.raises(PeerUnreachable):
            await refused.receive(1)
        for _ in range(5):
            await member.open_stream(streams.peer_id, PROTOCOL)
        assert await ask(member, streams, MemberService.STATES) == "good day"
        assert streams.incoming.refused == {Refusal.TOO_MANY_STREAMS: 1}


async def test_a_service_that_ends_takes_its_answers_with_it_and_no_others() -> None:
    held = asyncio.Event()

    async def hold(incoming: Incoming[Hello]) -> Reply:
        held.set()
        return await asyncio.get_running_loop().create_future()

    waits = ServiceHandler(Hello, hold, knows=lambda peer_id: True)
    async with alone(1, MEMBERSHIP=OPEN, STATES=waits) as (streams, (host,)):
        asking = asyncio.ensure_future(ask(host, streams, MemberService.STATES))
        await held.wait()
        await streams.incoming.end(MemberService.STATES)
        with pytest.raises(PeerUnreachable):
            await asking
        assert await ask(host, streams) == "good day"


async def test_an_answer_takes_no_longer_than_its_asker_gives_and_its_service_allows() -> None:
    given: list[float] = []

    async def tell(incoming: Incoming[Hello]) -> Reply:
        given.append(incoming.timeout_s)
        return Reply("good day")

    async with alone(1, PROBES=ServiceHandler(Hello, tell, knows=None)) as (streams, (host,)):
        for timeout_s in (0.5, 10_000.0):
            async with MemberStreams(host) as asking:
                await asking.ask(streams.peer_id, MemberService.PROBES, Hello(), str, timeout_s=timeout_s)
    assert given[0] <= 0.5
    assert given[1] == LIMITS[MemberService.PROBES].longest_s


async def test_members_of_another_version_are_told_so_with_a_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with alone(1, MEMBERSHIP=OPEN) as (streams, (host,)):
        stream = await host.open_stream(streams.peer_id, PROTOCOL)
        await stream.send(bytes([VERSION + 1]) + framed(MemberService.MEMBERSHIP, encode(Hello()), 5.0)[1:])
        refused = (await raw_wire.answer_on(stream)).refused
        assert refused is not None and refused.reason is Refusal.OTHER_VERSION
        assert "install the same swarmnode" in refused.detail

        async def of_tomorrow(stream: ByteStream) -> None:
            await stream.send(bytes([VERSION + 1]) + framed(MemberService.MEMBERSHIP, b"whatever")[1:])
            await stream.discard()

        await host.serve_streams(PROTOCOL, of_tomorrow)
        with caplog.at_level(logging.WARNING), pytest.raises(MemberRefused, match="other_version"):
            await streams.ask(host.peer_id, MemberService.MEMBERSHIP, Hello(), str, timeout_s=1.0)
        assert "install the same swarmnode" in caplog.text


async def test_who_answers_nothing_is_given_up_in_time() -> None:
    async def silent(stream: Any) -> None:
        await stream.discard()

    async with alone(1) as (streams, (host,)):
        await host.serve_streams(PROTOCOL, silent)
        with pytest.raises(RequestTimeout):
            await streams.ask(host.peer_id, MemberService.MEMBERSHIP, Hello(), str, timeout_s=0.1)


async def test_who_is_asked_once_and_answers_nothing_is_not_remembered() -> None:
    async with alone(1) as (streams, _):
        for number in range(3):
            with pytest.raises(NetworkError):
                await streams.ask(f"peer {number}", MemberService.MEMBERSHIP, Hello(), str, timeout_s=0.01)
        assert streams._links == {}


async def test_streams_that_were_idle_for_long_are_closed_and_their_peers_forgotten() -> None:
    limits = WireLimits(idle_timeout_s=0.0)
    async with alone(1, MEMBERSHIP=OPEN) as (streams, (host,)), MemberStreams(host, limits) as asking:
        asked = asking.ask(streams.peer_id, MemberService.MEMBERSHIP, Hello(), str, timeout_s=1.0)
        assert await asked == "good day"
        with pytest.raises(NetworkError):
            await asking.ask("nobody", MemberService.MEMBERSHIP, Hello(), str, timeout_s=0.01)
        assert (asking._links, asking._open) == ({}, set())


@pytest.mark.parametrize(
    ("content", "reason"),
    [("one", Refusal.MALFORMED), (7, Refusal.WRONG_SHAPE)],
)
async def test_an_answer_that_is_none_is_a_refusal(content: Any, reason: Refusal) -> None:
    async def answers(stream: ByteStream) -> None:
        await raw_wire.read(stream, Hello)
        await raw_wire.say(stream, content, body_bytes=3)
        await stream.discard()

    async with alone(2) as (_, (host, other)):
        await other.connect((await host.addresses())[0])
        await other.serve_streams(PROTOCOL, answers)
        async with MemberStreams(host) as asking:
            with pytest.raises(BadAnswer) as refused:
                await asking.ask(other.peer_id, MemberService.STATES, Hello(), int, timeout_s=9.0)
    assert refused.value.refusal is reason


async def test_a_peer_that_freezes_in_the_middle_of_an_answer_is_given_up_after_one_chunk() -> None:
    async def freezes(stream: ByteStream) -> None:
        await raw_wire.read(stream, Hello)
        await raw_wire.say(stream, 1000, body_bytes=1000)
        await stream.send(bytes(900))
        await stream.discard()

    async with alone(2) as (_, (host, other)):
        await other.connect((await host.addresses())[0])
        await other.serve_streams(PROTOCOL, freezes)
        async with MemberStreams(host, WireLimits(chunk_timeout_s=0.05)) as asking:
            with pytest.raises(RequestTimeout, match="middle of its answer"):
                await asking.ask(
                    other.peer_id, MemberService.STATES, Hello(), int,
                    timeout_s=600.0, body=AnswerBody(lambda size_bytes: size_bytes),
                )  # fmt: skip
