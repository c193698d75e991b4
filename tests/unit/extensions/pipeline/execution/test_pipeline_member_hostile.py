"""Members that speak in others' names, ask for too much memory or are left out: the others go on."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.execution.hop_checks import check_hop
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt, StageInput
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import Finished, ForwardHop
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.signing import check_signature, signed
from tests.unit.extensions.pipeline.members import QUICK, ListFeed, crew, instance_of, key_of, stage_worker
from tests.unit.extensions.pipeline.tiny_models import SETTINGS, batches, saved, tiny_config, tiny_model

PACKS = try_cut(tiny_config())
REPLICAS = Plan(instance_of([[0], [1, 2], [3]], path_length=3, memory=(4,) * 4), ((0, 1, 3), (0, 2, 3)))
"""Node 1 and node 2 hold the same stage."""
TWO_FEEDS = Plan(instance_of([[0, 1], [2]], path_length=2, memory=(4,) * 3), ((0, 2), (1, 2)))
SENT = encode(torch.ones(1, 4, 32), "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("model"))


def workers(folder: Path, ends: tuple[int, ...] = (2, 4, 6)) -> Callable[[int], StageWorker]:
    return lambda stage: stage_worker(folder, ends, stage, PACKS, SETTINGS, slots=4)


def forward(agent: int, target: int, **fields: Any) -> ForwardHop:
    """From node 3 to `target`, on a path of node 0."""
    values: dict[str, Any] = {
        "attempt": 63, "wave": 1, "micro_batch": agent * 2 + 1, "path": (0, 3, target), "position": 2,
    } | fields  # fmt: skip
    return ForwardHop(
        plan=digest(REPLICAS),
        iteration=0,
        agent=agent,
        tensor=SENT.header,
        tokens=1,
        **values,
    )


# In the name of a data node


async def test_attempts_that_the_data_node_has_not_begun_block_nothing(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        evil = found.nodes[3].member.transport
        for target, agent in ((1, 0), (1, 1), (2, 0), (2, 1)):
            for message in (forward(agent, target), signed(forward(agent, target), key_of(3))):
                reply = await evil.send(found.peers[target], message, SENT.payload, timeout_s=2.0)
                assert reply is Refusal.BAD_SIGNATURE
        report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
    assert (report.micro_batches, report.retried) == (4, 0)


async def test_what_the_data_node_has_signed_passes(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        message = signed(forward(0, 1), key_of(0))
        reply = await found.nodes[3].member.transport.send(
            found.peers[1], message, SENT.payload, timeout_s=2.0
        )
        assert reply is None


def test_a_signature_is_for_one_attempt_on_one_path() -> None:
    message = signed(
        forward(0, 1, lengths=(2, 2), prompts=(None, 0)),
        key_of(0),
    )
    check_signature(message, key_of(0).peer_id)
    check_signature(msgspec.structs.replace(message, position=3), key_of(0).peer_id)
    changes: list[dict[str, Any]] = [
        {"plan": "ab" * 32}, {"iteration": 1}, {"micro_batch": 2}, {"attempt": 62}, {"path": (0, 2, 1)},
        {"tokens": 2}, {"lengths": (1, 3)}, {"prompts": ()}, {"signature": b""}, {"signature": bytes(64)},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(Rejected, match=Refusal.BAD_SIGNATURE):
            check_signature(msgspec.structs.replace(message, **change), key_of(0).peer_id)
    for other in (key_of(3).peer_id, "no peer id"):
        with pytest.raises(Rejected, match=Refusal.BAD_SIGNATURE):
            check_signature(message, other)


# About a neighbour


async def test_a_member_that_calls_its_neighbour_silent_gets_no_living_one_taken_for_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(instance_of([[0], [1], [2]], path_length=3, memory=(4,) * 3), ((0, 1, 2),))
    async with crew(plan, workers(folder), settings=QUICK) as found:
        relay = found.nodes[1].member._active.relay  # pyright: ignore
        onward = relay._onward  # pyright: ignore

        async def accuse(relayed: Any, values: torch.Tensor) -> None:
            if len(relayed.hop.path) == 2:
                await onward(relayed, values)
            else:
                await relay._tell(relayed.hop, 2, "silent")  # pyright: ignore

        monkeypatch.setattr(relay, "_onward", accuse)
        report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
        assert report.retried > 0 and report.lost == set()
        assert found.peers[2] not in found.nodes[0].member.lost


async def test_a_neighbour_out_of_reach_of_one_member_is_tried_by_it_once_an_iteration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(instance_of([[0], [1], [2, 3]], path_length=3, memory=(4,) * 4), ((0, 1, 2),))
    async with crew(plan, workers(folder), settings=QUICK) as found:
        relay = found.nodes[1].member._active.relay  # pyright: ignore
        onward = relay._onward  # pyright: ignore

        async def cut(relayed: Any, values: torch.Tensor) -> None:
            if relayed.hop.path[-1] == 2:
                await relay._tell(relayed.hop, 2, "silent")  # pyright: ignore
            else:
                await onward(relayed, values)

        monkeypatch.setattr(relay, "_onward", cut)
        report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
        assert (report.micro_batches, report.retried, report.lost) == (2, 1, set())


# The end of an iteration


async def test_a_data_node_that_has_not_begun_is_waited_for(folder: Path) -> None:
    impatient = replace(QUICK, hop_timeout_s=0.6, grace_s=0.2, close_timeout_s=0.2)
    async with crew(TWO_FEEDS, workers(folder, (2, 6)), settings=impatient) as found:
        limit_s = found.nodes[2].member._active.barrier.limit_s  # pyright: ignore
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(found.nodes[0].member.train(ListFeed(batches(True), 2)))
            await asyncio.sleep(1.2 * limit_s)  # Node 1 still makes its rollouts.
            assert [node.member.iteration for node in found.nodes] == [0, 0, 0]
            second = tasks.create_task(found.nodes[1].member.train(ListFeed(batches(True), 2)))
        await found.nodes[2].member.wait_step(1)
        assert not any(node.member.lost_track for node in found.nodes)
        assert not any("did not finish" in why for _, _, why in found.lost)
    # A busy machine may lose one of the two to the short time limits.
    assert min(first.result().micro_batches, second.result().micro_batches) >= 1


async def test_a_data_node_settles_its_own_micro_batches_only(folder: Path) -> None:
    """Node 1 says that those of node 0 came back: what is undecided of them does not count for that."""
    async with crew(TWO_FEEDS, workers(folder, (2, 6)), settings=QUICK) as found:
        member, worker = found.nodes[2].member, found.nodes[2].worker
        common: dict[str, Any] = {"plan": digest(TWO_FEEDS), "iteration": 0}

        def undecided() -> None:
            for agent in (0, 1):
                attempt = MicroBatchAttempt(agent, 0, 0)
                hidden_BTD = worker.forward(StageInput(attempt, torch.ones(1, 4, 32), 4))
                worker.backward(attempt, torch.ones_like(hidden_BTD))

        await member.in_stage_thread(undecided)
        back = ((0, 0), (2, 0), (2**53, 0))
        finished = {node: Finished(**common, node=node, back=back * (node == 1)) for node in (0, 1)}
        barrier = member._active.barrier  # pyright: ignore
        settled = await member.in_stage_thread(lambda: barrier._settle(finished))  # pyright: ignore
    assert (settled.visits, settled.tokens) == (1, 4)


# Memory


def test_prompts_that_are_repeated_too_often_are_too_large() -> None:
    lengths, prompts = (512, *[1] * 100), (None, *[0] * 100)
    header = encode(torch.ones(1, 612, 32), "none").header
    message = forward(0, 1, lengths=lengths, prompts=prompts)
    message = msgspec.structs.replace(message, tensor=header)
    keys = 612 + 512 * 100
    model: Any = SimpleNamespace(hidden_size=32, packs=True)
    check_hop(message, REPLICAS, model, max_tokens=-(-keys // 4))
    with pytest.raises(Rejected) as caught:
        check_hop(message, REPLICAS, model, max_tokens=keys // 4 - 1)
    assert caught.value.reason is Refusal.TOO_LARGE


@pytest.mark.parametrize("stage_pass", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ZeroDivisionError()])
async def test_a_pass_that_fails_costs_its_micro_batch(
    folder: Path, stage_pass: str, error: Exception
) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        worker = found.nodes[1].worker
        original, calls = getattr(worker, stage_pass), list[int]()

        def fails_first(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise error
            return original(*arguments)

        setattr(worker, stage_pass, fails_first)
        report = await found.nodes[0].member.train(ListFeed(batches(True), 2))
        for node in found.nodes:
            await node.member.wait_step(1)
    assert (report.micro_batches, report.retried, report.lost) == (4, 1, set())


def test_a_stage_without_memory_drops_the_micro_batch(folder: Path) -> None:
    worker = workers(folder)(1)
    attempt, hidden_BTD = MicroBatchAttempt(0, 0, 0), torch.ones(1, 4, 32)
    run = worker.model.forward

    def full(*arguments: Any) -> Any:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 9 bytes")

    worker.model.forward = full
    with pytest.raises(Rejected, match=Refusal.NO_MEMORY):
        worker.forward(StageInput(attempt, hidden_BTD, 4))
    worker.model.forward = run
    out_BTD = worker.forward(StageInput(attempt, hidden_BTD, 4))
    worker._gradients = full  # pyright: ignore
    with pytest.raises(Rejected, match=Refusal.NO_MEMORY):
        worker.backward(attempt, out_BTD)
    with pytest.raises(Rejected, match=Refusal.UNKNOWN_WORK):
        worker.backward(attempt, out_BTD)


# Who is left out


async def test_only_the_former_plan_is_remembered(folder: Path) -> None:
    plans = [replace(REPLICAS, instance=replace(REPLICAS.instance, waves=waves)) for waves in (1, 2, 3)]
    async with crew(plans[0], workers(folder), settings=QUICK) as found:
        member = found.nodes[1].member
        for plan in plans[1:]:
            found.plan = plan
            found.assign()
        assert set(member.transport._plans) == {digest(plan) for plan in plans[1:]}


async def test_a_member_without_a_stage_lets_go_of_it(folder: Path) -> None:
    async with crew(REPLICAS, workers(folder), settings=QUICK) as found:
        node = found.nodes[2]
        node.member.assign(
            Assignment(REPLICAS, digest(REPLICAS), found.peers, 2, 7), node.worker, node.optimizer
        )
        node.member.unassign()
        node.member.unassign()
        assert (node.member._active, node.member.iteration) == (None, 7)  # pyright: ignore
        with pytest.raises(Rejected, match=Refusal.UNKNOWN_WORK):
            node.member.admit(found.peers[3], forward(0, 2))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(found.nodes[0].member.train(ListFeed(batches(True), 2)))
            await asyncio.sleep(0)
            with pytest.raises(ModelError, match="while an iteration runs"):
                found.nodes[0].member.unassign()
        assert running.result().micro_batches == 4
