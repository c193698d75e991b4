"""Who has no key of a private swarm gets nothing: what a stranger's host receives is read as it came in."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.extensions.private_swarms.swarm_key import SwarmKey
from swarmnode.extensions.private_swarms.swarm_record import SwarmRecord, changed, founded, load, save
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.admission import file_of
from swarmnode.network.host import Message
from swarmnode.network.streams import ByteStream, StreamHost
from tests.contracts.hosts import HostFactory, member

TOPIC = "/swarmnode/4/friends/rollouts/0"
BODIES = "/swarmnode/rollouts/4"
NAMESPACE = "/swarmnode/1/friends"
HEADER, BODY, ASKED = b"the header of a group", b"the body of a group " * 50, b"which body is wanted"
FOUNDER = NodeKey(b"f" * 32)


@pytest.fixture
def record() -> SwarmRecord:
    return founded("friends", FOUNDER, ())


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110  a host has no event
            await asyncio.sleep(0.05)


async def give(peer_id: str, request: bytes) -> bytes:
    return BODY


async def heard(host: StreamHost, topic: str, listener: StreamHost, data: bytes) -> Message:
    """What a listener on this topic is given of what `host` publishes."""
    subscription = await listener.subscribe(topic)
    for _ in range(200):
        await host.publish(TOPIC, data)
        with suppress(TimeoutError):
            return await asyncio.wait_for(anext(subscription), 0.1)
    raise AssertionError("nothing was heard")


async def test_a_stranger_who_knows_all_but_the_key_gets_nothing(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    below, stranger = new_below(), new_below()
    async with member(below, record, tmp_path / "alice", prove_s=3600) as alice, stranger:
        await alice.serve(BODIES, give, max_request_bytes=100)
        await stranger.connect((await alice.addresses())[0])
        plain = await stranger.subscribe(TOPIC)
        # The worst case: it has read the name off the wire, as GossipSub tells every peer its topics.
        on_the_wire = (await heard(alice, record.key.name("topic", TOPIC), stranger, HEADER)).data
        assert HEADER not in on_the_wire and TOPIC.encode() not in on_the_wire
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(plain), 0.5)
        with pytest.raises(PeerUnreachable):
            await stranger.request(alice.peer_id, BODIES, ASKED, max_response_bytes=5000)
        protocol = record.key.name("protocol", BODIES)
        for guess in (ASKED, SwarmKey.generate().seal(ASKED, "request", BODIES), on_the_wire):
            assert await stranger.request(alice.peer_id, protocol, guess, max_response_bytes=5000) == b""
        assert await alice.peers() == ()
        with suppress(NetworkError):
            await alice.advertise(NAMESPACE)
        assert await stranger.find(NAMESPACE, timeout_s=2) == ()


async def test_what_a_stranger_says_does_not_reach_a_member(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    stranger = new_below()
    async with member(new_below(), record, tmp_path / "alice", prove_s=3600) as alice, stranger:
        subscription = await alice.subscribe(TOPIC)
        await stranger.connect((await alice.addresses())[0])
        topic = record.key.name("topic", TOPIC)
        sealed_by_alice = (await heard(alice, topic, stranger, HEADER)).data
        for data in (HEADER, sealed_by_alice, b""):
            await stranger.publish(topic, data)
            await stranger.publish(TOPIC, data)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(subscription), 1.0)


async def test_who_does_not_prove_the_key_is_sent_away(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    stranger = new_below()
    async with member(new_below(), record, tmp_path / "alice", prove_s=0.5) as alice, stranger:
        await stranger.connect((await alice.addresses())[0])

        async def alone() -> bool:
            return await stranger.peers() == ()

        await eventually(alone)


async def test_a_friend_with_a_mistyped_key_is_told_so(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord, caplog: pytest.LogCaptureFixture
):
    mistyped = replace(record, secrets=(SwarmKey.generate().secret,), signed_list=b"")
    async with (
        member(new_below(), record, tmp_path / "alice") as alice,
        member(new_below(), mistyped, tmp_path / "friend") as friend,
    ):
        with pytest.raises(PeerUnreachable, match="does not know our key") as caught:
            await friend.connect((await alice.addresses())[0])
        assert "new one" in caught.value.hint
        assert "does not know our key" in caplog.text
        assert await friend.peers() == await alice.peers() == ()


async def test_after_a_rotation_members_go_on_and_the_removed_one_is_left_with_nothing(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    async with (
        member(new_below(), record, tmp_path / "alice") as alice,
        member(new_below(), record, tmp_path / "bob") as bob,
        member(new_below(), record, tmp_path / "mallory") as mallory,
    ):
        at_bob, at_mallory = await bob.subscribe(TOPIC), await mallory.subscribe(TOPIC)
        await bob.serve(BODIES, give, max_request_bytes=100)
        address = (await alice.addresses())[0]
        for host in (bob, mallory):
            await host.connect(address)
        await mallory.connect((await bob.addresses())[0])
        assert await mallory.request(bob.peer_id, BODIES, ASKED, max_response_bytes=5000) == BODY

        both = [bob.peer_id, mallory.peer_id]
        after = changed(
            record, FOUNDER, members=[alice.peer_id, *both], remove=[mallory.peer_id], new_key=True
        )
        save(after, file_of(tmp_path / "alice", "friends"))

        async def bob_has_moved() -> bool:
            return load(file_of(tmp_path / "bob", "friends")).key == after.key

        await eventually(bob_has_moved)

        async def bob_hears() -> bool:
            with suppress(TimeoutError, NetworkError):
                await alice.publish(TOPIC, HEADER + b" of the new time")
                while (await asyncio.wait_for(anext(at_bob), 0.1)).data != HEADER + b" of the new time":
                    pass
                return True
            return False

        await eventually(bob_hears)
        assert await alice.request(bob.peer_id, BODIES, ASKED, max_response_bytes=5000) == BODY
        with pytest.raises(NetworkError):
            await mallory.request(bob.peer_id, BODIES, ASKED, timeout_s=5, max_response_bytes=5000)
        with pytest.raises(NetworkError):
            await mallory.connect(address)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(at_mallory), 0.5)
        assert load(file_of(tmp_path / "mallory", "friends")).key == record.key

        async def nobody_knows_mallory() -> bool:
            return mallory.peer_id not in (*await alice.peers(), *await bob.peers())

        await eventually(nobody_knows_mallory)


async def test_a_member_that_was_away_is_handed_the_new_key_by_another_member(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    peer_id = load_or_create(tmp_path / "0.key").peer_id  # of the first host that is made
    after = changed(record, FOUNDER, members=[peer_id], new_key=True)
    async with (
        member(new_below(), record, tmp_path / "away") as away,
        member(new_below(), after, tmp_path / "bob") as bob,
    ):
        assert away.peer_id == peer_id
        with suppress(NetworkError):
            await away.connect((await bob.addresses())[0])

        async def both_know() -> bool:
            return await away.peers() == (bob.peer_id,) and await bob.peers() == (peer_id,)

        await eventually(both_know)
        assert load(file_of(tmp_path / "away", "friends")).key == after.key


async def test_a_strangers_stream_never_reaches_who_serves_streams(
    new_below: HostFactory, tmp_path: Path, record: SwarmRecord
):
    stranger, served = new_below(), list[str]()

    async def serve(stream: ByteStream) -> None:
        served.append(stream.peer_id)
        await stream.send(BODY)
        await stream.discard()

    async with (
        member(new_below(), record, tmp_path / "alice", prove_s=3600) as alice,
        member(new_below(), record, tmp_path / "bob") as bob,
        stranger,
    ):
        await alice.serve_streams(BODIES, serve)
        address = (await alice.addresses())[0]
        await stranger.connect(address)
        stream = await stranger.open_stream(alice.peer_id, record.key.name("protocol", BODIES))
        with suppress(PeerUnreachable):
            await stream.send(bytes(200))
        with pytest.raises(PeerUnreachable):
            while True:
                assert BODY[:20] not in await stream.receive(32)
        stream.close()
        await bob.connect(address)
        ours = await bob.open_stream(alice.peer_id, BODIES)
        assert await ours.receive(len(BODY)) == BODY
        assert served == [bob.peer_id]
        ours.close()


async def test_what_goes_over_a_stream_is_sealed(new_below: HostFactory, tmp_path: Path, record: SwarmRecord):
    """The stranger stands where a member should be, and sees what a member would send it."""
    stranger, came = new_below(), bytearray()

    async def look(stream: ByteStream) -> None:
        came.extend(await stream.receive(32))
        await stream.send(bytes(32))
        with suppress(PeerUnreachable):
            while True:
                came.extend(await stream.receive(1))

    async with member(new_below(), record, tmp_path / "alice", prove_s=3600) as alice, stranger:
        await stranger.serve_streams(record.key.name("protocol", BODIES), look)
        await stranger.connect((await alice.addresses())[0])
        stream = await alice.open_stream(stranger.peer_id, BODIES)
        await stream.send(BODY)

        async def all_came() -> bool:
            return len(came) >= 32 + len(BODY)

        await eventually(all_came)
        assert BODY[:20] not in came
        stream.close()
