import asyncio
import logging

import pytest

from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.header_gossip import HeaderGossip, shard_of, topic_of, topics_to_listen_to
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork


def test_a_task_has_the_same_shard_on_every_node():
    assert [shard_of("addition", shards) for shards in (1, 2, 64)] == [0, 1, 3]
    assert [shard_of("base_conversion", shards) for shards in (1, 2, 64)] == [0, 0, 56]


def test_tasks_spread_over_the_shards():
    assert {shard_of(f"task {number}", 8) for number in range(100)} == set(range(8))


def test_a_topic_names_protocol_swarm_and_shard():
    assert topic_of("commons", 3) == "/swarmnode/3/commons/rollouts/3"


def test_a_node_listens_to_the_shards_of_its_tasks():
    settings = ExchangeSettings(swarm="test", shards=64)
    topics = topics_to_listen_to(settings, ["addition", "base_conversion", "addition"])
    assert set(topics) == {topic_of("test", shard_of(task, 64)) for task in ("addition", "base_conversion")}


def test_one_shard_is_one_topic_for_all_tasks():
    assert topics_to_listen_to(ExchangeSettings(swarm="test"), ["a", "b", "c"]) == (topic_of("test", 0),)


def test_the_settings_may_name_the_shards():
    settings = ExchangeSettings(swarm="test", shards=8, listen_shards=(5, 1))
    assert topics_to_listen_to(settings, ["a"]) == (topic_of("test", 1), topic_of("test", 5))


def a_plane(host: MemoryHost, hear) -> HeaderGossip:
    return HeaderGossip(host, ExchangeSettings(swarm="test"), (topic_of("test", 0),), hear)


async def test_other_work_goes_on_while_a_full_queue_is_heard():
    heard: list[Message] = []
    network = MemoryNetwork()
    async with network.host() as alice, network.host() as bob:
        await alice.connect(bob.address)
        plane = a_plane(bob, heard.append)
        assert await plane.subscribe()
        for number in range(500):
            await alice.publish(topic_of("test", 0), str(number).encode())
        turns = 0
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(plane.run())
            while len(heard) < 500:
                await asyncio.sleep(0)
                turns += 1
            listening.cancel()
        assert turns >= 500


async def test_a_message_that_breaks_its_handler_does_not_end_the_listening(caplog: pytest.LogCaptureFixture):
    heard: list[bytes] = []
    heard_good = asyncio.Event()

    def hear(message: Message) -> None:
        heard.append(message.data)
        if message.data == b"bad":
            raise ZeroDivisionError
        heard_good.set()

    network = MemoryNetwork()
    async with network.host() as alice, network.host() as bob:
        await alice.connect(bob.address)
        plane = a_plane(bob, hear)
        await plane.subscribe()
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(plane.run())
            with caplog.at_level(logging.ERROR):
                for data in (b"bad", b"good"):
                    await alice.publish(topic_of("test", 0), data)
                await heard_good.wait()
            listening.cancel()
    assert heard == [b"bad", b"good"]
    assert "ZeroDivisionError" in caplog.text


async def test_messages_lost_to_a_slow_reader_are_counted():
    network = MemoryNetwork()
    async with network.host() as alice, network.host() as bob:
        await alice.connect(bob.address)
        plane = a_plane(bob, lambda message: None)
        await plane.subscribe()
        for _ in range(1030):
            await alice.publish(topic_of("test", 0), b"")
        assert plane.overflowed == 6
