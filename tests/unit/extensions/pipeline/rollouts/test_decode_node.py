"""Steps of generation between members: who may send what, what is bounded, who is found to have stopped."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason
from swarmnode.extensions.pipeline.rollouts.decode_messages import (
    Closed,
    DecodeMessage,
    DecodeStep,
    Halted,
    check_message,
)
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.rollouts.routing import Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import MAX_SEQUENCES, Segments, StageCaches
from swarmnode.extensions.pipeline.wire.codec import encode as encoded
from swarmnode.extensions.pipeline.wire.frames import decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import TensorHeader
from swarmnode.extensions.pipeline.wire.incoming_streams import Reply, WireLimits
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, BrokenOff, MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.services import LIMITS as SERVICES
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.stages.test_stage_model import stages_of
from tests.unit.extensions.pipeline.tiny_models import LAYERS, tiny_model

PLAN = "ab" * 32
WIDTH = 32
LIMITS = WireLimits(header_timeout_s=0.3, chunk_timeout_s=0.3, max_streams_per_peer=8)
ONE = Segments((0,), (0,), (1,))
STAGES = stages_of(tiny_model(), (2, 4, LAYERS))


def header(rows: int = 1) -> TensorHeader:
    return encoded(torch.zeros(rows, WIDTH), "none").header


def step(**fields: Any) -> DecodeStep:
    values: dict[str, Any] = {
        "plan": PLAN, "session": 1, "path": (0, 1, 2), "position": 1, "number": 1, "version": 0,
        "segments": ONE, "tensor": header(),
    }  # fmt: skip
    return DecodeStep(**(values | fields))


@asynccontextmanager
async def members(count: int = 3) -> AsyncGenerator[tuple[list[MemoryHost], list[DecodeNode]], None]:
    """Connected members of one plan, each with a stage; and one more peer that is in no plan."""
    network = MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host()) for _ in range(count + 1)]
        for one in hosts:
            for other in hosts:
                if one is not other:
                    await one.connect((await other.addresses())[0])
        peers = tuple(host.peer_id for host in hosts[:count])
        nodes: list[DecodeNode] = []
        for number, host in enumerate(hosts[:count]):
            streams = await stack.enter_async_context(MemberStreams(host, LIMITS))
            node = DecodeNode(streams, run_in_stage_thread=inline, version=lambda: 0)
            await stack.enter_async_context(node)
            node.hold(StageCaches(STAGES[number], max_bytes=1 << 20))
            node.adopt(PlanMembers(PLAN, peers, own=number))
            nodes.append(node)
        yield hosts, nodes


def hold(node: DecodeNode, caches: StageCaches) -> None:
    """Another stage under the same plan."""
    node.hold(caches)
    node.adopt(node.members)


async def inline(fn: Callable[[], Any]) -> Any:
    return fn()


async def never(fn: Callable[[], Any]) -> Any:
    await asyncio.Event().wait()


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def send_around(node: DecodeNode, timeout_s: float = 20.0, session: int = 1, **changes: Any) -> Any:
    hidden = changes.pop("hidden", torch.ones(1, WIDTH))
    return await node.send_around(feed(session=session, **changes), hidden, timeout_s=timeout_s)


def feed(
    path: tuple[int, ...] = (0, 1, 2), session: int = 1, segments: Segments = ONE, version: int = 0
) -> ChainFeed:
    return ChainFeed(Route(path, path, PLAN), session, (), segments, version)


# Frames


def test_frames_survive_the_wire() -> None:
    frames = (
        step(segments=Segments((0,), (3,), (1,), ((1, 0, 3),))),
        Halted(plan=PLAN, session=1, path=(0, 1), position=2, number=3, why=StopReason.LOST, detail="x"),
        Closed(plan=PLAN, session=1, path=(0, 1), position=1),
    )
    for frame in frames:
        assert decode(DecodeMessage, encode(frame)) == frame


def test_the_largest_step_fits_into_a_frame() -> None:
    rows = MAX_SEQUENCES
    largest = step(
        segments=Segments(
            cells=tuple(range(rows)), starts=(1 << 19,) * rows, counts=(1,) * rows,
            forks=tuple((row, (row + 1) % rows, 1 << 19) for row in range(rows)),
        ),
        tensor=header(rows), path=tuple(range(60)),
    )  # fmt: skip
    assert len(encode(largest)) <= SERVICES[MemberService.GENERATION].max_message_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": (0, 1, 0)},
        {"position": 4},
        {"position": 0},
        {"segments": ((0, 0), (0, 0), (1, 1), (1, 1))},
        {"segments": ((0,), (0,), (2,), (1,))},
        {"position": 3, "segments": ((0,), (0,), (2,), (2,))},
        {"segments": ((MAX_SEQUENCES,), (0,), (1,), (1,))},
        {"segments": ((0,), (-1,), (1,), (1,))},
        {"segments": ((0,), (0,), (1,), (-1,))},
        {"segments": ((0,), (0,), (1,), (1,), ((-1, 0, 1),))},
        {"plan": "x"},
        {"segments": ((), (1,), (1,), (1,))},
    ],
)
def test_a_step_that_contradicts_itself_is_no_frame(wrong: dict[str, Any]) -> None:
    fields = [
        wrong.get(name, value)
        for name, value in zip(DecodeStep.__struct_fields__, _values(step()), strict=True)
    ]
    data = encode(["step", *fields])
    with pytest.raises(Rejected, match="malformed"):
        decode(DecodeMessage, data)


def _values(frame: DecodeStep) -> list[Any]:
    return [getattr(frame, name) for name in DecodeStep.__struct_fields__]


ROSTER = PlanMembers(PLAN, ("a", "b", "c", "d"), own=1)
AT_START = PlanMembers(PLAN, ("a", "b", "c", "d"), own=0)


@pytest.mark.parametrize(
    "frame, peer, reason",
    [
        (step(plan="cd" * 32), "a", "unknown_plan"),
        (step(), "z", "not_a_member"),
        (step(), "c", "wrong_route"),
        (step(position=2), "b", "wrong_route"),
        (step(path=(0, 1, 9)), "a", "wrong_route"),
        (Closed(plan=PLAN, session=1, path=(0, 1, 2), position=1), "c", "wrong_route"),
    ],
)  # fmt: skip
def test_only_the_node_before_us_may_send_us_a_step(frame: Any, peer: str, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        check_message(frame, peer, ROSTER)


def test_a_member_accuses_only_itself_and_its_neighbours() -> None:
    def halted(position: int) -> Halted:
        return Halted(
            plan=PLAN, session=1, path=(0, 1, 2, 3), position=position, number=1, why=StopReason.LOST
        )

    for peer, position in (("b", 1), ("b", 2), ("c", 1), ("c", 3), ("d", 4)):
        check_message(halted(position), peer, AT_START)
    for peer, position in (("b", 3), ("d", 1), ("b", 4), ("a", 1)):
        with pytest.raises(Rejected, match="wrong_route"):
            check_message(halted(position), peer, AT_START)
    with pytest.raises(Rejected, match="wrong_route"):
        check_message(halted(1), "c", ROSTER)


def test_who_halts_a_step_for_another_plan_has_forgotten_ours() -> None:
    halted = Halted(plan=PLAN, session=1, path=(0, 1, 2), position=1, number=1, why=StopReason.OTHER_PLAN)
    assert halted.stopped == Stopped(StopReason.FORGOTTEN, 1)


# Members


async def test_a_step_is_sent_again_by_the_node_before_who_is_not_ready_for_its_plan() -> None:
    async with members() as (hosts, nodes):
        waits_for: list[tuple[int, str]] = []
        for number, node in enumerate(nodes):
            node.on_silent = lambda peer_id, why, by=number: waits_for.append((by, peer_id))
        caches = nodes[2].caches
        nodes[2].hold(None)
        going = asyncio.create_task(send_around(nodes[0]))
        await eventually(lambda: bool(waits_for))
        assert waits_for == [(1, hosts[2].peer_id)] and not going.done()
        assert caches is not None
        hold(nodes[2], caches)
        assert isinstance(await going, torch.Tensor)
        assert [node.steps for node in nodes] == [0, 1, 1]


async def test_a_plan_that_ends_at_the_node_before_ends_no_step() -> None:
    """It refuses what it cannot pass on, and is asked again itself."""
    async with members() as (hosts, nodes):
        held = [node.caches for node in nodes]
        waits_for: list[str] = []
        for node in nodes:
            node.on_silent = lambda peer_id, why: waits_for.append(peer_id)
        nodes[2].hold(None)
        going = asyncio.create_task(send_around(nodes[0]))
        await eventually(lambda: waits_for == [hosts[2].peer_id])
        nodes[1].hold(None)
        await eventually(lambda: waits_for == [hosts[2].peer_id, hosts[1].peer_id])
        for node, caches in zip(nodes[1:], held[1:], strict=True):
            assert caches is not None
            hold(node, caches)
        assert isinstance(await going, torch.Tensor)


@pytest.mark.parametrize("sender", [0, 1])
async def test_a_step_that_was_passed_on_is_not_computed_again_over_later_ones(
    sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream may break before the sender hears that it was passed on."""
    async with members() as (_, nodes):
        ask, broken = nodes[sender]._streams.ask, asyncio.Event()

        async def breaks_once(*args: Any, **options: Any) -> Any:
            found = await ask(*args, **options)
            if not broken.is_set():
                broken.set()
                raise BrokenOff("the connection is gone")
            return found

        monkeypatch.setattr(nodes[sender]._streams, "ask", breaks_once)
        for start in range(3):
            segments = Segments((0,), (start,), (1,))
            assert isinstance(await send_around(nodes[0], segments=segments), torch.Tensor), start
            await asyncio.sleep(0.2 if start == 1 else 0.0)  # Longer than the pause before it is sent again.
        assert broken.is_set()
        assert [node.steps for node in nodes] == [0, 3, 3]


async def test_a_step_goes_around_the_path_and_sessions_end_along_it() -> None:
    async with members() as (_, nodes):
        hidden_1D = torch.ones(1, WIDTH)
        expected = hidden_1D
        for stage in STAGES[1:]:
            expected = StageCaches(stage, max_bytes=1 << 20).run(("x", 1), ONE, expected)
        torch.testing.assert_close(await send_around(nodes[0]), expected)
        assert [len(node.caches or ()) for node in nodes] == [0, 1, 1]
        await nodes[0].close_session(feed().route, 1)
        await eventually(lambda: [len(node.caches or ()) for node in nodes] == [0, 0, 0])


async def test_only_the_last_tokens_come_back() -> None:
    async with members() as (_, nodes):
        segments = Segments((0, 1), (0, 0), (3, 2))
        assert (await send_around(nodes[0], segments=segments, hidden=torch.ones(5, WIDTH))).shape == (
            2,
            WIDTH,
        )


async def test_a_stage_without_the_session_says_so() -> None:
    async with members() as (_, nodes):
        found = await send_around(nodes[0], segments=Segments((0,), (4,), (1,)))
        assert (found.why, found.node) == (StopReason.FORGOTTEN, 1)


async def test_a_stage_without_room_says_so() -> None:
    async with members() as (_, nodes):
        hold(nodes[2], StageCaches(STAGES[2], max_bytes=1))
        found = await send_around(nodes[0])
        assert (found.why, found.node) == (StopReason.NO_MEMORY, 2)


async def test_numbers_that_are_none_count_against_the_stage_that_makes_them() -> None:
    broken = stages_of(tiny_model(), (2, 4, LAYERS))[1]
    with torch.no_grad():
        next(iter(broken.trainable().values())).fill_(float("nan"))
    async with members() as (_, nodes):
        hold(nodes[1], StageCaches(broken, max_bytes=1 << 20))
        found = await send_around(nodes[0])
        assert (found.why, found.node) == (StopReason.LOST, 1)


async def test_a_node_that_is_gone_is_named_by_the_one_before_it() -> None:
    async with members() as (hosts, nodes):
        await nodes[2].__aexit__(None, None, None)
        await hosts[2].__aexit__(None, None, None)
        found = await send_around(nodes[0])
        assert (found.why, found.node) == (StopReason.LOST, 2)


async def test_a_node_that_does_nothing_is_given_up_by_the_one_before_it() -> None:
    async with members() as (_, nodes):
        nodes[2].run_in_stage_thread = never
        # A fifth of it is what the one before has to tell of it.
        found = await send_around(nodes[0], timeout_s=5.0)
        assert (found.why, found.node) == (StopReason.LOST, 2)
        nodes[2].run_in_stage_thread = inline
        assert isinstance(await send_around(nodes[0], session=2), torch.Tensor)


async def test_a_step_that_is_lost_between_two_that_answer_is_brought_again() -> None:
    async with members() as (_, nodes):
        incoming = nodes[2]._streams.incoming
        real = incoming._handlers[MemberService.GENERATION]

        async def swallow(asked: Any) -> Reply:
            async with asked.payload():
                return Reply()

        incoming.begin(MemberService.GENERATION, replace(real, respond=swallow))
        assert await send_around(nodes[0], timeout_s=0.5) == Stopped(
            StopReason.FORGOTTEN, None, "nothing came around within 0.5 s"
        )
        incoming.begin(MemberService.GENERATION, real)
        assert isinstance(await send_around(nodes[0], session=2), torch.Tensor)


async def test_a_broken_stream_is_opened_again() -> None:
    async with members() as (_, nodes):
        await send_around(nodes[0])
        link = nodes[0]._streams._links[nodes[1]._streams.peer_id]
        await eventually(lambda: bool(link.idle))
        link.idle[0][1].close()
        assert isinstance(await send_around(nodes[0]), torch.Tensor)


def refused(node: DecodeNode) -> dict[str, int]:
    return node._streams.incoming.refused


async def test_strangers_are_told_nothing() -> None:
    async with members() as (hosts, nodes):
        stream = await hosts[3].open_stream(hosts[1].peer_id, PROTOCOL)
        await stream.discard()
        assert refused(nodes[1]) == {"not_a_member": 1}


async def test_a_member_that_sends_nonsense_loses_its_stream_and_nothing_else_happens() -> None:
    async with members() as (hosts, nodes):
        too_large = bytes(SERVICES[MemberService.GENERATION].max_message_bytes + 1)
        for data, reason in ((too_large, "too_large"), (b"\xc1", "malformed")):
            stream = await hosts[2].open_stream(hosts[1].peer_id, PROTOCOL)
            await raw_wire.write(stream, MemberService.GENERATION, data)
            assert not (await raw_wire.answer_on(stream)).keep
            stream.close()
            assert refused(nodes[1])[reason] == 1
        assert isinstance(await send_around(nodes[0]), torch.Tensor)


async def test_a_tensor_that_never_comes_gives_its_memory_back() -> None:
    async with members() as (hosts, nodes):
        stream = await hosts[0].open_stream(hosts[1].peer_id, PROTOCOL)
        await raw_wire.write(stream, MemberService.GENERATION, step(), b"abc")
        await eventually(lambda: nodes[1]._streams.incoming._budget._used.total() > 0)
        await eventually(lambda: refused(nodes[1])["too_slow"] == 1)
        assert nodes[1]._streams.incoming._budget._used.total() == 0


async def test_streams_of_a_member_are_bounded() -> None:
    async with members() as (hosts, nodes):
        for _ in range(LIMITS.max_streams_per_peer + 1):
            await hosts[2].open_stream(hosts[1].peer_id, PROTOCOL)
        await eventually(lambda: refused(nodes[1])["too_many_streams"] == 1)


async def test_who_has_left_still_knows_its_last_plan_and_sends_nothing() -> None:
    async with members() as (_, nodes):
        pass
    assert nodes[0].members.plan == PLAN
    found = await send_around(nodes[0])
    assert found.why is StopReason.OTHER_PLAN
