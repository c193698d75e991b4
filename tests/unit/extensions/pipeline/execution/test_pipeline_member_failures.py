"""Members that die, freeze, wake up late, lie or are full: the iteration ends, and nothing counts twice."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.execution.member_records import IterationReport
from swarmnode.extensions.pipeline.execution.relay import AgentSlots
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.execution.step_barrier import counted_elsewhere
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs
from swarmnode.extensions.pipeline.replication.gradient_exchange import Combined
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.simulator import Kind
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.wire.hop_messages import Finished
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from tests.unit.extensions.pipeline.members import (
    PATIENT,
    QUICK,
    Crew,
    ListFeed,
    OfOne,
    Together,
    crew,
    instance_of,
    key_of,
    stage_worker,
)
from tests.unit.extensions.pipeline.tiny_models import SETTINGS, batches, saved, tiny_config, tiny_model

T = TypeVar("T")

PACKS = try_cut(tiny_config())
ENDS = [2, 4, 6]
REPLICAS = Plan(instance_of([[0], [1, 2], [3]], path_length=3, memory=(4,) * 4), ((0, 1, 3), (0, 2, 3)))
"""Node 1 and node 2 hold the same stage, and each has room for the other's micro-batches."""
FULL = replace(REPLICAS, instance=instance_of([[0], [1, 2], [3]], path_length=3, memory=(2, 1, 1, 2)))
"""The same, but they have not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("model"))


def workers(folder: Path) -> Callable[[int], StageWorker]:
    return lambda stage: stage_worker(folder, ENDS, stage, PACKS, SETTINGS, slots=4)


class WithEvent(ListFeed):
    """Something happens when an agent takes a certain wave."""

    def __init__(self, event: Callable[[], None], *, agent: int = 0, wave: int = 1) -> None:
        super().__init__(batches(True), 2)
        self._event = event
        self._when = (agent, wave)

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        if (agent, wave) == self._when:
            self._event()
        return super().take(agent, wave, path)


class Notes:
    """What the members of each stage brought into the step: to be compared with what came back."""

    def __init__(self, found: Crew) -> None:
        self.visits: dict[tuple[int, int], dict[str, int]] = {}
        original = found.together.gather

        async def gather(kept: dict[str, Any], replicas: Any) -> dict[str, Any]:
            together = await original(kept, replicas)
            for key, sums in found.together._sums.items():
                if sums is kept:
                    self.visits[key] = {peer: one.visits for peer, one in sums.items()}
            return together

        found.together.gather = gather  # pyright: ignore[reportAttributeAccessIssue]


def nothing_is_lost(report: IterationReport) -> None:
    assert report.micro_batches == 4
    assert report.given_up == 0
    assert report.stepped


async def all_step(found: Crew, nodes: list[int], steps: int) -> None:
    for node in nodes:
        await found.nodes[node].member.wait_step(steps)


def same_weights(found: Crew, one: int, other: int) -> bool:
    ours, theirs = (found.nodes[n].worker.model.trainable() for n in (one, other))
    return all(torch.equal(p, theirs[name]) for name, p in ours.items())


async def test_a_member_that_dies_in_the_middle_costs_a_repaired_path(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        notes = Notes(found)
        feed = WithEvent(lambda: found.kill(1))
        report = await found.nodes[0].member.train(feed)
        await all_step(found, [2, 3], 1)
        assert notes.visits[1, 0][found.peers[2]] == 3
        nothing_is_lost(report)
        assert report.lost == {1}
        assert report.retried == 1
        assert (0, "1") in {(by, node) for by, node, _ in found.lost}
        # The next iteration knows, and does not try again.
        later = await found.nodes[0].member.train(ListFeed(batches(True), 2))
        nothing_is_lost(later)
        assert later.retried == 0
        await all_step(found, [2, 3], 2)


async def test_a_stage_is_left_out_where_no_replica_has_room(folder: Path) -> None:
    async with crew(FULL, workers(folder), settings=QUICK) as found:
        notes = Notes(found)
        report = await found.nodes[0].member.train(WithEvent(lambda: found.kill(1)))
        await all_step(found, [2, 3], 1)
        nothing_is_lost(report)
        assert notes.visits[2, 0][found.peers[3]] > sum(notes.visits[1, 0].values())


async def test_who_finds_all_slots_reserved_waits_for_those_that_have_them_to_pass(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Plan(instance_of([[0, 3], [1], [2]], path_length=2, memory=(2, 1, 1, 2)), ((0, 1), (3, 2)))
    async with crew(ends, workers(folder), settings=QUICK) as found:
        with caplog.at_level("INFO", "swarmnode.extensions.pipeline.execution.iteration_driver"):
            feed = WithEvent(lambda: found.kill(1))
            guest = asyncio.ensure_future(found.nodes[0].member.train(feed))
            async with asyncio.timeout(20):
                while "cannot pass node 2: full" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        planned = await found.nodes[3].member.train(ListFeed(batches(True), 2))
        report = await guest
        assert (report.given_up, planned.given_up) == (0, 0)
        assert (report.micro_batches, planned.micro_batches) == (2, 2)
        assert report.stepped and planned.stepped


async def test_slots_of_a_dead_data_node_are_for_those_that_live(folder: Path) -> None:
    ends = Plan(instance_of([[0, 3], [1], [2]], path_length=2, memory=(2, 1, 1, 2)), ((0, 1), (3, 2)))
    async with crew(ends, workers(folder), settings=QUICK) as found:

        def die() -> None:
            for node in (1, 3):
                found.kill(node)
                found.nodes[2].member.lose(found.peers[node], "is no member any more")

        report = await found.nodes[0].member.train(WithEvent(die))
        assert (report.given_up, report.micro_batches) == (0, 2)
        assert report.stepped


async def test_a_member_that_freezes_is_replaced_and_does_not_step_alone_when_it_wakes(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        before = {n: p.clone() for n, p in found.nodes[1].worker.model.trainable().items()}
        report = await found.nodes[0].member.train(WithEvent(lambda: found.freeze(1)))
        await all_step(found, [2, 3], 1)
        nothing_is_lost(report)
        assert report.lost == {1}
        assert report.retried <= 2
        with pytest.raises(ModelError, match="missed the end"):
            await found.nodes[1].member.wait_step(1)
        assert found.nodes[1].member.lost_track
        assert found.network is not None
        found.network.heal()
        after = found.nodes[1].worker.model.trainable()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        # With the others' weights and a new assignment it is one of them again.
        found.together.gone.clear()
        state = dict(found.nodes[2].worker.model.trainable())
        found.nodes[1].worker.load_state(state)
        found.assign(iteration=1)
        nothing_is_lost(await found.nodes[0].member.train(ListFeed(batches(True), 2)))
        await all_step(found, [1, 2, 3], 2)
        assert same_weights(found, 1, 2)


class HeldUp:
    """An exchange of a member alone in its stage that takes as long as we say."""

    def __init__(self, inner: OfOne) -> None:
        self._inner = inner
        self.compare = inner.compare
        self.done = asyncio.Event()

    async def combine(self, *given: Any) -> Combined:
        await self.done.wait()
        return await self._inner.combine(*given)


async def test_who_is_iterations_behind_finds_that_it_has_lost_track(folder: Path) -> None:
    """No micro-batch of the one that runs here is to come, only the word that later ones are over."""
    plan = Plan(instance_of([[0], [1], [2]], path_length=2), ((0, 1),))
    impatient = replace(QUICK, hop_timeout_s=0.1, grace_s=0.1, close_timeout_s=0.2)
    exchange = HeldUp(Together().at(key_of(2).peer_id))
    async with crew(
        plan, workers(folder), settings=impatient,
        of_member=lambda node, peers: {"gradient_exchange": exchange} if node == 2 else {},
    ) as found:  # fmt: skip
        for _ in range(4):
            await found.nodes[0].member.train(ListFeed(batches(True), 2))
        exchange.done.set()
        late = found.nodes[2].member
        await late.wait_step(2)
        told = Finished(plan=digest(plan), iteration=4, node=0, back=())
        assert await found.nodes[0].member.transport.send(found.peers[2], told, timeout_s=1.0) is not None
        async with asyncio.timeout(5):
            with pytest.raises(ModelError, match="missed the end"):
                await late.wait_step(3)
        assert late.lost_track


async def test_who_wakes_up_before_the_end_does_not_count_what_a_replica_has_counted(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=replace(QUICK, close_timeout_s=20.0)) as found:
        notes = Notes(found)
        data = found.nodes[0].member

        def wake(peer_id: str, why: str) -> None:
            """As soon as it is given up, so before its micro-batch has come back another way."""
            assert found.network is not None
            found.network.heal()
            found.together.gone.clear()

        data.on_lost = wake
        report = await data.train(WithEvent(lambda: found.freeze(1)))
        await all_step(found, [1, 2, 3], 1)
        nothing_is_lost(report)
        counted = notes.visits[1, 0]
        assert sum(counted.values()) <= 4
        assert counted[found.peers[2]] == 3
        assert same_weights(found, 1, 2)


class Slow(StageQueue):
    """A machine that takes everything and never comes to an end."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._slow = kind

    async def perform(self, kind: Kind, agent: int, work: Callable[[], T]) -> T:
        if kind == self._slow:
            async with self._turn:
                await asyncio.sleep(1000)
        return await super().perform(kind, agent, work)


@pytest.mark.parametrize("kind", ["forward", "backward"])
async def test_who_takes_everything_and_does_nothing_is_found_and_replaced(folder: Path, kind: str) -> None:
    slow = {1: {"queue": Slow(kind)}}
    # On a busy machine the others may take seconds, too, and are not to be taken for slow.
    patient = replace(QUICK, grace_s=8.0)
    async with crew(
        REPLICAS, workers(folder), settings=patient, of_member=lambda node, peers: slow.get(node, {})
    ) as found:
        report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
        nothing_is_lost(report)
        assert report.lost == {1}
        assert report.retried == 1


async def test_what_a_dead_member_holds_is_not_waited_for_once_membership_knows(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=PATIENT) as found:

        def dies() -> None:
            found.freeze(1)
            asyncio.get_running_loop().call_later(0.3, found.nodes[0].member.lose, found.peers[1], "is gone")

        report = await found.nodes[0].member.train(WithEvent(dies))
        nothing_is_lost(report)
        assert report.makespan_s < PATIENT.hop_timeout_s / 2


async def test_a_dead_data_node_does_not_keep_the_others_from_their_step(folder: Path) -> None:
    plan = Plan(instance_of([[0, 1], [2]], path_length=2, memory=(4,) * 3), ((0, 2), (1, 2)))
    one_stage = lambda stage: stage_worker(folder, [2, 6], stage, PACKS, SETTINGS, slots=4)  # noqa: E731
    async with crew(plan, one_stage, settings=QUICK) as found:
        async with asyncio.TaskGroup() as tasks:
            alive = tasks.create_task(found.nodes[0].member.train(ListFeed(batches(True), 2)))
            dead = tasks.create_task(
                found.nodes[1].member.train(WithEvent(lambda: found.kill(1), agent=1, wave=1))
            )
            report = await alive
            dead.cancel()
        await all_step(found, [2], 1)
        assert (report.micro_batches, report.stepped) == (2, True)


async def test_a_data_node_alone_goes_on_alone(folder: Path) -> None:
    plan = Plan(instance_of([[0], [1]], path_length=2), ((0, 1),))
    one_stage = lambda stage: stage_worker(folder, [2, 6], stage, PACKS, SETTINGS, slots=4)  # noqa: E731
    async with crew(plan, one_stage, settings=QUICK) as found:
        report = await found.nodes[0].member.train(WithEvent(lambda: found.kill(1)))
        assert (report.micro_batches, report.lost) == (2, {1})


async def test_a_micro_batch_without_finite_numbers_is_given_up(folder: Path) -> None:
    class Broken(ListFeed):
        calls = 0

        @property
        def objective(self) -> Any:
            good = super().objective

            def loss(stage: Any, hidden_BTD: Any, inputs: LossInputs) -> Any:
                found = good(stage, hidden_BTD, inputs)
                self.calls += 1
                return replace(found, loss=found.loss * (float("nan") if self.calls == 1 else 1.0))

            return loss

    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        report = await found.nodes[0].member.train(Broken(batches(True), 2))
        assert (report.micro_batches, report.given_up, report.stepped) == (3, 1, True)
        assert report.lost == set()
        await all_step(found, [1, 2, 3], 1)


def test_what_came_back_another_way_is_astray() -> None:
    back = Finished(plan="ab" * 32, iteration=3, node=0, back=((0, 0), (2, 1)))
    assert counted_elsewhere({(0, 0), (0, 1), (1, 2), (2, 4)}, {0: back}, [0, 0, 5]) == {1}


async def test_who_has_counted_what_came_back_another_way_leaves_its_sum_out(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        notes = Notes(found)
        active = found.nodes[0].member._active
        assert active is not None
        honest = active.driver.finished

        def without_the_first(node: int) -> Finished:
            told = honest(node)
            return msgspec.structs.replace(told, back=told.back[1:]) if node == 1 else told

        active.driver.finished = without_the_first
        await found.nodes[0].member.train(ListFeed(batches(True), 2))
        await all_step(found, [1, 2, 3], 1)
        assert notes.visits[1, 0] == {found.peers[1]: 0, found.peers[2]: 2}
        assert same_weights(found, 1, 2)


def test_a_guest_gets_a_slot_that_is_free_or_none() -> None:
    slots = AgentSlots(2, planned=[5])
    slots.take(7)
    slots.take(7)
    assert [slots.may_have(agent) for agent in (5, 7, 8)] == [True, True, False]
    with pytest.raises(Rejected, match=Refusal.NO_SLOT):
        slots.take(8)
    assert (slots.give_back(7), slots.give_back(5)) == (True, False)
    slots.take(8)
    assert slots.taken == 2


def test_a_guest_gets_the_slot_of_an_agent_that_has_passed_but_not_in_the_next_iteration() -> None:
    slots = AgentSlots(2, planned=[5, 6])
    assert not slots.may_have(7)
    assert slots.give_back(5, passed=True)
    assert not slots.may_have(7, early=True), "then it is its agent's again"
    slots.take(7)
    assert not slots.may_have(5), "what comes by again on a repaired path finds it taken"
    assert slots.may_have(5, early=True) and slots.may_have(6)
    assert slots.give_back(7)
    slots.begin_iteration()
    assert slots.taken == 2 and not slots.may_have(7)
