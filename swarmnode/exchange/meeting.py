"""Where nodes meet: hard examples that several of them answer, agreed on without a word.

inbox -> [Claims, meeting_places] -> Node -> learner answers them, too -> training/wide_groups.py

Seeds differ, so nodes never draw the same example. But all of them hear the same announcements: who rarely
got an example right says so by its mean reward. Everybody draws some of these again, from its own copy of
the task, and all take the same ones, because the choice depends on the names of examples alone. So an example
that is answered rightly once in a hundred times is answered a hundred times, by the swarm.

A claim costs its author nothing, and names can be made up until they come first. So an author has one place
in a choice at most, only those we know have any, and what it can gain is that we answer one training example
of its choice now and then: what is learned from is judged here as always.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Mapping

from swarmnode.exchange.limits import MAX_POOL_HEADERS_PER_AUTHOR
from swarmnode.exchange.messages import Header
from swarmnode.types import ExampleKey

MAX_CLAIMANTS = 64
"""Authors whose announcements are remembered, about a megabyte of them. Only those we know are."""

HARD = 0.25
"""Claimed mean rewards up to here are hard, on the scale of what is claimed for the task."""


class Claims:
    """The newest headers of the authors heard of last, whatever became of them: most are fetched at once."""

    def __init__(self) -> None:
        self._by_author: OrderedDict[str, deque[Header]] = OrderedDict()

    @property
    def by_author(self) -> Mapping[str, Iterable[Header]]:
        return self._by_author

    def hear(self, author: str, header: Header) -> None:
        """Remember what an author announced."""
        headers = self._by_author.setdefault(author, deque(maxlen=MAX_POOL_HEADERS_PER_AUTHOR))
        headers.append(header)
        self._by_author.move_to_end(author)
        if len(self._by_author) > MAX_CLAIMANTS:
            self._by_author.popitem(last=False)


def meeting_places(
    headers: Mapping[str, Iterable[Header]], taken: Container[ExampleKey], count: int
) -> list[ExampleKey]:
    """Chooses at most `count` hard examples out of the headers of each author, one of an author, none of
    those that are `taken`."""
    scales = _scales(header for found in headers.values() for header in found)
    hard = sorted(
        (_rank(header.key), author, header.key)
        for author, found in headers.items()
        for header in found
        if header.key not in taken and is_hard(header, scales[header.task])
    )
    chosen: dict[str, ExampleKey] = {}
    for _, author, key in hard:
        if len(chosen) < count and key not in chosen.values():
            chosen.setdefault(author, key)
    return list(chosen.values())


def is_hard(header: Header, scale: tuple[float, float]) -> bool:
    """Whether its author was rarely right, where rewards of the task lie between these two."""
    lowest, highest = scale
    return header.reward_mean is not None and (header.reward_mean - lowest <= HARD * (highest - lowest))


def _scales(headers: Iterable[Header]) -> dict[str, tuple[float, float]]:
    """The rewards between which each task's groups are: 0 and 1, or further apart where claimed means are."""
    found: dict[str, tuple[float, float]] = {}
    for header in headers:
        low, high = found.get(header.task, (0.0, 1.0))
        mean = low if header.reward_mean is None else header.reward_mean
        found[header.task] = min(low, mean), max(high, mean)
    return found


def _rank(key: ExampleKey) -> bytes:
    """The same on every node, and in no order that a task or a seed prefers."""
    name = json.dumps([key.task, key.version, key.seed, key.index])
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
