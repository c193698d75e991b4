import asyncio
import logging

import pytest

from swarmnode.exchange.gossip.header_gossip import HeaderGossip, topic_of
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork


def test_a_topic_names_protocol_and_swarm():
    assert topic_of("commons") == "/swarmnode/4/commons/rollouts/0"


def a_gossip(host: MemoryHost, hear) -> HeaderGossip:
    return HeaderGossip(host, {topic_of("test"): hear})


async def test_other_work_goes_on_while_a_full_queue_is_heard():
    heard: list[Message] = []
    network = MemoryNetwork()
    async with network.host() as alice, network.host() as bob:
        await alice.connect(bob.address)
        gossip = a_gossip(bob, heard.append)
        await gossip.subscribe()
        for number in range(500):
            await alice.publish(topic_of("test"), str(number).encode())
        turns = 0
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(gossip.run())
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
        gossip = a_gossip(bob, hear)
        await gossip.subscribe()
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(gossip.run())
            with caplog.at_level(logging.ERROR):
                for data in (b"bad", b"good"):
                    await alice.publish(topic_of("test"), data)
                await heard_good.wait()
            listening.cancel()
    assert heard == [b"bad", b"good"]
    assert "ZeroDivisionError" in caplog.text
