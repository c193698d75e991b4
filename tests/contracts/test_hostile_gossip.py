"""What a stranger's daemon may send over GossipSub, against the real host: it costs the host nothing."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import util
from pathlib import Path

import pytest

from benchmarks.attackers.daemon import identity
from benchmarks.attackers.wire import GOSSIP, Author, gossip, publishing, subscribing_to_many
from swarmnode.errors import NetworkError
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.daemon import daemon_memory, traffic
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.daemon.received_bytes import received_bytes
from swarmnode.network.host import MAX_GOSSIP_BYTES, Message, Subscription
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.streams import SocketStream
from tests.contracts.hosts import p2pd_hosts

TOPIC = "/swarmnode/4/test/rollouts/0"
KEY = NodeKey(b"\7" * 32)
HONEST = Author.of(KEY)

needs_daemon = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")


@asynccontextmanager
async def gossip_to(victim: P2pdHost, folder: Path) -> AsyncGenerator[SocketStream, None]:
    """A stream on which the victim's daemon reads RPCs, from an identity of its own in `folder`."""
    async with identity(folder) as attacker:
        peer_id = await attacker.connect((await victim.addresses())[0])
        stream = SocketStream(attacker.key.peer_id, *await attacker.open(peer_id, GOSSIP))
        try:
            yield stream
        finally:
            stream.close()
            await asyncio.sleep(0)


async def send(stream: SocketStream, *rpcs: bytes) -> bool:
    """Write framed RPCs; False when the victim has hung up."""
    with suppress(NetworkError):
        for rpc in rpcs:
            await stream.send(rpc)
        return True
    return False


@asynccontextmanager
async def attacked(folder: Path) -> AsyncGenerator[tuple[P2pdHost, SocketStream, Subscription], None]:
    """A host with a subscription, and the attacker's stream into its daemon."""
    async with p2pd_hosts(folder)() as victim:
        assert isinstance(victim, P2pdHost)
        heard = await victim.subscribe(TOPIC)
        async with gossip_to(victim, folder) as stream:
            yield victim, stream, heard


async def next_of(heard: Subscription) -> Message:
    async with asyncio.timeout(10):
        return await anext(heard)


async def counted(host: P2pdHost, cause: str, at_least: int) -> None:
    for _ in range(500):
        if host.status().skipped.get(cause, 0) >= at_least:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never {at_least} of {cause}: {host.status().skipped}")


@needs_daemon
async def test_an_author_that_nobody_can_be_is_skipped_and_the_daemon_lives(tmp_path: Path):
    async with attacked(tmp_path) as (victim, stream, heard):
        pid = victim.daemon_pid
        await send(stream, *(publishing(gossip(Author.with_ecdsa(), TOPIC, b"junk")) for _ in range(3)))
        await send(stream, publishing(gossip(HONEST, TOPIC, b"honest")))
        message = await next_of(heard)
        assert (message.sender, message.data) == (KEY.peer_id, b"honest")
        await counted(victim, "gossip_author", 3)
        await asyncio.sleep(1.2)  # a health probe
        assert (victim.daemon_pid, victim.status().restarts, victim.status().state) == (pid, 0, "up")


@needs_daemon
async def test_the_author_of_oversized_gossip_is_told_to_the_reader_of_the_topic(tmp_path: Path):
    async with attacked(tmp_path) as (victim, stream, heard):
        await send(stream, publishing(gossip(HONEST, TOPIC, bytes(MAX_GOSSIP_BYTES + 1))))
        assert await next_of(heard) == Message(TOPIC, KEY.peer_id, b"", oversized=True)
        await send(stream, publishing(gossip(HONEST, TOPIC, bytes(MAX_GOSSIP_BYTES))))
        assert await next_of(heard) == Message(TOPIC, KEY.peer_id, bytes(MAX_GOSSIP_BYTES))
        assert victim.status().skipped == {"gossip_size": 1}


async def until_back(host: P2pdHost) -> None:
    for _ in range(1500):
        if host.status().memory_restarts:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not come back: {host.status()}")


async def grow(victim: P2pdHost, stream: SocketStream, done: Callable[[], bool]) -> None:
    """Subscribe to new topics until it is done, or the victim has hung up, which it has to within a while."""
    async with asyncio.timeout(60):
        for first in range(0, 10**9, 1000):
            if done() or not await send(stream, subscribing_to_many(range(first, first + 1000))):
                return
            await asyncio.sleep(0)


@needs_daemon
async def test_who_makes_the_daemon_grow_is_sent_away_and_the_daemon_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if received_bytes(frozenset({1})) is None:
        pytest.skip("the kernel does not tell who sends what")
    monkeypatch.setattr(daemon_memory, "RELIEF_AT_BYTES", 8 * 2**20)
    async with attacked(tmp_path) as (victim, stream, _):
        async with p2pd_hosts(tmp_path / "honest")() as honest:
            await honest.connect((await victim.addresses())[0])
            await grow(victim, stream, lambda: "disconnected for" in caplog.text)
            async with asyncio.timeout(10):
                await stream.discard()  # until the victim hangs up
            assert await victim.peers() == (honest.peer_id,)
        assert (victim.status().restarts, victim.status().memory_restarts) == (0, 0)


@needs_daemon
async def test_a_daemon_that_grew_too_large_is_replaced_and_goes_on_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traffic, "LEAST_BLAME_BYTES", 2**40)  # nobody is known to be to blame
    # A daemon that has just begun grows by some twenty by itself.
    monkeypatch.setattr(daemon_memory, "MAX_GROWTH_BYTES", 48 * 2**20)
    async with attacked(tmp_path) as (victim, stream, heard):
        pid, addresses = victim.daemon_pid, await victim.addresses()
        await grow(victim, stream, lambda: victim.daemon_pid != pid)
        await until_back(victim)
        async with asyncio.timeout(30), gossip_to(victim, tmp_path) as again:
            await send(again, publishing(gossip(HONEST, TOPIC, b"still there")))
            assert (await next_of(heard)).data == b"still there"
        status = victim.status()
        assert (status.state, status.restarts, status.memory_restarts) == ("up", 0, 1)
        assert "grew by" in status.detail
        assert await victim.addresses() == addresses


async def test_the_network_within_a_process_tells_of_oversized_gossip_too():
    network = MemoryNetwork()
    async with network.host() as alice, network.host() as bob:
        await alice.connect(bob.address)
        heard = await bob.subscribe(TOPIC)
        network.gossip(Message(TOPIC, alice.peer_id, bytes(MAX_GOSSIP_BYTES + 1)))
        assert await next_of(heard) == Message(TOPIC, alice.peer_id, b"", oversized=True)
        assert bob.status().skipped == {"gossip_size": 1}
