import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from swarmnode.errors import IdentityError, TaskError
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.memory_network import MemoryHost
from swarmnode.node.learner import RoundRollouts
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.board import Occasion, StatusBoard, Watchers
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.settings.config_layers import load_config
from swarmnode.testing import FakeLearner, FakeTask, MemoryNetwork
from swarmnode.training.records import TrainReport, tally
from swarmnode.types import RolloutGroup


class Recorder:
    """A monitor that remembers."""

    def __init__(self) -> None:
        self.rounds: list[NodeStatus] = []
        self.phases: set[str] = set()

    def see(self, event: Occasion, status: NodeStatus) -> None:
        if event == "round":
            self.rounds.append(status)
        elif event == "tick":
            self.phases.add(status.phase.name)

    def close(self) -> None:
        pass


def encode(text: str, finish: str) -> tuple[int, ...]:
    return tuple(text.encode()) or (0,)


def prompt_ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def parts(
    network: MemoryNetwork,
    key: NodeKey,
    seeds: tuple[str, ...] = (),
    exchange: type[Exchange] = Exchange,
) -> NetworkParts:
    host = network.host(key.peer_id)
    exchanging = exchange(
        host,
        key,
        {"sum": FakeTask()},
        encode=encode,
        prompt_ids=prompt_ids,
        settings=ExchangeSettings(fetch_timeout_s=2.0),
        model_family="fake",
        model_size=1,
        rng=random.Random(0),
    )
    return NetworkParts(host, exchanging, Discovery(host, PeerBook(), seeds, "/swarmnode/1/commons"))


def node(
    learner: FakeLearner,
    *settings: str,
    network: NetworkParts | None = None,
    monitor: Recorder | None = None,
    overlap: bool = False,
) -> NodeLoop:
    base = ["exchange.local_groups=2", "exchange.external_groups=2", "node.checkpoint_every=2", *settings]
    config = load_config(environ={}, assignments=base).config
    return NodeLoop(
        config,
        learner,
        StatusBoard(config, peer_id=learner.author, name="calm-blue-otter", model="fake"),
        monitor or Recorder(),
        seed=0,
        network=network,
        overlap=overlap,
    )


async def run(one: NodeLoop) -> Summary:
    async with one:
        return await one.run()


async def test_a_node_alone_measures_learns_measures_and_saves() -> None:
    learner, monitor = FakeLearner("me"), Recorder()
    summary = await run(node(learner, "node.rounds=5", monitor=monitor))
    assert (summary.rounds, len(learner.trained), summary.stopped) == (5, 5, "5 rounds are done")
    assert summary.reward_first == pytest.approx(0.5)
    assert summary.reward_last is not None and summary.reward_last > 0.6
    assert [counters.round for _, counters in learner.disk] == [2, 4, 5]
    assert [status.progress.round for status in monitor.rounds] == [1, 2, 3, 4, 5]
    assert monitor.rounds[-1].reward.external is None, "nobody was heard, which is not a reward of zero"


class NeverRight(FakeLearner):
    """Its answers are wrong for so many rounds, or until it learns from others."""

    def __init__(self, rounds: int, author: str = "me", *, round_s: float = 0.0, can_be_helped: bool = False):
        super().__init__(author, round_s=round_s)
        self._wrong_rounds = rounds
        self._can_be_helped = can_be_helped

    def rollouts(self, number: int) -> RoundRollouts:
        found = super().rollouts(number)
        helped = self._can_be_helped and any(others for _, others in self.trained)
        if number > self._wrong_rounds or helped:
            return found
        wrong = [replace(group, scores=({"correct": 0.0},) * len(group.scores)) for group in found.groups]
        return replace(found, groups=tuple(wrong))


async def test_that_no_answer_is_ever_right_is_said_once_and_stays_in_the_summary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    summary = await run(node(NeverRight(25), "node.rounds=25"))
    said = [record.message for record in caplog.records if "was right" in record.message]
    assert len(said) == 1 and said[0].startswith("no answer to sum was right in 20 rounds (320 answers)")
    assert "in 25 rounds" in summary.advice and "help was asked" not in summary.advice


async def test_nothing_is_said_once_there_is_something_to_learn_from() -> None:
    summary = await run(node(NeverRight(21), "node.rounds=40"))
    assert summary.advice == ""


async def test_tokens_a_second_are_those_of_the_whole_round() -> None:
    """Under overlap the answers may be there before the round begins: the time they took is not its time."""

    class There(FakeLearner):
        def rollouts(self, number: int) -> RoundRollouts:
            return replace(super().rollouts(number), seconds=1e-9)

    monitor = Recorder()
    await run(node(There("me"), "node.rounds=3", monitor=monitor, overlap=True))
    counted = 0
    for status in monitor.rounds:
        tokens, counted = status.progress.tokens - counted, status.progress.tokens
        assert status.speed.round_s is not None
        assert status.speed.tokens_per_s == pytest.approx(tokens / status.speed.round_s)


async def test_without_peers_a_node_trains_on_as_many_groups_as_with_them() -> None:
    learner = FakeLearner("me", groups=8)
    await run(node(learner, "node.rounds=1", "exchange.rule=sapo"))
    own, external = learner.trained[0]
    assert (len(own), len(external)) == (4, 0)


async def test_with_a_book_a_node_learns_from_all_that_it_generated() -> None:
    learner = FakeLearner("me", groups=8)
    await run(node(learner, "node.rounds=1"))
    own, external = learner.trained[0]
    assert (len(own), len(external)) == (8, 0)


async def test_a_node_resumes_where_it_was_saved() -> None:
    first = FakeLearner("me")
    before = await run(node(first, "node.rounds=3"))
    second = FakeLearner("me", disk=first.disk)
    summary = await run(node(second, "node.rounds=5"))
    assert (summary.rounds, len(second.trained)) == (5, 2)
    assert summary.reward_first == pytest.approx(0.5), "the first measurement is kept over restarts"
    assert summary.tokens > before.tokens


async def test_a_finished_run_started_again_has_nothing_to_do() -> None:
    first = FakeLearner("me")
    before = await run(node(first, "node.rounds=3"))
    again = FakeLearner("me", disk=first.disk)
    after = await run(node(again, "node.rounds=3"))
    assert again.trained == []
    assert after.stopped.startswith("nothing to do: 3 of 3 rounds are done")
    assert replace(after, stopped=before.stopped) == before


async def test_a_full_disk_is_said_then_and_at_the_end_and_does_not_stop_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner, monitor = FakeLearner("me", full_disk=True), Recorder()
    one = node(learner, "node.rounds=5", monitor=monitor)
    summary = await run(one)
    assert summary.rounds == 5
    assert one.status.checkpoint.error == "the disk is full"
    assert one.status.checkpoint.round is None
    assert summary.not_saved == "rounds 1 to 5 could not be saved: the disk is full"
    assert f"{summary.not_saved}; free some space: the same command then resumes after round 0" in caplog.text


async def test_a_round_does_not_wait_for_the_disk_and_what_is_on_it_is_said_when_it_is() -> None:
    learner = FakeLearner("me", round_s=0.01)
    learner.disk_is_fast.clear()
    one = node(learner, "node.checkpoint_every=1")
    async with one:
        running = asyncio.ensure_future(one.run())
        await until(lambda: len(learner.trained) >= 6)
        assert learner.disk == [] and one.status.checkpoint.round is None
        learner.disk_is_fast.set()
        await until(lambda: one.status.checkpoint.round is not None)
        assert one.status.checkpoint.round in {counters.round for _, counters in learner.disk}
        one.request_stop()
        summary = await asyncio.wait_for(running, 10)
    assert learner.disk[-1][1].round == summary.saved_round == summary.rounds


async def test_an_orderly_stop_waits_for_the_disk() -> None:
    learner = FakeLearner("me")
    learner.disk_is_fast.clear()
    one = node(learner, "node.rounds=3", "node.checkpoint_every=1")
    async with one:
        running = asyncio.ensure_future(one.run())
        await until(lambda: "writing round" in one.status.phase.detail)
        assert not running.done() and learner.disk == []
        learner.disk_is_fast.set()
        summary = await asyncio.wait_for(running, 10)
    assert summary.saved_round == 3
    assert learner.disk[-1][1].round == 3, "the newest, whatever gave way to it"


async def test_an_error_in_a_round_waits_for_the_checkpoint_that_is_under_way() -> None:
    class Stumbling(FakeLearner):
        def rollouts(self, number: int) -> RoundRollouts:
            if number == 4:
                threading.Timer(0.05, self.disk_is_fast.set).start()
                raise TaskError("the reward failed")
            return super().rollouts(number)

    learner = Stumbling("me")
    learner.disk_is_fast.clear()
    one = node(learner, "node.checkpoint_every=3")
    with pytest.raises(BaseExceptionGroup):
        await run(one)
    assert one.status.checkpoint.round == learner.disk[-1][1].round == 3


async def test_what_a_full_disk_refused_is_tried_again_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    learner = FakeLearner("me", full_disk=True)

    class Freed(Recorder):
        """Somebody makes room after the last checkpoint was refused, just before the end."""

        def see(self, event: Occasion, status: NodeStatus) -> None:
            if event == "round":
                learner.full_disk = status.progress.round < 5

    one = node(learner, "node.rounds=5", "node.checkpoint_every=4", monitor=Freed())
    summary = await run(one)
    assert "the disk is full" in caplog.text and "the node continues" in caplog.text
    assert [counters.round for _, counters in learner.disk] == [5]
    assert (summary.saved_round, one.status.checkpoint.error, summary.not_saved) == (5, "", "")


async def test_a_stop_that_finds_no_room_tries_the_same_round_once_more() -> None:
    tries: list[int] = []

    class Counting(FakeLearner):
        def _write(self, snapshot: Any) -> str:
            tries.append(snapshot[1].round)
            self.full_disk = len(tries) == 1
            return super()._write(snapshot)

    learner = Counting("me", full_disk=True)
    summary = await run(node(learner, "node.rounds=1"))
    assert (tries, summary.saved_round) == ([1, 1], 1)


async def test_a_defect_in_saving_ends_the_node_and_is_not_taken_for_a_full_disk() -> None:
    class Broken(FakeLearner):
        def _write(self, snapshot: Any) -> str:
            raise RuntimeError("a defect")

    with pytest.raises(BaseExceptionGroup) as caught:
        await run(node(Broken("me")))
    assert caught.value.subgroup(RuntimeError) is not None


async def test_a_stop_interrupts_the_round_and_saves() -> None:
    learner = FakeLearner("me", round_s=0.2)
    one = node(learner)
    async with one:
        running = asyncio.ensure_future(one.run())
        await until(lambda: learner.trained)
        one.request_stop()
        summary = await asyncio.wait_for(running, 5)
    assert summary.stopped == "stopped on request"
    assert learner.disk[-1][1].round == summary.rounds == len(learner.trained)


class Diary(FakeLearner):
    """Writes down what began and what ended, in order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("me", **settings)
        self.events: list[str] = []
        self.generating = threading.Event()

    def rollouts(self, number: int) -> RoundRollouts:
        self.events.append(f"generate {number} with {self.generates_with}")
        self.generating.set()
        return super().rollouts(number)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        self.events.append("train")
        return super().train(own, external)


async def test_with_overlap_the_next_round_is_generated_while_this_one_is_trained_on() -> None:
    class Waiting(Diary):
        """Does not finish training before the next generation has begun."""

        def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
            if len(self.trained) < 2:
                assert self.generating.wait(10), "generation did not begin during training"
            self.generating.clear()
            return super().train(own, external)

        def rollouts(self, number: int) -> RoundRollouts:
            result = super().rollouts(number)
            if number == 1:
                self.generating.clear()
            return result

    learner = Waiting()
    summary = await run(node(learner, "node.rounds=3", overlap=True))
    assert (summary.rounds, len(learner.trained)) == (3, 3)
    generated = [event for event in learner.events if event.startswith("generate")]
    assert generated == ["generate 1 with 0", "generate 2 with 0", "generate 3 with 1"]


async def test_which_policy_generates_ahead_does_not_depend_on_how_fast_training_is() -> None:
    for round_s in (0.0, 0.02):
        learner = Diary(round_s=round_s)
        await run(node(learner, "node.rounds=5", overlap=True))
        generated = [event for event in learner.events if event.startswith("generate")]
        assert generated == [f"generate {n} with {max(0, n - 2)}" for n in range(1, 6)]


async def test_without_overlap_every_round_is_generated_with_the_newest_policy() -> None:
    learner = Diary()
    await run(node(learner, "node.rounds=2"))
    assert learner.events == ["generate 1 with 0", "train", "generate 2 with 1", "train"]


async def test_a_generation_that_fails_beside_training_does_not_cost_what_was_learnt() -> None:
    class Stumbling(Diary):
        def rollouts(self, number: int) -> RoundRollouts:
            if number == 4:
                raise TaskError("the reward failed")
            return super().rollouts(number)

    learner = Stumbling()
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(node(learner, "node.checkpoint_every=100", overlap=True))
    assert caught.value.subgroup(TaskError) is not None
    version, counters = learner.disk[-1]
    assert (version, counters.round) == (3, 3)


async def test_a_node_that_ends_lets_go_of_its_engine() -> None:
    learner = FakeLearner("me")
    await run(node(learner, "node.rounds=1"))
    assert learner.closed


@pytest.mark.parametrize("name", ["sapo", "book"])
async def test_three_nodes_learn_from_groups_of_both_others(name: str) -> None:
    rule = (f"exchange.rule={name}",)
    network = MemoryNetwork(seed=0)
    keys = [NodeKey.generate() for _ in range(3)]
    learners = [FakeLearner(key.peer_id, seed=i, round_s=0.02) for i, key in enumerate(keys)]
    members = [parts(network, key) for key in keys]
    summaries: list[Summary] = []
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(node(learner, "node.rounds=30", *rule, network=part))
            for learner, part in zip(learners, members, strict=True)
        ]
        await connect_all(members)
        summaries = await asyncio.gather(*(one.run() for one in nodes))
    for summary in summaries:
        others = {key.peer_id for key in keys} - {summary.peer}
        assert set(summary.external_groups_trained) == others
        assert all(count > 0 for count in summary.external_groups_trained.values())
    own, external = learners[0].trained[-1]
    assert len(own) + len(external) == 4 if name == "sapo" else len(own) == 4
    assert all(group.reward_std for group in external), "groups without a gradient are not trained on"


async def test_training_goes_on_while_the_network_is_down_and_shares_again_afterwards() -> None:
    network = MemoryNetwork(seed=0)
    keys = [NodeKey.generate() for _ in range(2)]
    members = [parts(network, key) for key in keys]
    learner, other = (FakeLearner(key.peer_id, seed=i, round_s=0.02) for i, key in enumerate(keys))
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(node(learner, network=members[0]))
        two = await stack.enter_async_context(node(other, network=members[1]))
        await connect_all(members)
        runs = asyncio.gather(one.run(), two.run())
        await until(lambda: any(external for _, external in learner.trained))

        host = members[0].host
        assert isinstance(host, MemoryHost)
        host.go_down("killed")
        rounds = len(learner.trained)
        await until(lambda: len(learner.trained) >= rounds + 5)
        await until(lambda: one.status.network.state == "restarting")
        host.come_back()
        await connect_all(members)
        shared = one.status.exchange.published
        await until(lambda: one.status.exchange.published > shared and one.status.network.state == "up")
        one.request_stop()
        two.request_stop()
        await asyncio.wait_for(runs, 10)


async def test_a_service_that_fails_is_started_again_and_the_node_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from swarmnode.node.workers import supervise

    calls: list[float] = []

    async def broken() -> None:
        if len(calls) < 3:
            raise RuntimeError("no")

    async def sleep(seconds: float) -> None:
        calls.append(seconds)

    await supervise("test", broken, sleep=sleep)
    assert calls == [0.5, 1.0, 2.0]
    assert "no" in caplog.text and "Traceback" in caplog.text


async def connect_all(members: list[NetworkParts]) -> None:
    for a in members:
        for b in members:
            if a is not b:
                await a.host.connect((await b.host.addresses())[0])


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - states of several nodes, no event of one
            await asyncio.sleep(0.02)


async def test_a_node_that_cannot_start_its_exchange_leaves_nothing_running() -> None:
    network = MemoryNetwork()
    member = parts(network, NodeKey.generate())
    strange = parts(network, NodeKey.generate())
    mixed = NetworkParts(member.host, strange.exchange, member.discovery)
    learner = FakeLearner("me")
    one = node(learner, network=mixed)
    strange.exchange._context.key = member.exchange._context.key  # an exchange whose key is not its host's
    with pytest.raises(IdentityError):
        await run(one)
    assert member.host.status().state == "closed"
    assert learner.rollouts(1).complete is False, "the worker was told to end"


async def test_a_monitor_whose_output_is_gone_is_dropped_and_training_goes_on() -> None:
    class ClosedPipe(Recorder):
        def see(self, event: Occasion, status: NodeStatus) -> None:
            raise BrokenPipeError("reader is gone")

    kept, learner = Recorder(), FakeLearner("me")
    config = load_config(environ={}, assignments=["node.rounds=3"]).config
    monitors = Watchers([ClosedPipe(), kept])
    board = StatusBoard(config, peer_id="me", name="n", model="m")
    one = NodeLoop(config, learner, board, monitors, seed=0, network=None)
    assert (await run(one)).rounds == 3
    assert len(kept.rounds) == 3


def test_authors_without_number_do_not_grow_the_counters_without_bound() -> None:
    counts: dict[str, int] = {}
    for number in range(1000):
        counts = tally(counts, [f"peer-{number}", "friend"])
    assert len(counts) == 257
    assert (counts["friend"], sum(counts.values())) == (1000, 2000)


async def test_an_error_in_a_round_keeps_what_the_rounds_before_it_learnt() -> None:
    class Stumbling(FakeLearner):
        def rollouts(self, number: int) -> RoundRollouts:
            if number == 4:
                raise TaskError("the reward failed")
            return super().rollouts(number)

    learner = Stumbling("me")
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(node(learner, "node.checkpoint_every=100"))
    assert caught.value.subgroup(TaskError) is not None
    assert learner.disk[-1][1].round == 3


async def test_only_peers_from_outside_this_process_are_waited_for() -> None:
    a, b, c = (NodeKey(bytes([number] * 32)).peer_id for number in range(3))
    config = load_config(environ={}).config
    board = StatusBoard(config, peer_id=a, name="otter", model="fake", neighbours=[b])
    network = MemoryNetwork()
    async with network.host(a) as host, network.host(b) as neighbour, network.host(c) as stranger:
        await host.connect((await neighbour.addresses())[0])
        await board.look_at(host)
        assert (board.status.network.peers, board.peers_outside) == (1, 0)
        await host.connect((await stranger.addresses())[0])
        await board.look_at(host)
        assert (board.status.network.peers, board.peers_outside) == (2, 1)
