"""The queue behind a subscription: bounded, in order, and it ends."""

import asyncio

import pytest

from swarmnode.network.host import Message
from swarmnode.network.message_queue import MessageQueue


def queue_of(size: int, *numbers: int) -> MessageQueue:
    queue = MessageQueue("topic", size, lambda queue: None)
    for number in numbers:
        queue.put(message(number))
    return queue


def message(number: int) -> Message:
    return Message("topic", "sender", bytes([number]))


async def test_messages_come_in_order():
    queue = queue_of(3, 1, 2, 3)
    assert [await anext(queue) for _ in range(3)] == [message(1), message(2), message(3)]


async def test_a_slow_reader_loses_the_oldest():
    queue = queue_of(2, 1, 2, 3, 4, 5)
    assert [await anext(queue), await anext(queue)] == [message(4), message(5)]


async def test_a_reader_waits_for_the_next_message():
    queue = queue_of(2)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(queue.__anext__())
        await asyncio.sleep(0)
        assert not reading.done()
        queue.put(message(7))
    assert reading.result() == message(7)


async def test_giving_up_waiting_loses_nothing():
    queue = queue_of(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(queue), 0.01)
    queue.put(message(7))
    assert await anext(queue) == message(7)


async def test_closing_wakes_a_waiting_reader_and_tells_the_host_once():
    told: list[MessageQueue] = []
    queue = MessageQueue("topic", 2, told.append)

    async def read_all() -> list[Message]:
        return [message async for message in queue]

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read_all())
        await asyncio.sleep(0)
        await queue.aclose()
        await queue.aclose()
    assert reading.result() == []
    assert told == [queue]


async def test_a_closed_queue_takes_no_more():
    queue = queue_of(2)
    queue.close()
    queue.put(message(1))
    assert [message async for message in queue] == []
