"""Discovery on the fake network: a node finds its swarm, keeps it, and never gives up."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmnode.errors import NetworkError
from swarmnode.network.finding import discovery, peer_book
from swarmnode.network.finding.discovery import Discovery, LocalSearch
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

SWARM = "a swarm"
PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions a hundred times as often."""
    monkeypatch.setattr(discovery, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(discovery, "FIND_INTERVAL_S", (0.05, 0.05))
    monkeypatch.setattr(discovery, "ADVERTISE_RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(peer_book, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(peer_book, "MAX_RETRY_S", 0.1)
    monkeypatch.setattr(peer_book, "ALONE_RETRY_S", 0.1)


@asynccontextmanager
async def discovering(
    host: MemoryHost,
    *,
    seeds: tuple[str, ...] = (),
    book: PeerBook | None = None,
    local_peers: LocalSearch | None = None,
) -> AsyncGenerator[None, None]:
    known = PeerBook() if book is None else book
    interfaces = ("127.0.0.1",)
    finder = Discovery(
        host, known, seeds, SWARM, local_peers=local_peers, interfaces=interfaces, rng=random.Random(0)
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(finder.run())
        try:
            yield
        finally:
            running.cancel()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


async def until_connected(one: MemoryHost, other: MemoryHost) -> None:
    async def connected() -> bool:
        return other.peer_id in await one.peers()

    await until(connected)


async def test_a_node_attaches_to_its_seed(caplog: pytest.LogCaptureFixture):
    network = MemoryNetwork()
    async with network.host() as seed, network.host() as node:
        with caplog.at_level(logging.INFO):
            async with discovering(node, seeds=(seed.address,)):
                await until_connected(node, seed)
                await asyncio.sleep(0.1)
    assert [record.message for record in caplog.records if "attached" in record.message] == [
        "attached to 1 peer"
    ]


async def test_with_every_seed_down_the_node_says_so_and_attaches_when_one_comes(
    caplog: pytest.LogCaptureFixture,
):
    network = MemoryNetwork()
    seed = network.host()
    async with network.host() as node, discovering(node, seeds=(seed.address,)):
        await asyncio.sleep(0.2)
        assert await node.peers() == ()
        assert [record.message for record in caplog.records if record.message.startswith("alone")] == [
            "alone: 1 seed unreachable, retrying in 0 s"
        ]
        async with seed:
            await until_connected(node, seed)


async def test_a_node_that_banned_its_only_seed_says_so_once(caplog: pytest.LogCaptureFixture):
    network = MemoryNetwork()
    async with network.host() as seed, network.host() as node, discovering(node, seeds=(seed.address,)):
        await until_connected(node, seed)
        await node.disconnect(seed.peer_id, barred_s=60.0)
        await asyncio.sleep(0.5)
    told = [record.message for record in caplog.records if "we banned" in record.message]
    assert len(told) == 1 and "`swarmnode peers` shows why" in told[0]


async def test_two_nodes_of_a_swarm_meet_through_a_common_seed():
    network = MemoryNetwork()
    async with (
        network.host() as seed,
        network.host() as alice,
        network.host() as bob,
        discovering(alice, seeds=(seed.address,)),
        discovering(bob, seeds=(seed.address,)),
    ):
        await until_connected(alice, bob)


async def test_a_node_finds_the_peers_of_its_last_run_without_any_seed(tmp_path: Path):
    network, path = MemoryNetwork(), tmp_path / "peers.json"
    async with network.host() as friend, network.host() as node:
        async with discovering(node, seeds=(friend.address,), book=PeerBook.load(path)):
            await until_connected(node, friend)
            await until(lambda: asyncio.sleep(0, path.exists()))
        network.unlink(node.peer_id)
        assert await node.peers() == ()
        async with discovering(node, book=PeerBook.load(path)):
            await until_connected(node, friend)


async def test_a_lost_peer_is_dialled_again():
    network = MemoryNetwork()
    async with network.host() as seed, network.host() as node, discovering(node, seeds=(seed.address,)):
        await until_connected(node, seed)
        network.unlink(seed.peer_id)
        await until_connected(node, seed)


async def test_discovery_survives_a_host_that_goes_down():
    network = MemoryNetwork()
    async with network.host() as seed, network.host() as node, discovering(node, seeds=(seed.address,)):
        await until_connected(node, seed)
        node.go_down()
        await asyncio.sleep(0.1)
        node.come_back()
        await until_connected(node, seed)


async def test_a_seed_that_is_given_its_own_address_does_not_dial_itself(caplog: pytest.LogCaptureFixture):
    async with MemoryNetwork().host() as seed, discovering(seed, seeds=(seed.address,)):
        await asyncio.sleep(0.1)
    assert "alone: no seed and no known peer; waiting for others to dial us" in caplog.messages


async def test_a_book_that_cannot_be_saved_does_not_stop_discovery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    network = MemoryNetwork()
    async with network.host() as seed, network.host() as node:
        book = PeerBook(tmp_path / "file" / "peers.json")
        async with discovering(node, seeds=(seed.address,), book=book):
            await until(lambda: asyncio.sleep(0, "cannot write the peer book" in caplog.text))
            assert await node.peers() == (seed.peer_id,)


async def test_a_malformed_seed_is_told_at_once():
    with pytest.raises(NetworkError, match="malformed"):
        Discovery(MemoryNetwork().host(), PeerBook(), ["localhost:4001"], SWARM)


async def test_a_name_in_the_dns_leads_to_the_swarm_once_it_resolves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(discovery, "LOOK_UP_RETRY_S", 0.02)
    network, asked = MemoryNetwork(), [0]
    async with network.host() as seed, network.host() as node:

        async def resolve(name: str) -> list[bytes]:
            asked[0] += 1
            if asked[0] < 3:
                raise NetworkError(f"{name} cannot be looked up")
            return [f"dnsaddr={seed.address}".encode()]

        finder = Discovery(node, PeerBook(), (), SWARM, names=["example.org"], resolve=resolve)
        running = asyncio.create_task(finder.run())
        try:
            await until_connected(node, seed)
        finally:
            running.cancel()


async def test_another_node_with_our_identity_in_the_local_network_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MemoryNetwork().host(ip="192.168.1.20") as node:
        twins = [f"/ip4/192.168.1.{place}/tcp/1/p2p/{node.peer_id}" for place in (21, 22)]

        @asynccontextmanager
        async def neighbours(
            addresses: tuple[str, ...], *, namespace: str, interfaces: tuple[str, ...]
        ) -> AsyncGenerator[object, None]:
            async def found() -> AsyncGenerator[tuple[str, ...], None]:
                yield (f"/ip4/192.168.1.23/tcp/1/p2p/{PEER}",)
                # Our own announcement of an earlier start, from the memory of a gateway.
                yield addresses
                for twin in twins:
                    yield (twin,)

            yield found()

        finder = Discovery(node, PeerBook(), (), SWARM, interfaces=("192.168.1.20",))
        assert "identity" not in finder.reach.text
        await finder._browse(neighbours)
        assert finder.reach.text.startswith(
            f"another node with this node's identity was seen at {twins[0]}; not known yet"
        )
    assert [record.levelname for record in caplog.records if "identity" in record.message] == ["WARNING"]


async def test_nothing_public_is_taken_from_the_local_network():
    told: list[str] = []

    @asynccontextmanager
    async def neighbours(
        addresses: tuple[str, ...], *, namespace: str, interfaces: tuple[str, ...]
    ) -> AsyncGenerator[object, None]:
        told.extend(addresses)

        async def found() -> AsyncGenerator[tuple[str, ...], None]:
            yield (f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}", f"/ip4/10.0.0.7/tcp/1/p2p/{PEER}")

        yield found()

    book = PeerBook()
    async with (
        MemoryNetwork().host(ip="192.168.1.20") as node,
        discovering(node, book=book, local_peers=neighbours),
    ):

        async def learned() -> bool:
            return len(book) > 0

        await until(learned)
    assert [known.address for known in book] == [f"/ip4/10.0.0.7/tcp/1/p2p/{PEER}"]
    assert told == [node.address]
