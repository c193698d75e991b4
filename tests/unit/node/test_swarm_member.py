"""What a node takes from its swarm and asks of it, and when it takes and asks nothing."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.limits import MAX_WAIT_SHARE
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.testing import FakeLearner, MemoryNetwork
from swarmnode.training.records import TrainReport
from swarmnode.types import ExampleKey, RolloutGroup
from tests.unit.node.test_node import NeverRight, Recorder, node, parts, run


class Impatient(Exchange):
    """Remembers how long it was allowed to wait, and never does."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.deadlines_s: list[float] = []

    async def collect(self, j: int, policy_version: int, deadline_s: float) -> list[RolloutGroup]:
        self.deadlines_s.append(deadline_s)
        return []


class Asked(Impatient):
    """Is asked for help with one example after the other, as many as it takes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked_for: list[int] = []
        self.has_asked = False

    async def ask_for_help(self, groups: Sequence[RolloutGroup]) -> set[str]:
        self.has_asked = self.has_asked or bool(groups)
        return await super().ask_for_help(groups)

    def take_examples(self, count: int) -> list[ExampleKey]:
        self.asked_for.append(count)
        return [ExampleKey("sum", "1", 99, len(self.asked_for))]


async def test_a_round_waits_for_others_a_small_part_of_what_its_own_work_took() -> None:
    key = NodeKey(b"\1" * 32)
    learner, one = FakeLearner(key.peer_id), parts(MemoryNetwork(), key, exchange=Impatient)
    started = time.monotonic()
    await run(node(learner, "node.rounds=5", network=one))
    took_s = time.monotonic() - started
    assert isinstance(one.exchange, Impatient) and len(one.exchange.deadlines_s) == 5
    assert 0 < sum(one.exchange.deadlines_s) <= MAX_WAIT_SHARE * took_s


async def test_a_node_tries_what_others_could_not_answer_unless_it_is_set_not_to() -> None:
    key = NodeKey(b"\1" * 32)
    for settings, asked_for in ((("exchange.help=0.25",), [2, 2]), (("exchange.help=0",), []), ((), [1, 1])):
        learner, one = FakeLearner(key.peer_id), parts(MemoryNetwork(), key, exchange=Asked)
        await run(node(learner, "node.rounds=2", *settings, network=one))
        assert isinstance(one.exchange, Asked) and one.exchange.asked_for == asked_for
        assert [example.index for example in learner.to_answer] == list(range(1, len(asked_for) + 1))


async def test_who_takes_nothing_from_others_asks_nobody_for_help() -> None:
    for settings, asks in (((), True), (("exchange.help=0",), False), (("exchange.rule=own_book",), False)):
        key = NodeKey(b"\2" * 32)
        one = parts(MemoryNetwork(), key, exchange=Asked)
        await run(node(NeverRight(99, key.peer_id), "node.rounds=5", *settings, network=one))
        assert isinstance(one.exchange, Asked) and one.exchange.has_asked is asks


class Choosy(Impatient):
    """Remembers what it was told to prefer."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.needs: list[Mapping[str, float]] = []

    def prefer(self, needs: Mapping[str, float]) -> None:
        self.needs.append(needs)


class Counting(FakeLearner):
    """Reports a pass rate."""

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        report = super().train(own, external)
        return msgspec.structs.replace(report, pass_rates={"sum": 0.75})


async def test_what_the_node_fails_on_is_what_it_has_fetched() -> None:
    key = NodeKey.generate()
    network = parts(MemoryNetwork(seed=0), key, exchange=Choosy)
    assert isinstance(network.exchange, Choosy)
    one = node(Counting(key.peer_id), "node.rounds=2", network=network)
    await run(one)
    assert network.exchange.needs == [{"sum": 0.25}] * 2
    assert one.status.training.pass_rates == {"sum": 0.75}


async def test_under_the_own_book_a_node_publishes_and_takes_nothing() -> None:
    key = NodeKey.generate()
    network = parts(MemoryNetwork(seed=0), key, exchange=Impatient)
    assert isinstance(network.exchange, Impatient)
    await run(node(FakeLearner(key.peer_id), "exchange.rule=own_book", "node.rounds=2", network=network))
    assert network.exchange.deadlines_s == []
    assert network.exchange.stats().published == 8


async def test_after_a_restart_the_exchange_knows_how_far_the_policy_is() -> None:
    key = NodeKey.generate()
    first = FakeLearner(key.peer_id)
    await run(node(first, "node.rounds=3"))
    network = parts(MemoryNetwork(seed=0), key)
    await run(node(FakeLearner(key.peer_id, disk=first.disk), "node.rounds=3", network=network))
    assert network.exchange._context.policy_version == 3


async def test_a_node_that_is_never_right_asks_is_helped_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    network, knows, stuck = MemoryNetwork(), NodeKey(b"\1" * 32), NodeKey(b"\2" * 32)
    learner, seen = NeverRight(10**6, stuck.peer_id, round_s=0.01, can_be_helped=True), Recorder()
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        helper, late = parts(network, knows), parts(network, stuck)
        await stack.enter_async_context(helper.host)
        await stack.enter_async_context(helper.exchange)
        await helper.exchange.publish(FakeLearner(knows.peer_id).rollouts(1).groups)
        await stack.enter_async_context(late.host)
        assert isinstance(helper.host, MemoryHost)
        await late.host.connect(helper.host.address)
        loop = node(learner, network=NetworkParts(late.host, late.exchange, None), monitor=seen)
        await stack.enter_async_context(loop)
        running = asyncio.create_task(loop.run())
        while not (running.done() or "worked" in caplog.text):  # noqa: ASYNC110  a log has no event
            await asyncio.sleep(0.01)
        loop.request_stop()
        await running
        assert helper.exchange.stats().help.answered > 0
    told = [record.message for record in caplog.records if "help" in record.message]
    assert [line.split(" sum")[0] for line in told] == [
        "asked the swarm for help with",
        "help came for",
        "help with",
    ]
    assert "2 rounds (32 answers)" in told[0] and seen.rounds[-1].help.asked > 0
