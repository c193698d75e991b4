"""What only the go-libp2p host has: limits on incoming streams, QUIC, and ports that it picks itself."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import util
from pathlib import Path

import pytest

from swarmnode.errors import PeerUnreachable, PortInUse
from swarmnode.identity import key_file
from swarmnode.network.daemon import daemon_supervisor, p2pd_host, stream_server
from swarmnode.network.daemon.daemon_process import resolve_port
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.finding import discovery
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.rpc import SMALL_READ_TIMEOUT_S
from swarmnode.network.stream_slots import StreamSlots

pytestmark = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")

HostFactory = Callable[..., P2pdHost]


@pytest.fixture
def new_host(tmp_path: Path) -> HostFactory:
    paths = (tmp_path / f"{number}.key" for number in range(10))

    def make(*listen: str) -> P2pdHost:
        path = next(paths)
        key_file.load_or_create(path)
        return P2pdHost(path, listen=listen or p2pd_host.DEFAULT_LISTEN)

    return make


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"


async def until_connected(one: P2pdHost, other: P2pdHost) -> None:
    while True:
        if other.peer_id in await one.peers():
            return
        await asyncio.sleep(0.05)


async def test_one_peer_cannot_hold_every_stream(new_host: HostFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_server, "StreamSlots", partial(StreamSlots, most_per_peer=2))
    release = asyncio.Event()
    serving = asyncio.Semaphore(0)

    async def hold(peer_id: str, request: bytes) -> bytes:
        serving.release()
        await release.wait()
        return b"done"

    async with new_host() as greedy, new_host() as modest, new_host() as server:
        await server.serve("/hold", hold, max_request_bytes=0)
        for client in (greedy, modest):
            await client.connect((await server.addresses())[0])

        async def ask(client: P2pdHost) -> bytes:
            return await client.request(server.peer_id, "/hold", b"", max_response_bytes=4)

        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(ask(greedy)) for _ in range(2)]
            for _ in held:
                await serving.acquire()
            with pytest.raises(PeerUnreachable):
                await ask(greedy)
            other = tasks.create_task(ask(modest))
            await serving.acquire()
            release.set()
        assert {task.result() for task in [*held, other]} == {b"done"}
        async with asyncio.timeout(10):
            while True:
                with suppress(PeerUnreachable):  # until the server has seen that the streams ended
                    assert await ask(greedy) == b"done"
                    break


async def test_streams_that_never_bring_a_request_keep_nobody_out(
    new_host: HostFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream_server, "StreamSlots", partial(StreamSlots, most=8, most_per_peer=4))

    async def echo(peer_id: str, request: bytes) -> bytes:
        return request

    async with new_host() as one, new_host() as other, new_host() as honest, new_host() as server:
        await server.serve("/echo", echo, max_request_bytes=10)
        held = []
        for client in (one, other, honest):
            await client.connect((await server.addresses())[0])
        for client in (one, other):
            # More than one peer may hold, so the server has seen all those of the last one but four.
            held += [await client.open_stream(server.peer_id, "/echo") for _ in range(6)]
        async with asyncio.timeout(SMALL_READ_TIMEOUT_S / 2):
            assert await honest.request(server.peer_id, "/echo", b"hi", max_response_bytes=2) == b"hi"
        for stream in held:
            stream.close()


async def test_quic_is_spoken_when_asked_for(new_host: HostFactory):
    async with new_host("/ip4/127.0.0.1/udp/0/quic-v1") as server, new_host() as client:
        (address,) = await server.addresses()
        assert "/quic-v1/p2p/" in address
        await client.connect(address)
        assert await client.peers() == (server.peer_id,)


async def test_a_picked_port_that_is_snatched_away_is_picked_anew(
    new_host: HostFactory, monkeypatch: pytest.MonkeyPatch, taken: str
):
    picks = iter([taken])
    monkeypatch.setattr(daemon_supervisor, "resolve_port", lambda wanted: next(picks, resolve_port(wanted)))
    async with new_host() as host:
        assert not (await host.addresses())[0].startswith(f"{taken}/p2p/")


async def test_a_port_that_was_asked_for_is_not_replaced(new_host: HostFactory, taken: str):
    with pytest.raises(PortInUse):
        async with new_host(taken):
            pass


async def test_two_nodes_meet_through_the_routing_table_of_their_seed(
    new_host: HostFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(discovery, "FIND_INTERVAL_S", (0.2, 0.2))
    monkeypatch.setattr(discovery, "WATCH_INTERVAL_S", 0.1)
    async with new_host() as seed, new_host() as alice, new_host() as bob, asyncio.TaskGroup() as tasks:
        seeds = await seed.addresses()
        nodes = [
            tasks.create_task(Discovery(host, PeerBook(), seeds, "a swarm").run()) for host in (alice, bob)
        ]
        async with asyncio.timeout(30):
            await until_connected(bob, alice)
        for node in nodes:
            node.cancel()


async def test_a_stream_that_comes_as_its_host_closes_is_hung_up(new_host: HostFactory):
    """Its task is cancelled before it begins, so no line of it runs."""
    near, far = socket.socketpair()
    far.setblocking(False)
    with far:
        async with new_host() as host:
            reader, writer = await asyncio.open_connection(sock=near)
            host._accept(reader, writer)  # as the listener does, in the last moment
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(far, 1) == b""
