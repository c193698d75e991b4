"""Lenders that lie, for newcomer.py: what they serve from their libraries is of no use, or worse.

tasks -> [Liar] -> /swarmnode/library/1, bodies by hash -> the newcomer's borrower.py

- `wrong`: hundreds of groups of many made-up authors, whose wrong answers are claimed to be right.
- `damaged`: pages of good headers, and bodies that are not theirs.
- `silent`: pages that promise much, and not one body.
"""

import asyncio
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack

import msgspec
from sapo_node import Clock, node_key

from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, HASH_BYTES, MAX_REQUEST_BYTES
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.library_pages import (
    LIBRARY_PROTOCOL,
    MAX_PAGE_HEADERS,
    MAX_PAGE_REQUEST_BYTES,
    LibraryPage,
    PageRequest,
    PageRow,
)
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.task import Task
from swarmnode.types import Completion, Example, RolloutGroup

LIARS = ("wrong", "damaged", "silent")

GROUPS_PER_TASK = 128

AUTHORS = 16


class Liar:
    """One of them. `async with Liar(...)`."""

    def __init__(
        self, kind: str, network: MemoryNetwork, tasks: Mapping[str, Task], clock: Clock, *, seed: int
    ) -> None:
        self.kind = kind
        self._rng = random.Random(f"{kind}{seed}")
        self.host = network.host(node_key(f"liar {kind} {seed}").peer_id)
        self._keys = [node_key(f"liar {kind} {seed} {number}") for number in range(AUTHORS)]
        count = GROUPS_PER_TASK * len(tasks)
        examples = draw_round(list(tasks.values()), self._rng.randrange(2**31), 1, count)
        rows = [self._composed(example, clock) for example in examples]
        rows.sort(key=lambda row: row.header.body_hash)
        self._rows = rows
        self._bodies = {row.header.body_hash: row.body for row in rows}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Liar":
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.host)
            await self.host.serve(LIBRARY_PROTOCOL, self._page, max_request_bytes=MAX_PAGE_REQUEST_BYTES)
            await self.host.serve(BODY_PROTOCOL, self._body, max_request_bytes=MAX_REQUEST_BYTES)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _page(self, peer: str, request: bytes) -> bytes:
        wanted = msgspec.msgpack.decode(request, type=PageRequest)
        found = [row for row in self._rows if row.header.task == wanted.task]
        found = [row for row in found if row.header.body_hash > wanted.after]
        rows = tuple(PageRow(row.sealed) for row in found[:MAX_PAGE_HEADERS])
        return msgspec.msgpack.encode(LibraryPage(rows, len(found) > len(rows)))

    async def _body(self, peer: str, request: bytes) -> bytes:
        if self.kind == "silent":
            await asyncio.sleep(3600)
        if self.kind == "damaged":
            return self._rng.randbytes(200)
        return self._bodies.get(request[:HASH_BYTES], b"")

    def _composed(self, example: Example, clock: Clock) -> SignedGroup:
        """A group whose wrong answers are claimed to be right, and the other way round."""
        key = self._rng.choice(self._keys)
        right = str(example.columns["answer"])
        texts = [right if place == 0 else self._wrong(right) for place in range(8)]
        completions = tuple(Completion(text, (), None, (), "stop") for text in texts)
        scores = tuple({"correct": float(text != right)} for text in texts)
        group = RolloutGroup(example, completions, scores, key.peer_id, 1)
        return compose(group, key, swarm="commons", model=ModelLabel("qwen3", 100_000), now=clock())

    def _wrong(self, right: str) -> str:
        while (wrong := "".join(self._rng.choices(right, k=len(right))) + "0") == right:
            pass
        return wrong
