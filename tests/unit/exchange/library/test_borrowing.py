"""Libraries over a network in memory: what one node's book holds, another has at its start."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.swarm_library import SwarmLibrary
from swarmnode.exchange.limits import ExchangeSettings
from swarmnode.identity.keys import NodeKey
from swarmnode.network.memory import MemoryHost, MemoryNetwork
from swarmnode.types import RolloutGroup

LONG_AGO_S = 30 * 86400.0


@dataclass(frozen=True)
class Node:
    key: NodeKey
    host: MemoryHost
    exchange: Exchange

    @property
    def library(self) -> SwarmLibrary:
        assert self.exchange.library is not None
        return self.exchange.library

    def dropped(self, reason: str) -> int:
        return self.exchange.stats().dropped.get(reason, 0)


@pytest.fixture
def start(task, encoder, prompt_encoder, clock):
    """Start node `number` on a network, connected to the nodes given, with an empty book."""

    @asynccontextmanager
    async def run(
        network: MemoryNetwork, number: int, *others: MemoryHost, shelf: Shelf | None = None, **settings: Any
    ) -> AsyncIterator[Node]:
        key = NodeKey(bytes([number]) * 32)
        async with network.host(key.peer_id) as host:
            for other in others:
                await host.connect(other.address)
            exchange = Exchange(
                host,
                key,
                {task.name: task},
                encode=encoder,
                prompt_ids=prompt_encoder,
                settings=ExchangeSettings(**{"swarm": "test", "patience_s": 0.1, **settings}),
                model_family="tiny",
                model_size=1000,
                clock=clock,
                rng=random.Random(number),
                shelf=shelf or Shelf(),
            )
            async with exchange:
                assert exchange.library is not None
                exchange.library.settle(())
                yield Node(key, host, exchange)

    return run


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


async def borrowed(node: Node, groups: int) -> list[RolloutGroup]:
    found: list[RolloutGroup] = []
    async with asyncio.timeout(30):
        while len(found) < groups:
            found += node.library.draw(groups - len(found))
            await asyncio.sleep(0.01)
    return found


async def learns(node: Node, groups: list[RolloutGroup]) -> None:
    """The node publishes groups, and its book takes answers of all of them."""
    await node.exchange.publish(groups)
    node.library.settle({(group.author, group.example.key) for group in groups})


async def test_a_newcomer_has_what_a_veterans_book_holds_however_old_it_is(
    start, groups_of, clock, as_learnt
):
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(5)]
        await learns(veteran, groups)
        clock.advance(LONG_AGO_S)
        async with start(network, 2, veteran.host) as newcomer:
            found = await borrowed(newcomer, 5)
            assert {group.example.key for group in found} == {group.example.key for group in groups}
            assert all(as_learnt(group) in found for group in groups)
            assert newcomer.exchange.stats().accepted == 0, "nothing of it came by gossip"
            assert newcomer.library.borrowed.lenders == newcomer.library.borrowed.authors == 1


async def test_what_the_book_does_not_hold_is_not_lent(start, groups_of):
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(4)]
        await veteran.exchange.publish(groups)
        veteran.library.settle({(groups[0].author, groups[0].example.key)})
        async with start(network, 2, veteran.host) as newcomer:
            (found,) = await borrowed(newcomer, 1)
            assert found.example.key == groups[0].example.key
            await asyncio.sleep(0.1)
            assert newcomer.library.draw(9) == []
