"""The fake network keeps the rules of the real one, and its losses can be repeated."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from swarmnode.errors import HostDown, PeerUnreachable
from swarmnode.network.host import Subscription
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

TOPIC = "rollouts"


@asynccontextmanager
async def hosts_on(network: MemoryNetwork, count: int) -> AsyncGenerator[list[MemoryHost], None]:
    """Hosts in a line: each is connected to the next one only."""
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host()) for _ in range(count)]
        for one, other in pairwise(hosts):
            await one.connect((await other.addresses())[0])
        yield hosts


async def received(subscription: Subscription) -> list[bytes]:
    """What has arrived by now."""
    messages: list[bytes] = []
    while True:
        try:
            messages.append((await asyncio.wait_for(anext(subscription), 0.01)).data)
        except TimeoutError:
            return messages


async def survivors(seed: int, loss: float) -> list[bytes]:
    async with hosts_on(MemoryNetwork(seed=seed, loss=loss), 2) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        for number in range(100):
            await alice.publish(TOPIC, bytes([number]))
        return await received(subscription)


async def test_gossip_travels_through_subscribers_only():
    async with hosts_on(MemoryNetwork(), 3) as (alice, bob, carol):
        at_carol = await carol.subscribe(TOPIC)
        await alice.publish(TOPIC, b"bob does not forward")
        await bob.subscribe(TOPIC)
        await alice.publish(TOPIC, b"bob forwards")
        assert await received(at_carol) == [b"bob forwards"]


async def test_losses_depend_on_the_seed_alone():
    once, again, other = await survivors(1, 0.3), await survivors(1, 0.3), await survivors(2, 0.3)
    assert once == again != other
    assert 50 < len(once) < 90


async def test_all_or_nothing_can_be_lost():
    assert len(await survivors(1, 0.0)) == 100
    assert await survivors(1, 1.0) == []


async def test_delayed_gossip_arrives_later_and_out_of_order():
    async with hosts_on(MemoryNetwork(seed=3, delay_s=(0.02, 0.2)), 2) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        sent = [bytes([number]) for number in range(20)]
        for data in sent:
            await alice.publish(TOPIC, data)
        assert await received(subscription) == []
        arrived = [(await anext(subscription)).data for _ in sent]
        assert sorted(arrived) == sent != arrived


async def test_gossip_that_arrives_after_the_host_closed_is_nobodys():
    network = MemoryNetwork(delay_s=(0.01, 0.01))
    async with hosts_on(network, 2) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        await alice.publish(TOPIC, b"too late")
    await asyncio.sleep(0.02)
    assert [message async for message in subscription] == []


async def test_a_partition_separates_and_healing_restores():
    network = MemoryNetwork()

    async def serve_all(hosts: Sequence[MemoryHost]) -> None:
        for host in hosts:
            await host.serve("/whoami", lambda peer_id, request: asyncio.sleep(0, b"me"), max_request_bytes=0)

    async with hosts_on(network, 2) as (alice, bob):
        await serve_all((alice, bob))
        subscription = await bob.subscribe(TOPIC)
        network.partition([[alice], [bob]])
        await alice.publish(TOPIC, b"unheard")
        with pytest.raises(PeerUnreachable):
            await alice.request(bob.peer_id, "/whoami", b"", max_response_bytes=2)
        with pytest.raises(PeerUnreachable):
            await alice.connect(bob.address)
        assert await alice.peers() == ()

        network.heal()
        await alice.publish(TOPIC, b"heard")
        assert await alice.request(bob.peer_id, "/whoami", b"", max_response_bytes=2) == b"me"
        assert await received(subscription) == [b"heard"]


async def test_hosts_in_no_group_stay_together():
    network = MemoryNetwork()
    async with hosts_on(network, 3) as (alice, bob, carol):
        network.partition([[alice]])
        assert await bob.peers() == (carol.peer_id,)


async def test_a_host_that_is_down_says_so_and_keeps_what_it_had():
    async with hosts_on(MemoryNetwork(), 2) as (alice, bob):
        subscription = await bob.subscribe(TOPIC)
        await bob.serve("/whoami", lambda peer_id, request: asyncio.sleep(0, b"me"), max_request_bytes=0)

        bob.go_down("killed")
        assert (bob.status().state, bob.status().detail) == ("restarting", "killed")
        with pytest.raises(HostDown):
            await bob.publish(TOPIC, b"")
        with pytest.raises(PeerUnreachable):
            await alice.request(bob.peer_id, "/whoami", b"", max_response_bytes=2)
        await alice.publish(TOPIC, b"unheard")

        bob.come_back()
        assert (bob.status().state, bob.status().restarts) == ("up", 1)
        assert await bob.peers() == (alice.peer_id,)
        await alice.publish(TOPIC, b"heard")
        assert await received(subscription) == [b"heard"]
        assert await alice.request(bob.peer_id, "/whoami", b"", max_response_bytes=2) == b"me"


async def test_a_closed_host_disappears():
    network = MemoryNetwork()
    async with hosts_on(network, 1) as (alice,):
        async with network.host() as bob:
            await bob.connect(alice.address)
            await bob.advertise("a swarm")
            assert await alice.find("a swarm") == (bob.address,)
        assert await alice.peers() == ()
        assert await alice.find("a swarm") == ()


async def test_a_host_can_have_the_peer_id_of_a_real_key():
    peer_id = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    network = MemoryNetwork()
    async with network.host(peer_id) as host:
        assert host.peer_id == peer_id
        with pytest.raises(ValueError, match="already"):
            await network.host(peer_id).__aenter__()


def test_a_loss_that_is_no_share_is_a_mistake():
    with pytest.raises(ValueError, match="loss"):
        MemoryNetwork(loss=10)
