"""A seed connects others and keeps nothing of theirs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.gossip.header_gossip import receipts_topic_of, topic_of
from swarmnode.exchange.gossip.helping import help_topic_of
from swarmnode.extensions.seed.seed_node import SEED_PORT, SeedNode, seed_network
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.node.showing.node_status import measurements
from swarmnode.settings.config import NetworkConfig
from swarmnode.settings.config_layers import load_config
from tests.unit.exchange.conftest import make_group


def seed_on(host: MemoryHost, *assignments: str) -> SeedNode:
    config = load_config(environ={}, assignments=assignments).config
    discovery = Discovery(host, PeerBook(), (), f"/swarmnode/1/{config.swarm.name}")
    return SeedNode(config, host, discovery, peer_id=host.peer_id, name="otter")


@asynccontextmanager
async def at_work(seed: SeedNode) -> AsyncIterator[None]:
    async with seed, asyncio.TaskGroup() as tasks:
        tasks.create_task(seed.run())
        yield
        seed.request_stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  a status has no event
            await asyncio.sleep(0.01)


async def test_members_who_know_only_the_seed_hear_each_other_through_it() -> None:
    network = MemoryNetwork(seed=1)
    host = network.host()
    seed = seed_on(host)
    async with at_work(seed), network.host() as alice, network.host() as bob:
        seed_address = (await host.addresses())[0]
        topic = topic_of("commons")
        hearing = await bob.subscribe(topic)
        await alice.connect(seed_address)
        await bob.connect(seed_address)
        await alice.publish(topic, b"a header")
        async with asyncio.timeout(30):
            message = await anext(hearing)
        assert (message.sender, message.data) == (alice.peer_id, b"a header")
        assert await alice.peers() == (host.peer_id,)
        await until(lambda: seed.status.exchange.headers == 1)
        assert seed.status.exchange.bytes_in == len(b"a header")
        assert seed.status.network.peers == 2


@pytest.mark.parametrize("topic_of_swarm", [help_topic_of, receipts_topic_of])
async def test_requests_for_help_and_receipts_pass_through_a_seed_too(
    topic_of_swarm: Callable[[str], str],
) -> None:
    network = MemoryNetwork(seed=1)
    host = network.host()
    async with at_work(seed_on(host)), network.host() as alice, network.host() as bob:
        topic = topic_of_swarm("commons")
        hearing = await bob.subscribe(topic)
        for member in (alice, bob):
            await member.connect((await host.addresses())[0])
        await alice.publish(topic, b"a request")
        async with asyncio.timeout(30):
            assert (await anext(hearing)).data == b"a request"


async def test_a_seed_counts_the_swarm_that_it_hears() -> None:
    network, key = MemoryNetwork(seed=1), NodeKey(b"\1" * 32)
    seed = seed_on(host := network.host())
    group = make_group(key.peer_id)
    sent = compose(group, key, swarm="commons", model=ModelLabel("tiny", None), now=time.time())
    async with at_work(seed), network.host(key.peer_id) as alice, network.host() as liar:
        for member in (alice, liar):
            await member.connect((await host.addresses())[0])
            await member.publish(topic_of("commons"), sent.sealed)
        await until(lambda: seed.status.exchange.headers == 2)
        seed._health._shown_at = float("-inf")
        await until(lambda: seed.status.health.nodes == 1)
        assert [one.name for one in seed.status.health.tasks] == ["addition"]
        assert measurements(seed.status)["health.nodes"] == 1


async def test_who_asks_a_seed_for_a_body_that_nobody_announced_is_answered_at_once_with_nothing() -> None:
    network = MemoryNetwork(seed=1)
    host = network.host()
    async with at_work(seed_on(host)), network.host() as alice:
        await alice.connect((await host.addresses())[0])
        request = bytes(32) + alice.peer_id.encode()
        body = await alice.request(host.peer_id, BODY_PROTOCOL, request, max_response_bytes=1024)
        assert body == b""


async def test_a_seed_says_what_it_is_and_ends_when_asked() -> None:
    seed = seed_on(MemoryNetwork(seed=1).host(), "swarm.name=attic")
    async with at_work(seed):
        assert (seed.status.model, seed.status.swarm) == ("none", "attic")
        assert seed.status.phase.name == "connecting others"
    assert seed.status.phase.name == "stopped"


async def test_what_a_seed_measures_is_what_it_does_and_nothing_of_a_policy() -> None:
    seed = seed_on(MemoryNetwork(seed=1).host())
    async with at_work(seed):
        status = seed.status
    numbers = measurements(status)
    assert "exchange.headers" in numbers and "network.peers" in numbers
    assert not any(name.startswith(("progress", "training", "reward", "generation")) for name in numbers)


def test_a_seed_has_a_steady_port_unless_told_otherwise() -> None:
    network = load_config(environ={}).config.network
    assert seed_network(network).port == SEED_PORT
    assert seed_network(network.model_copy(update={"port": 4100})).port == 4100


def test_a_seed_relays_for_others_unless_it_is_alone_on_its_machine_or_told_not_to() -> None:
    network = NetworkConfig()
    assert seed_network(network).relay_for_others
    assert not seed_network(network.model_copy(update={"listen": "127.0.0.1"})).relay_for_others
    assert not seed_network(network.model_copy(update={"relay_for_others": False})).relay_for_others
