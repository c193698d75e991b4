"""Members over a network come to the weights of one machine, and what does not belong here stays outside."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, cross_entropy
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest, violations
from swarmnode.extensions.pipeline.stages.micro_batches import StageInput
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, build_stage
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    Finished,
    ForwardHop,
    Message,
    Passed,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.signing import signed
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches
from swarmnode.types import one_span
from tests.unit.extensions.pipeline.members import (
    PATIENT,
    Crew,
    ListFeed,
    crew,
    instance_of,
    key_of,
    sgd,
    stage_worker,
)
from tests.unit.extensions.pipeline.tiny_models import (
    CPU,
    SETTINGS,
    batches,
    nudge,
    saved,
    tiny_config,
    tiny_model,
)  # fmt: skip

PACKS = try_cut(tiny_config())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("model"))


def workers(folder: Path, ends: Sequence[int], **more: Any) -> Callable[[int], StageWorker]:
    return lambda stage: stage_worker(folder, ends, stage, PACKS, SETTINGS, **more)


async def trained(found: Crew, feed: Callable[[], ListFeed], steps: int) -> list[Any]:
    """So many iterations on all data nodes; the reports of the last one."""
    data = sorted({path[0] for path in found.plan.paths})
    reports: list[Any] = []
    for _ in range(steps):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(found.nodes[node].member.train(feed())) for node in data]
        reports = [task.result() for task in running]
    for node in found.nodes:
        await node.member.wait_step(steps)
    return reports


def same_as_local(found: Crew, folder: Path, ends: Sequence[int], used: list[MicroBatch], steps: int) -> None:
    """Every member has the weights that one process comes to."""
    plan = found.plan
    local = LocalPipeline.load(folder, ends, SETTINGS, packs=PACKS)
    for worker in local.workers:
        nudge(worker.model.trainable())
    optimizers = [sgd(worker) for worker in local.workers]
    for _ in range(steps):
        for number in range(plan.micro_batches):
            path = plan.stages(number // plan.instance.waves)
            local.accumulate(LossInputs(used[number % len(used)], path), cross_entropy(1))
        for worker, optimizer, one in zip(local.workers, optimizers, local.take_gradients(), strict=True):
            worker.apply(one.of_step(1), optimizer, max_norm=1e9)
    for number, node in enumerate(found.nodes):
        expected = local.workers[plan.instance.stage_of[number]].model.trainable()
        for name, parameter in node.worker.model.trainable().items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("ends", "stages", "paths", "packed"),
    [
        ([6], [[0]], [(0,), (0,)], True),
        ([2, 6], [[0, 1], [2]], [(0, 2), (1, 2)], False),
        ([2, 4, 6], [[0], [1, 2], [3]], [(0, 1, 3), (0, 2, 3)], True),
        ([1, 3, 6], [[0, 1], [2], [3, 4]], [(0, 2), (0, 3), (1, 2), (1, 4)], True),
    ],
)
async def test_members_come_to_the_weights_of_one_machine(
    folder: Path, ends: list[int], stages: Any, paths: Any, packed: bool
) -> None:
    plan = Plan(instance_of(stages, path_length=len(paths[0])), tuple(paths))
    assert violations(plan) == []
    used = batches(packed)
    start = {n: p.detach().clone() for n, p in workers(folder, ends)(0).model.trainable().items()}
    async with crew(plan, workers(folder, ends)) as found:
        reports = await trained(found, lambda: ListFeed(used, 2), steps=2)
        same_as_local(found, folder, ends, used, steps=2)
        moved = found.nodes[0].worker.model.trainable()
        assert max((moved[name] - tensor).abs().max() for name, tensor in start.items()) > 1e-3
    assert sum(report.micro_batches for report in reports) == plan.micro_batches
    assert all((report.retried, report.given_up, report.iteration) == (0, 0, 1) for report in reports)
    assert all(report.loss > 1 and 0 < report.busy_share <= 1 for report in reports)
    assert found.lost == []


async def test_shared_prompts_keep_their_layout_on_the_way(folder: Path) -> None:
    drawn = [TrainingSample((3, 4, 5), (7 + n, 9, 11 + n), 1.0, None, one_span(0, 3)) for n in range(3)]
    used = list(micro_batches(drawn, 64, CPU, packed=True))
    assert used[0].layout is not None and any(prompt is not None for prompt in used[0].layout.prompts)
    plan = Plan(instance_of([[0], [1]], path_length=2, waves=1), ((0, 1),))
    async with crew(plan, workers(folder, [2, 6])) as found:
        await trained(found, lambda: ListFeed(used, 1), steps=1)
        same_as_local(found, folder, [2, 6], used, steps=1)


async def test_a_micro_batch_may_weigh_by_its_answers(folder: Path) -> None:
    plan = Plan(instance_of([[0], [1]], path_length=2), ((0, 1),))
    async with crew(plan, workers(folder, [2, 6])) as found:
        report = (await trained(found, lambda: ListFeed(batches(True), 2, weight=3), steps=1))[0]
    assert (report.tokens, report.micro_batches) == (6, 2)


async def test_a_data_node_without_data_ends_its_iteration_all_the_same(folder: Path) -> None:
    class Nothing(ListFeed):
        def take(self, agent: int, wave: int, path: Any) -> None:
            return None

    plan = Plan(instance_of([[0, 1], [2]], path_length=2), ((0, 2), (1, 2)))
    async with crew(plan, workers(folder, [2, 6])) as found:
        async with asyncio.TaskGroup() as tasks:
            some = tasks.create_task(found.nodes[0].member.train(ListFeed(batches(True), 2)))
            none = tasks.create_task(found.nodes[1].member.train(Nothing([], 2)))
        await found.nodes[2].member.wait_step(1)
    assert (some.result().micro_batches, none.result().micro_batches) == (2, 0)
    assert none.result().stepped


async def test_what_belongs_to_the_next_iteration_waits_for_it(folder: Path) -> None:
    """Member 2 is slow to close: its replicas' exchange is held up while node 0 goes on."""
    plan = Plan(instance_of([[0], [1, 2]], path_length=2), ((0, 1), (0, 2)))
    async with crew(plan, workers(folder, [2, 6])) as found:
        held, gather = asyncio.Event(), found.together.gather

        async def slow(kept: Any, replicas: Sequence[str]) -> Any:
            if len(replicas) > 1:
                await held.wait()
            return await gather(kept, replicas)

        found.together.gather = slow  # pyright: ignore[reportAttributeAccessIssue]
        data = found.nodes[0].member
        await data.train(ListFeed(batches(True), 2))
        async with asyncio.TaskGroup() as tasks:
            again = tasks.create_task(data.train(ListFeed(batches(True), 2)))
            done = found.nodes[1].member.transport._done  # pyright: ignore[reportPrivateUsage]
            await until(lambda: sum(map(len, done.values())) >= 6)
            assert found.nodes[1].member.iteration == 0
            held.set()
        assert again.result().retried == 0
        for node in found.nodes:
            await node.member.wait_step(2)
        same_as_local(found, folder, [2, 6], batches(True), steps=2)


async def test_a_new_plan_is_taken_at_the_boundary(folder: Path) -> None:
    first = Plan(instance_of([[0], [1, 2]], path_length=2, waves=1), ((0, 1), (0, 2)))
    second = Plan(first.instance, ((0, 2), (0, 1)))
    async with crew(first, workers(folder, [2, 6])) as found:
        await trained(found, lambda: ListFeed(batches(True), 1), steps=1)
        found.plan = second
        assert digest(first) != digest(second)
        found.assign(iteration=1)
        await trained(found, lambda: ListFeed(batches(True), 1), steps=1)
        for node in found.nodes:
            await node.member.wait_step(2)
        assert [node.member.iteration for node in found.nodes] == [2, 2, 2]


# What does not belong here

PLAN = Plan(instance_of([[0], [1], [2]], path_length=3), ((0, 1, 2),))
OWN = digest(PLAN)
SENT = encode(torch.ones(1, 5, 32), "none")
FORWARD = ForwardHop(
    plan=digest(PLAN), iteration=0, micro_batch=0, agent=0, wave=0, path=(0, 1, 2),
    position=1, tensor=SENT.header, tokens=4,
)  # fmt: skip
"""Without a signature: enough where the data node sends it itself, and its neighbour keeps it."""
BACKWARD = BackwardHop(
    plan=digest(PLAN), iteration=0, micro_batch=0, agent=0, wave=0, path=(0, 1, 2),
    position=1, tensor=SENT.header,
)  # fmt: skip


async def until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 (nothing tells when)
        await asyncio.sleep(0.01)


def held_after_forward(worker: StageWorker) -> list[int]:
    """Returns a list that gets, with each forward pass, the number of micro-batches in the worker."""
    original, held = worker.forward, list[int]()

    def forward(item: StageInput) -> torch.Tensor:
        output_BTD = original(item)
        held.append(len(worker._work))  # pyright: ignore[reportPrivateUsage]
        return output_BTD

    worker.forward = forward
    return held


def changed(message: Message, **fields: Any) -> Message:
    return msgspec.structs.replace(message, **fields)


def shaped(*shape: int) -> Any:
    return encode(torch.ones(*shape), "none").header


async def test_nonsense_is_refused_before_its_tensor_is_read(folder: Path) -> None:
    common = {"plan": digest(PLAN)}
    nonsense: list[tuple[int, Message, Refusal]] = [
        (0, changed(FORWARD, plan="ab" * 32), Refusal.UNKNOWN_WORK),
        (0, changed(FORWARD, iteration=2), Refusal.UNKNOWN_WORK),
        (0, changed(FORWARD, agent=1, micro_batch=2), Refusal.UNKNOWN_WORK),
        (0, changed(FORWARD, wave=2, micro_batch=2), Refusal.UNKNOWN_WORK),
        (0, changed(FORWARD, micro_batch=1), Refusal.UNKNOWN_WORK),
        (2, changed(FORWARD, path=(2, 1), position=1), Refusal.WRONG_ROUTE),
        (0, changed(FORWARD, tensor=shaped(1, 5, 31)), Refusal.WRONG_SHAPE),
        (0, changed(FORWARD, tensor=shaped(5, 32)), Refusal.WRONG_SHAPE),
        (0, changed(FORWARD, tensor=shaped(3, 100, 32)), Refusal.TOO_LARGE),
        (0, changed(FORWARD, tokens=6), Refusal.WRONG_SHAPE),
        (0, changed(FORWARD, lengths=(3, 3)), Refusal.WRONG_SHAPE),
        (2, BACKWARD, Refusal.UNKNOWN_WORK),
        (2, Finished(**common, iteration=0, node=2, back=()), Refusal.WRONG_ROUTE),
        (0, Finished(**common, iteration=5, node=0, back=()), Refusal.UNKNOWN_WORK),
    ]  # fmt: skip
    async with crew(PLAN, workers(folder, [2, 4, 6])) as found:
        member = found.nodes[1].member
        for node, message, reason in nonsense:
            with pytest.raises(Rejected, match=reason):
                member.admit(found.peers[node], message)
        member.admit(found.peers[0], FORWARD)
        reply = await found.nodes[0].member.transport.send(
            found.peers[1],
            Passed(**common, iteration=0, micro_batch=0, position=1, homeward=False),  # pyright: ignore
            timeout_s=5.0,
        )
        assert reply is Refusal.UNKNOWN_WORK


async def test_a_message_that_comes_twice_is_computed_once(folder: Path) -> None:
    async with crew(PLAN, workers(folder, [2, 4, 6])) as found:
        computed, next_computed = (held_after_forward(node.worker) for node in found.nodes[1:])
        sender, target = found.nodes[0].member.transport, found.peers[1]
        for _ in range(2):
            assert await sender.send(target, signed(FORWARD, key_of(0)), SENT.payload, timeout_s=5.0) is None
        later = changed(FORWARD, iteration=1)
        assert await sender.send(target, later, SENT.payload, timeout_s=5.0) is None
        await found.nodes[1].member.in_stage_thread(lambda: None)
        await until(lambda: next_computed)
        assert len(computed) == 1
        with pytest.raises(Rejected, match=Refusal.UNKNOWN_WORK):
            found.nodes[1].member.admit(found.peers[0], FORWARD)


async def test_a_member_trains_one_iteration_at_a_time_under_one_seat(folder: Path) -> None:
    plan = Plan(instance_of([[0]], path_length=1), ((0,),))
    async with crew(plan, workers(folder, [6])) as found:
        member = found.nodes[0].member
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(member.train(ListFeed(batches(True), 2)))
            await asyncio.sleep(0)
            with pytest.raises(ModelError, match="cannot train"):
                await member.train(ListFeed(batches(True), 2))
            with pytest.raises(ModelError, match="while an iteration runs"):
                found.assign()
        assert running.result().micro_batches == 2


# Any plan comes to its end


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Six nodes in four stages; paths with skips, as many as there are slots."""
    order = draw(st.permutations(range(6)))
    cuts = sorted(draw(st.sets(st.integers(1, 5), min_size=3, max_size=3)))
    stages = [sorted(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    memory = draw(st.lists(st.integers(1, 2), min_size=6, max_size=6))
    instance = instance_of(stages, path_length=3, memory=tuple(memory), waves=draw(st.integers(1, 2)))
    free, paths = list(memory), list[tuple[int, ...]]()
    for _ in range(5):
        visited = [0, *sorted(draw(st.permutations([1, 2, 3]))[:2])]
        path = tuple(draw(st.sampled_from(stages[stage])) for stage in visited)
        if all(free[node] for node in path):
            paths.append(path)
            for node in path:
                free[node] -= 1
    if not paths:
        paths = [tuple(nodes[0] for nodes in stages[:3])]
    return Plan(instance, tuple(paths))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(plans())
def test_no_plan_runs_into_a_deadlock(plan: Plan) -> None:
    async def check() -> None:
        async with crew(plan, worker_of, settings=PATIENT) as found:
            held = [held_after_forward(node.worker) for node in found.nodes]
            async with asyncio.timeout(60):
                reports = await trained(found, lambda: ListFeed(SMALL, plan.instance.waves), steps=1)
        assert sum(report.micro_batches for report in reports) == plan.micro_batches
        assert all(report.retried == 0 for report in reports)
        for most, counts in zip(plan.instance.memory, held, strict=True):
            assert max(counts, default=0) <= most

    asyncio.run(check())


SMALL = batches(True, max_tokens=12)[:1]
SMALL_MODEL = tiny_model()


def worker_of(stage: int) -> StageWorker:
    state = {name: p.detach().clone() for name, p in SMALL_MODEL.named_parameters()}
    part = StagePart(stage, stage + 1 if stage < 3 else 6, has_ends=stage == 0)
    model = build_stage(SMALL_MODEL.config, part, lambda names: {n: state[n] for n in names}, SETTINGS, PACKS)
    return StageWorker(model, slots=2, max_tokens=256)
