"""Nodes that have a library, what they learn, and what they borrow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarmnode.exchange.library.shelf import Shelf
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.types import RolloutGroup
from tests.unit.exchange.conftest import Node, StartNode


@pytest.fixture
def start(start_node: StartNode) -> StartNode:
    """Start node `number` on a network, connected to the hosts given, with an empty book."""

    @asynccontextmanager
    async def run(
        network: MemoryNetwork, number: int, *others: MemoryHost, **settings: Any
    ) -> AsyncIterator[Node]:
        settings = {"patience_s": 0.1, "shelf": Shelf(), **settings}
        async with start_node(network, number, *others, **settings) as node:
            node.library.note_book(())
            yield node

    return run


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
    node.library.note_book({(group.author, group.example.key) for group in groups})
