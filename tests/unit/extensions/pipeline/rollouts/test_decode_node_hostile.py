"""Members that answer for steps they are not asked about, or ask for much at little cost."""

import asyncio
from typing import Any

import pytest
import torch

from swarmnode.extensions.pipeline.rollouts.chain import StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import Closed, Halted
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.wire.byte_budget import ByteBudget
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL
from swarmnode.extensions.pipeline.wire.services import MemberService
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.rollouts.test_decode_node import (
    PLAN,
    WIDTH,
    eventually,
    feed,
    members,
    never,
    refused,
    send_around,
    step,
)


async def say(host: Any, target: Any, message: Any, tensor: torch.Tensor | None = None) -> None:
    """Sends a message and hears the answer."""
    stream = await host.open_stream(target.peer_id, PROTOCOL)
    payload = bytes(encode(tensor, "none").payload) if tensor is not None else b""
    await raw_wire.write(stream, MemberService.GENERATION, message, payload)
    await raw_wire.answer_on(stream)
    stream.close()


def brings(tensor: torch.Tensor, *, start: int = 0, **fields: Any) -> Any:
    segments = Segments((0,), (start,), (len(tensor),))
    return step(segments=segments, tensor=encode(tensor, "none").header, **fields)


async def test_who_is_not_on_the_path_neither_answers_nor_accuses() -> None:
    async with members() as (hosts, nodes):
        nodes[1].run_in_stage_thread = never
        going = asyncio.create_task(send_around(nodes[0], path=(0, 1), timeout_s=0.6))
        await eventually(lambda: bool(nodes[0]._in_flight._expected))
        (number,) = nodes[0]._in_flight._expected
        answer = torch.ones(1, WIDTH)
        frame = brings(answer, path=(0, 2), position=2, number=number)
        await say(hosts[2], hosts[0], frame, answer)
        halted = Halted(plan=PLAN, session=1, path=(0, 1, 2), position=1, number=number, why=StopReason.LOST)
        await say(hosts[2], hosts[0], halted)
        found = await going
        assert (found.why, found.node) == (StopReason.LOST, 1)
        assert "did not answer" in found.detail
        assert refused(nodes[0])["unknown_work"] == 2


async def test_an_answer_of_another_shape_counts_against_the_node_that_sent_it() -> None:
    async with members() as (hosts, nodes):
        nodes[1].run_in_stage_thread = never
        going = asyncio.create_task(send_around(nodes[0], path=(0, 1), timeout_s=2.0))
        await eventually(lambda: bool(nodes[0]._in_flight._expected))
        (number,) = nodes[0]._in_flight._expected
        answer = torch.ones(1, WIDTH + 1)
        await say(hosts[1], hosts[0], brings(answer, path=(0, 1), position=2, number=number), answer)
        found = await going
        assert (found.why, found.node) == (StopReason.LOST, 1)


async def test_a_session_is_only_spoken_of_along_its_own_path() -> None:
    async with members() as (hosts, nodes):
        assert isinstance(await send_around(nodes[0], path=(0, 1)), torch.Tensor)
        hidden = torch.ones(1, WIDTH)
        await say(hosts[2], hosts[1], brings(hidden, path=(0, 2, 1), position=2, start=1), hidden)
        await say(hosts[2], hosts[1], Closed(plan=PLAN, session=1, path=(0, 2, 1), position=2))
        await eventually(lambda: refused(nodes[1])["wrong_route"] == 2)
        assert nodes[1].steps == 1
        assert len(nodes[1].caches or ()) == 1


async def test_a_version_that_is_not_the_next_is_not_waited_for() -> None:
    async with members() as (_, nodes):
        for version, others in ((2, True), (2**52, True)):
            found = await nodes[0].send_around(
                feed((0, 1), version=version), torch.ones(1, WIDTH), timeout_s=2.0
            )
            assert (found.why is StopReason.OTHER_POLICY) is others
            assert found.node == 1


@pytest.mark.parametrize("newcomer", [False, True])
async def test_memory_of_who_gave_up_waiting_is_nobodys(newcomer: bool) -> None:
    budget, leave = ByteBudget(10, 10), asyncio.Event()

    async def holds(peer: str, size: int) -> None:
        async with budget.held(peer, size):
            await leave.wait()

    holder = asyncio.create_task(holds("a", 10))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(holds("b", 5))
    await asyncio.sleep(0)
    waiter.cancel()
    leave.set()
    if newcomer:
        budget._used.clear()
        await holds("c", 5)
        budget._used["a"] = 10
    done = await asyncio.gather(holder, waiter, return_exceptions=True)
    assert done[0] is None
    assert isinstance(done[1], asyncio.CancelledError)
    assert (budget._used.total(), len(budget._waiting)) == (0, 0)
