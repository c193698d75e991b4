"""After a step the replicas of a stage have one state, whoever of them rounds, errs, lies or is silent."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.extensions.pipeline.execution import alignment as aligning
from swarmnode.extensions.pipeline.execution.member_records import IterationReport
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.stages.packed_state import unpack_state
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.states.holdings import HeldState
from tests.unit.extensions.pipeline.members import PATIENT, Crew, ListFeed, crew, instance_of, stage_worker
from tests.unit.extensions.pipeline.tiny_models import SETTINGS, batches, saved, tiny_config, tiny_model

PACKS = try_cut(tiny_config())
TWO = Plan(instance_of([[0], [1, 2]], path_length=2, memory=(4,) * 3), ((0, 1), (0, 2)))
THREE = Plan(instance_of([[0], [1, 2, 3]], path_length=2, memory=(4,) * 4), ((0, 1), (0, 2), (0, 3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("model"))


def workers(folder: Path) -> Callable[[int], StageWorker]:
    return lambda stage: stage_worker(folder, [2, 6], stage, PACKS, SETTINGS, slots=4)


def by_peer_id(found: Crew, nodes: list[int]) -> list[int]:
    return sorted(nodes, key=lambda node: found.peers[node])


def astray(found: Crew, node: int, by: float, *, times: int = 1) -> None:
    """After its next steps this member's weights are off by so many times the step."""
    worker, left = found.nodes[node].worker, [times]
    honest = worker.apply

    def apply(*arguments: Any, **named: Any) -> float | None:
        before = weights(found, node)
        norm = honest(*arguments, **named)
        if left[0]:
            left[0] -= 1
            with torch.no_grad():
                for name, parameter in worker.model.trainable().items():
                    parameter.add_(by * (parameter - before[name]).flip(0))
        return norm

    worker.apply = apply  # type: ignore[method-assign]


def weights(found: Crew, node: int) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in found.nodes[node].worker.model.trainable().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


async def iterate(found: Crew, steps: int) -> IterationReport:
    report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
    for node in found.nodes[1:]:
        await node.member.wait_step(steps)
    return report


def digest_of(found: Crew, node: int) -> str:
    """Of all that this member's stage has learnt, as it is now."""
    own = found.nodes[node]
    return own.worker.state(own.optimizer).holding.digest


def one_state(found: Crew, nodes: list[int]) -> bool:
    """What they have and offer is one."""
    digests = {digest_of(found, node) for node in nodes}
    steps = found.nodes[nodes[0]].member.iteration
    offered = {found.offered[found.peers[node]][steps].holding.digest for node in nodes}
    return digests == offered and len(digests) == 1


async def test_a_step_is_packed_once_and_all_is_named_by_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crew(TWO, workers(folder)) as found:
        packed: list[StageWorker] = []
        pack = StageWorker.state

        def counted(worker: StageWorker, *arguments: Any) -> HeldState:
            packed.append(worker)
            return pack(worker, *arguments)

        monkeypatch.setattr(StageWorker, "state", counted)
        await iterate(found, 1)
        assert [packed.count(node.worker) for node in found.nodes] == [1, 1, 1]
        monkeypatch.undo()
        assert one_state(found, [1, 2])
        assert not found.nodes[1].member.lost_track


async def test_what_a_member_says_that_it_has_is_what_it_has_after_it_took_over_others_weights(
    folder: Path,
) -> None:
    async with crew(THREE, workers(folder)) as found:
        astray(found, 2, 0.5)
        await iterate(found, 1)
        await iterate(found, 2)
        assert one_state(found, [1, 2, 3])


async def test_two_that_differ_by_rounding_take_the_weights_of_the_smaller_peer_id(folder: Path) -> None:
    async with crew(TWO, workers(folder)) as found:
        first, second = by_peer_id(found, [1, 2])
        start = weights(found, 1)
        astray(found, first, 1e-5, times=2)
        astray(found, second, -1e-5, times=2)
        report = await iterate(found, 1)
        assert report.stepped and one_state(found, [1, 2])
        assert not equal(weights(found, 1), start)
        assert found.offered[found.peers[second]][1].holding.digest == digest_of(found, first)
        await iterate(found, 2)
        assert one_state(found, [1, 2])


@pytest.mark.parametrize("wrong", [0, 1])
async def test_two_that_differ_go_back_to_what_both_had_and_learn_on_from_there(
    folder: Path, wrong: int
) -> None:
    async with crew(TWO, workers(folder)) as found:
        await iterate(found, 1)
        agreed, moved = weights(found, 1), weights(found, 0)
        astray(found, by_peer_id(found, [1, 2])[wrong], 0.5)
        await iterate(found, 2)
        assert one_state(found, [1, 2])
        assert equal(weights(found, 1), agreed)
        assert not equal(weights(found, 0), moved), "other stages have taken their step"
        assert [node.worker.version for node in found.nodes] == [2, 2, 2]
        await iterate(found, 3)
        assert one_state(found, [1, 2])
        assert not equal(weights(found, 1), agreed)


async def test_an_undone_step_is_reported_as_none(folder: Path) -> None:
    replicas = Plan(instance_of([[0, 1]], path_length=1, memory=(4,) * 2), ((0,), (1,)))
    async with crew(replicas, lambda stage: stage_worker(folder, [6], stage, PACKS, SETTINGS)) as found:
        astray(found, 1, 0.5)
        training = (node.member.train(ListFeed(batches(True), 2)) for node in found.nodes)
        reports = await asyncio.gather(*training)
        assert [report.stepped for report in reports] == [False] * 2
        assert one_state(found, [0, 1])


# Liars


def liar(found: Crew, node: int, state: HeldState | None) -> None:
    """It says what it says and hands out this; None: nothing."""
    offered = found.offered[found.peers[node]]

    class Given(dict[int, HeldState]):
        def __contains__(self, steps: object) -> bool:
            return state is not None

        def __getitem__(self, steps: int) -> HeldState:
            assert state is not None
            return state

    found.offered[found.peers[node]] = Given(offered)


def poison(found: Crew, node: int) -> HeldState:
    worker = found.nodes[node].worker
    tensors = unpack_state(worker.state(found.nodes[node].optimizer).data)
    return HeldState.of(worker.model.part, 1, {name: tensor + 1 for name, tensor in tensors.items()})


@pytest.mark.parametrize("gives", ["nothing", "other bytes", "what it told"])
@pytest.mark.parametrize("smaller", [True, False])
async def test_a_liar_without_a_majority_gets_nobody_to_take_what_it_made_up(
    folder: Path, gives: str, smaller: bool
) -> None:
    async with crew(TWO, workers(folder)) as found:
        order = by_peer_id(found, [1, 2])
        bad, honest = order if smaller else order[::-1]
        start = weights(found, honest)
        astray(found, bad, 50.0, times=9)
        if gives != "what it told":
            liar(found, bad, poison(found, bad) if gives == "other bytes" else None)
        for steps in (1, 2):
            await iterate(found, steps)
            assert equal(weights(found, honest), start)
            assert not found.nodes[honest].member.lost_track


async def test_replicas_that_were_apart_before_keep_what_they_have(folder: Path) -> None:
    async with crew(TWO, workers(folder)) as found:
        with torch.no_grad():
            for parameter in found.nodes[2].worker.model.trainable().values():
                parameter.add_(1.0)
        found.assign()
        start = weights(found, 1)
        await iterate(found, 1)
        assert not equal(weights(found, 1), start), "it has learnt"
        assert not equal(weights(found, 1), weights(found, 2))
        assert not found.nodes[1].member.lost_track


async def test_a_minority_does_not_take_what_its_majority_did_not_vote_for(folder: Path) -> None:
    async with crew(THREE, workers(folder)) as found:
        astray(found, 3, 0.5)
        for node in (1, 2):
            liar(found, node, poison(found, node))
        start = weights(found, 3)
        await found.nodes[0].member.train(ListFeed(batches(True), 2))
        active = found.nodes[3].member._active
        assert active is not None
        await active.ended
        assert found.nodes[3].member.lost_track
        moved = [(tensor - start[name]).abs().max().item() for name, tensor in weights(found, 3).items()]
        assert max(moved) < 0.9, "nothing of the poison"


async def test_a_large_state_has_its_moments_packed_seldom_and_where_replicas_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligning, "SMALL_STATE_BYTES", 0)
    monkeypatch.setattr(aligning, "RARE_STEPS", 2)
    async with crew(TWO, workers(folder), settings=PATIENT) as found:
        peer = found.peers[1]
        await iterate(found, 1)
        assert found.offered[peer].keys() == set()
        await iterate(found, 2)
        assert found.offered[peer].keys() == {2}
        second = weights(found, 1)
        astray(found, 2, 0.5)
        await iterate(found, 3)
        assert found.offered[peer].keys() == {2, 3}
        assert equal(weights(found, 1), second) and equal(weights(found, 2), second)
        assert found.offered[peer][3] == found.offered[found.peers[2]][3]
