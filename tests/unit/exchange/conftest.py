"""A small task whose answers are easy to get right or wrong, answers to it, and nodes that exchange them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.exchange_stats import PeerFigures
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.messages import Announcement, Arrival
from swarmnode.exchange.peers.reputation import FULL_SCORE
from swarmnode.exchange.validation.body_check import BodyRules
from swarmnode.exchange.validation.header_check import check_header
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.task import draw_train, score_strictly
from swarmnode.types import Completion, Example, ExampleKey, FinishReason, RolloutGroup, one_span


@dataclass(frozen=True)
class Addition:
    """`12 + 7`, endlessly; the reward is 1 for the sum and 0 for anything else."""

    name: str = "addition"
    version: str = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        rng = random.Random(seed)
        index = 0
        while True:
            a, b = rng.randrange(1000), rng.randrange(1000)
            key = ExampleKey(self.name, self.version, seed, index)
            yield Example(key, f"{a} + {b} =", {"answer": str(a + b)})
            index += 1

    def score(self, example: Example, completions: Sequence[str]) -> list[dict[str, float | None]]:
        return [{"correct": float(text.strip() == example.columns["answer"])} for text in completions]


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def encode(text: str, finish: FinishReason) -> tuple[int, ...]:
    """One token per byte, and 256 for the end."""
    return tuple(text.encode()) + ((256,) if finish == "stop" else ())


def prompt_ids(text: str) -> tuple[int, ...]:
    """One token per byte."""
    return tuple(text.encode())


def answer(text: str, version: int) -> Completion:
    ids = encode(text, "stop")
    return Completion(text, ids, None, one_span(version, len(ids)), "stop")


def make_group(
    author: str,
    *,
    seed: int = 1,
    number: int = 0,
    right: int = 2,
    wrong: int = 2,
    version: int = 3,
    task: Addition = Addition(),
) -> RolloutGroup:
    """The `number`-th training example of a seed, answered rightly and wrongly so many times."""
    example = next(islice(draw_train(task, seed), number, None))
    texts = [example.columns["answer"]] * right + [f"no idea {i}" for i in range(wrong)]
    return RolloutGroup(
        example=example,
        completions=tuple(answer(text, version) for text in texts),
        scores=score_strictly(task, example, texts),
        author=author,
        policy_version=version,
    )


def without_ends(group: RolloutGroup) -> RolloutGroup:
    """A group as others train on it: where an answer ended is its author's claim."""

    def of(completion: Completion) -> Completion:
        ids = completion.token_ids[:-1]
        return replace(
            completion, token_ids=ids, spans=one_span(group.policy_version, len(ids)), finish="length"
        )

    return replace(group, completions=tuple(map(of, group.completions)))


TOPIC = "/swarmnode/4/test/rollouts/0"


@dataclass(frozen=True)
class Node:
    """An exchange that runs on a network in memory."""

    key: NodeKey
    host: MemoryHost
    exchange: Exchange

    @property
    def library(self) -> Borrower:
        assert self.exchange.library is not None
        return self.exchange.library

    def dropped(self, reason: str) -> int:
        return self.exchange.stats().dropped.get(reason, 0)

    def accepted(self, other: "Node | NodeKey") -> int:
        key = other if isinstance(other, NodeKey) else other.key
        return self.figures_of(key.peer_id).accepted

    def figures_of(self, peer: str) -> PeerFigures:
        unknown = PeerFigures(peer, 0, 0, FULL_SCORE, False, "newcomer")
        return next((one for one in self.exchange.stats().peers if one.peer == peer), unknown)

    def hear(self, key: NodeKey, sealed: bytes) -> None:
        """As gossip brings it: signed by its author, whoever passed it on."""
        self.host.deliver(Message(TOPIC, key.peer_id, sealed))


StartNode = Callable[..., AbstractAsyncContextManager[Node]]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


@pytest.fixture
def start_node(task: Addition, clock: Clock) -> StartNode:
    """Start node `number` on a network, connected to the hosts given."""

    @asynccontextmanager
    async def run(
        network: MemoryNetwork,
        number: int,
        *others: MemoryHost,
        dialable: bool = True,
        record: Path | None = None,
        shelf: Shelf | None = None,
        **settings: Any,
    ) -> AsyncIterator[Node]:
        key = NodeKey(bytes([number]) * 32)
        async with network.host(key.peer_id, dialable=dialable) as host:
            for other in others:
                await host.connect(other.address)
            exchange = Exchange(
                host,
                key,
                {task.name: task},
                encode=encode,
                prompt_ids=prompt_ids,
                settings=ExchangeSettings(**{"swarm": "test", **settings}),
                model_family="tiny",
                model_size=1000,
                clock=clock,
                rng=random.Random(number),
                record=record,
                shelf=shelf,
            )
            async with exchange:
                yield Node(key, host, exchange)

    return run


@pytest.fixture
def composed_by(clock: Clock) -> Callable[..., SignedGroup]:
    """The `number`-th group of an author, ready to be announced."""

    def make(key: NodeKey, number: int = 0, swarm: str = "commons") -> SignedGroup:
        group = make_group(key.peer_id, number=number)
        return compose(group, key, swarm=swarm, model=ModelLabel("tiny", None), now=clock())

    return make


@pytest.fixture
def task() -> Addition:
    return Addition()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def key() -> NodeKey:
    return NodeKey(b"\1" * 32)


@pytest.fixture
def other_key() -> NodeKey:
    return NodeKey(b"\2" * 32)


@pytest.fixture
def settings() -> ExchangeSettings:
    return ExchangeSettings(swarm="test")


@pytest.fixture
def rules(task: Addition) -> BodyRules:
    return BodyRules({task.name: task}, encode, prompt_ids, max_prompt_tokens=32, max_tokens=64)


@pytest.fixture
def group(key: NodeKey) -> RolloutGroup:
    return make_group(key.peer_id)


@pytest.fixture
def composed(group: RolloutGroup, key: NodeKey, clock: Clock) -> SignedGroup:
    return compose(group, key, swarm="test", model=ModelLabel("tiny", 1000), now=clock())


@pytest.fixture
def announced(task: Addition, settings: ExchangeSettings) -> Callable[..., Announcement]:
    """The announcement that a receiver makes of `number`-th group of an author."""

    def announce(
        key: NodeKey, number: int = 0, *, at: float = 1_700_000_000.0, policy_version: int = 0
    ) -> Announcement:
        sent = compose(
            make_group(key.peer_id, number=number), key, swarm="test", model=ModelLabel("tiny", None), now=at
        )
        return check_header(
            sent.sealed, Arrival(at, policy_version), settings=settings, tasks={task.name: task}
        )

    return announce


@pytest.fixture
def groups_of() -> Callable[..., RolloutGroup]:
    return make_group


@pytest.fixture
def encoder() -> Callable[[str, FinishReason], tuple[int, ...]]:
    return encode


@pytest.fixture
def prompt_encoder() -> Callable[[str], tuple[int, ...]]:
    return prompt_ids


@pytest.fixture
def as_learnt() -> Callable[[RolloutGroup], RolloutGroup]:
    return without_ends
