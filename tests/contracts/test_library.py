"""The library over every kind of host: what one node's book holds, another has later."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.library_pages import MAX_BODY_BESIDE
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import SignedGroup, signed_group
from swarmnode.extensions.library_files.library_files import copy_verified
from swarmnode.identity.key_file import load
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.streams import StreamHost
from swarmnode.tasks.task import Task
from tests.contracts.hosts import HostFactory, connected
from tests.unit.exchange.conftest import Addition, encode, make_group, prompt_ids

GROUPS = 5
AUTHOR = NodeKey(b"\5" * 32)
"""Somebody who is not there any more."""


def signed(number: int, *, words: int = 0) -> SignedGroup:
    """A group of the author. `words`: of noise in its wrong answers, so that its body is large."""
    group = make_group(AUTHOR.peer_id, number=number, wrong=2)
    if words:
        rng, (*others, last) = random.Random(number), group.completions
        noise = " ".join(str(rng.random()) for _ in range(words))
        group = replace(group, completions=(*others, replace(last, said=noise)))
    sent = compose(group, AUTHOR, swarm="commons", model=ModelLabel("tiny", 1), now=1_600_000_000.0)
    return signed_group(sent.sealed, sent.body)


def exchange_on(host: StreamHost, key: NodeKey, shelf: Shelf, tasks: Mapping[str, Task]) -> Exchange:
    return Exchange(
        host,
        key,
        tasks,
        encode=encode,
        prompt_ids=prompt_ids,
        settings=ExchangeSettings(),
        model_family="tiny",
        model_size=1,
        shelf=shelf,
    )


@pytest.mark.parametrize("words", [0, 180])
async def test_a_newcomer_has_what_an_absent_author_once_found(
    new_host: HostFactory, tmp_path: Path, words: int
) -> None:
    groups = [signed(number, words=words) for number in range(GROUPS)]
    assert all((len(group.body) > MAX_BODY_BESIDE) == bool(words) for group in groups)
    kept, task = Shelf(), Addition()
    for group in groups:
        kept.offer(group)
    async with connected(new_host) as (alice, bob), asyncio.timeout(60):
        lender = exchange_on(alice, key_of(alice, tmp_path), kept, {task.name: task})
        taken = Shelf(tmp_path / "library.jsonl")
        newcomer = exchange_on(bob, key_of(bob, tmp_path), taken, {task.name: task})
        async with lender, newcomer:
            assert lender.library is not None and newcomer.library is not None
            lender.library.note_book({group.origin for group in groups})
            newcomer.library.note_book(())
            found = []
            while len(found) < GROUPS:
                found += newcomer.library.draw(GROUPS)
                await asyncio.sleep(0.01)
            assert {group.example.key for group in found} == {group.header.key for group in groups}
            newcomer.library.note_book({(group.author, group.example.key) for group in found})
    # Whoever has the file can verify it without any of them.
    assert copy_verified(tmp_path / "library.jsonl", tmp_path / "copy.jsonl").rows == GROUPS


def key_of(host: StreamHost, folder: Path) -> NodeKey:
    """The key that the host was made with."""
    keys = [load(path) for path in folder.rglob("*.key")]
    return next(key for key in keys if key.peer_id == host.peer_id)
