"""Stage states among members: who holds which layers, from whoever lives, believed by digest."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import (
    HeldState,
    Holding,
    LayerHolders,
    Offer,
    covering,
    layer_of,
    of_part,
    offers,
)
from swarmnode.extensions.pipeline.states.state_questions import AskHoldings, Holdings, StateQuestion
from swarmnode.extensions.pipeline.states.state_service import StateLimits, StateService
from swarmnode.extensions.pipeline.wire.frames import CHUNK_BYTES
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, MemberStreams
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.network.streams import ByteStream
from tests.unit.extensions.pipeline import raw_wire

LIMITS = StateLimits()
SHORT = StateLimits(answer_timeout_s=1.0, least_bytes_per_s=1e9)
"""Where somebody is frozen and that has to be waited for."""


def tensors(first: int, end: int, iteration: int = 0, width: int = 3) -> dict[str, Tensor]:
    return {
        f"model.layers.{n}.weight": torch.full((width,), 100.0 * iteration + n) for n in range(first, end)
    }


def held(first: int, end: int, iteration: int = 0, *, ends: bool = False, width: int = 3) -> HeldState:
    found = tensors(first, end, iteration, width)
    if ends:
        found["model.norm.weight"] = torch.ones(3)
    return HeldState.of(StagePart(first, end, has_ends=ends), iteration, found)


@asynccontextmanager
async def members(
    count: int, limits: StateLimits = LIMITS, *, honest: int | None = None
) -> AsyncGenerator[tuple[list[StateService], list[MemoryHost]], None]:
    """Those from `honest` on are bare hosts."""
    network = MemoryNetwork(seed=2)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host()) for _ in range(count)]
        for one, other in combinations(hosts, 2):
            await one.connect((await other.addresses())[0])
        services: list[StateService] = []
        for host in hosts[: honest or count]:
            streams = await stack.enter_async_context(MemberStreams(host))
            services.append(await stack.enter_async_context(StateService(streams, limits)))
        for service in services:
            service.admit([host.peer_id for host in hosts])
        yield services, hosts


def ids(hosts: list[MemoryHost]) -> list[str]:
    return [host.peer_id for host in hosts]


def kept_by(keeper: MemoryHost, owners: dict[MemoryHost, tuple[int, int]]) -> LayerHolders:
    ranges = {owner.peer_id: layers for owner, layers in owners.items()}
    return LayerHolders(ranges, dict.fromkeys(ranges, keeper.peer_id))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_a_part_is_assembled_from_stages_that_are_cut_elsewhere() -> None:
    async with members(4) as (services, hosts):
        for service, (first, end) in zip(services, [(0, 2), (2, 3), (3, 6)], strict=False):
            service.publish(held(first, end, 5))
        found = await services[3].assemble(ids(hosts), StagePart(1, 4), at_most=5)
    same(found.tensors, tensors(1, 4, 5))
    assert found.iteration == 5


async def test_layers_of_different_iterations_are_not_put_together() -> None:
    async with members(3) as (services, hosts):
        services[0].publish(held(0, 2, 4))
        services[0].publish(held(0, 2, 5))
        services[1].publish(held(2, 4, 4))
        found = await services[2].assemble(ids(hosts), StagePart(0, 4), at_most=9)
        assert found.iteration == 4
        same(found.tensors, tensors(0, 4, 4))
        newest = await services[2].assemble(ids(hosts), StagePart(0, 2), at_most=9)
        assert newest.iteration == 5
        with pytest.raises(CheckpointError, match="no members hold layers 0 to 3 of one iteration"):
            await services[2].assemble(ids(hosts), StagePart(0, 4), at_least=5, at_most=9)


async def test_only_as_many_own_states_are_kept_as_a_fetch_across_a_boundary_needs() -> None:
    async with members(1) as (services, _):
        for iteration in range(4):
            services[0].publish(held(0, 2, iteration))
        assert [one.iteration for one in services[0].holdings()] == [2, 3]


async def test_a_neighbour_keeps_the_newest_copy_and_gives_it_when_its_owner_is_gone() -> None:
    async with members(3) as (services, hosts):
        owner, keeper, newcomer = services
        keeper.admit(ids(hosts), kept_by(hosts[1], {hosts[0]: (2, 4)}))
        for iteration in (6, 7, 7, 6):
            copy = held(2, 4, iteration)
            owner.publish(copy)
            if iteration == 6 and keeper._copies.kept.get(hosts[0].peer_id) is not None:
                assert not await owner.push_copy(hosts[1].peer_id, copy)
            else:
                assert await owner.push_copy(hosts[1].peer_id, copy)
        keeper.publish(held(0, 2, 8))
        hosts[0].go_down()
        keeper.admit(ids(hosts[1:]))
        found = await newcomer.assemble(ids(hosts), StagePart(2, 4), at_most=8)
    assert found.iteration == 7
    same(found.tensors, tensors(2, 4, 7))


async def test_copies_are_bounded_in_number_and_bytes_and_those_of_the_gone_make_room() -> None:
    one = held(0, 2, 1)
    limits = StateLimits(max_copies=2, max_copy_bytes=3 * one.holding.size_bytes)
    async with members(4, limits) as (services, hosts):
        keeper = hosts[0].peer_id
        services[0].admit(ids(hosts), kept_by(hosts[0], dict.fromkeys(hosts[1:], (0, 2))))
        for service in services[1:]:
            service.publish(one)
        assert await services[1].push_copy(keeper, one)
        assert await services[2].push_copy(keeper, one)
        assert not await services[3].push_copy(keeper, one)
        services[0].admit(ids(hosts[2:]), kept_by(hosts[0], dict.fromkeys(hosts[2:], (0, 2))))
        assert await services[3].push_copy(keeper, one)
        assert services[0]._copies.kept.get(hosts[1].peer_id) is None
        large = held(0, 2, 2, width=400)
        services[3].publish(large)
        assert not await services[3].push_copy(keeper, large)
        assert services[0]._copies.kept.get(hosts[3].peer_id) == one


async def test_a_recent_copy_of_a_member_that_others_keep_now_outlives_old_ones_of_the_gone() -> None:
    async with members(4, StateLimits(max_copies=2)) as (services, hosts):
        keeper, gone, moved, new = hosts[0].peer_id, hosts[1], hosts[2], hosts[3]
        services[0].admit(ids(hosts), kept_by(hosts[0], dict.fromkeys([gone, moved], (0, 2))))
        for service, iteration in ((services[1], 3), (services[2], 20), (services[3], 20)):
            service.publish(held(0, 2, iteration))
        assert await services[1].push_copy(keeper, held(0, 2, 3))
        assert await services[2].push_copy(keeper, held(0, 2, 20))
        services[0].admit(ids([hosts[0], moved, new]), kept_by(hosts[0], {new: (0, 2)}))
        assert await services[3].push_copy(keeper, held(0, 2, 20))
        assert services[0]._copies.kept.get(moved.peer_id) is not None, "its new keeper may not have one yet"
        assert services[0]._copies.kept.get(gone.peer_id) is None


async def test_the_ends_come_along_when_they_are_trained() -> None:
    async with members(3) as (services, hosts):
        services[0].publish(held(0, 1, ends=True))
        services[1].publish(held(1, 4))
        part = StagePart(2, 4, has_ends=True)
        found = await services[2].assemble(ids(hosts), part, needs_ends=True, at_most=0)
        same(found.tensors, tensors(2, 4) | {"model.norm.weight": torch.ones(3)})
        hosts[0].go_down()
        with pytest.raises(CheckpointError):
            await services[2].assemble(ids(hosts), part, needs_ends=True, at_most=0)


# Members that are none of ours.

Play = Callable[[ByteStream, Any], Awaitable[None]]


async def serve(host: MemoryHost, offered: HeldState, play: Play) -> None:
    """It says that it holds `offered`; `play` decides what it hands out."""

    async def handler(stream: ByteStream) -> None:
        question = await raw_wire.read(stream, StateQuestion)
        if isinstance(question, AskHoldings):
            await raw_wire.say(stream, Holdings((offered.holding,)))
            await stream.discard()
        else:
            await play(stream, question)

    await host.serve_streams(PROTOCOL, handler)


async def give(stream: ByteStream, data: bytes, size_bytes: int | None = None) -> None:
    await raw_wire.say(stream, size_bytes or len(data), body_bytes=min(len(data), len(LARGE.data)))
    await stream.send(data)
    await stream.discard()


LARGE = held(0, 2, 3, width=CHUNK_BYTES // 2)
"""Several chunks long."""


async def test_what_one_holder_began_another_finishes() -> None:
    asked: list[int] = []

    async def dies_half_way(stream: ByteStream, question: Any) -> None:
        await raw_wire.say(stream, len(LARGE.data), body_bytes=len(LARGE.data))
        await stream.send(LARGE.data[: 2 * CHUNK_BYTES])
        while not stream._incoming.closed and stream._outgoing._held_bytes:  # type: ignore[attr-defined]
            await stream._outgoing.change()  # type: ignore[attr-defined]

    async def goes_on(stream: ByteStream, question: Any) -> None:
        asked.append(question.offset)
        rest = LARGE.data[question.offset :]
        await raw_wire.say(stream, len(LARGE.data), body_bytes=len(rest))
        await stream.send(rest)
        await stream.discard()

    async with members(3, honest=1) as (services, hosts):
        await serve(hosts[1], LARGE, dies_half_way)
        await serve(hosts[2], LARGE, goes_on)
        offer = Offer(LARGE.holding, (hosts[1].peer_id, hosts[2].peer_id))
        assert await services[0].fetch(offer) == LARGE
    assert asked == [2 * CHUNK_BYTES]


async def test_a_holder_that_hands_out_other_bytes_is_not_believed() -> None:
    wrong = bytearray(LARGE.data)
    wrong[-1] ^= 1

    async def lies(stream: ByteStream, question: Any) -> None:
        await give(stream, bytes(wrong))

    async with members(3, honest=2) as (services, hosts):
        services[1].publish(LARGE)
        await serve(hosts[2], LARGE, lies)
        offer = Offer(LARGE.holding, (hosts[2].peer_id, hosts[1].peer_id))
        assert await services[0].fetch(offer) == LARGE
        with pytest.raises(CheckpointError, match="nobody of 1 gave the state of layers 0 to 1"):
            await services[0].fetch(Offer(LARGE.holding, (hosts[2].peer_id,)))


async def test_a_wrong_beginning_does_not_spoil_what_others_hold() -> None:
    """It hangs up after a false half; the honest one's rest does not fit it and is asked for again, whole."""

    async def lies(stream: ByteStream, question: Any) -> None:
        await raw_wire.say(stream, len(LARGE.data), body_bytes=len(LARGE.data))
        await stream.send(bytes(CHUNK_BYTES))
        while stream._outgoing._held_bytes:  # type: ignore[attr-defined]
            await stream._outgoing.change()  # type: ignore[attr-defined]

    async with members(3, honest=2) as (services, hosts):
        services[1].publish(LARGE)
        await serve(hosts[2], LARGE, lies)
        offer = Offer(LARGE.holding, (hosts[2].peer_id, hosts[1].peer_id))
        assert await services[0].fetch(offer) == LARGE


@pytest.mark.parametrize("claimed", [0, 2**40, -1])
async def test_a_holder_that_sends_too_much_or_claims_it_is_not_read(claimed: int) -> None:
    async def floods(stream: ByteStream, question: Any) -> None:
        size = len(LARGE.data) + claimed if claimed >= 0 else claimed
        await give(stream, LARGE.data + bytes(64 * CHUNK_BYTES), size)

    async with members(2, honest=1) as (services, hosts):
        await serve(hosts[1], LARGE, floods)
        fetch = services[0].fetch(Offer(LARGE.holding, (hosts[1].peer_id,)))
        if claimed == 0:
            assert await fetch == LARGE
        else:
            with pytest.raises(CheckpointError):
                await fetch


async def test_a_state_beyond_the_bound_is_not_asked_for() -> None:
    async with members(2) as (services, hosts):
        services[1].publish(LARGE)
        huge = msgspec.structs.replace(LARGE.holding, size_bytes=2**50)
        with pytest.raises(CheckpointError, match="the bound is"):
            await services[0].fetch(Offer(huge, (hosts[1].peer_id,)))


async def test_a_frozen_holder_costs_its_deadline_and_the_other_layers_are_not_lost() -> None:
    async def freezes(stream: ByteStream, question: Any) -> None:
        await stream.discard()

    async with members(4, SHORT, honest=3) as (services, hosts):
        services[1].publish(held(0, 2, 5))
        services[2].publish(held(2, 4, 5))
        await serve(hosts[3], held(0, 4, 5), freezes)
        found = await services[0].assemble(ids(hosts), StagePart(0, 4), at_most=5)
    same(found.tensors, tensors(0, 4, 5))


async def test_a_holder_that_is_silent_is_given_up_before_a_whole_state_could_have_come() -> None:
    async def freezes(stream: ByteStream, question: Any) -> None:
        await stream.discard()

    slow = StateLimits(answer_timeout_s=0.05, least_bytes_per_s=1.0)
    async with members(3, slow, honest=2) as (services, hosts):
        services[1].publish(LARGE)
        await serve(hosts[2], LARGE, freezes)
        assert await services[0].fetch(Offer(LARGE.holding, (hosts[2].peer_id, hosts[1].peer_id))) == LARGE


async def test_bytes_that_are_no_state_are_looked_for_elsewhere() -> None:
    """Their digest is right: the liar chose it itself. Reaching farthest, it is asked first."""
    noise = b"no safetensors file"
    digest = hashlib.sha256(noise).hexdigest()
    wrong = HeldState(Holding(0, 4, False, 5, len(noise), digest), noise)
    async with members(3) as (services, hosts):
        services[1].publish(held(0, 2, 5))
        services[2].publish(wrong)
        found = await services[0].assemble(ids(hosts), StagePart(0, 2), at_most=5)
    same(found.tensors, tensors(0, 2, 5))


async def test_a_state_from_the_future_is_not_taken() -> None:
    async def never(stream: ByteStream, question: Any) -> None:
        raise AssertionError("asked for it")

    async with members(3, honest=2) as (services, hosts):
        services[1].publish(held(0, 2, 5))
        await serve(hosts[2], held(0, 2, 10**9), never)
        found = await services[0].assemble(ids(hosts), StagePart(0, 2), at_most=6)
    assert found.iteration == 5


async def test_strangers_are_told_nothing_and_noise_is_counted() -> None:
    async with members(3, honest=2) as (services, hosts):
        services[0].publish(LARGE)
        services[0].admit([hosts[1].peer_id])
        stranger = StateService(MemberStreams(hosts[2]), LIMITS)
        refused = services[0]._streams.incoming.refused
        with pytest.raises(CheckpointError):
            await stranger.assemble(ids(hosts[:1]), StagePart(0, 2), at_most=9)
        assert refused == {"not_a_member": 1}
        stream = await hosts[1].open_stream(hosts[0].peer_id, PROTOCOL)
        await raw_wire.write(stream, MemberService.STATES, b"\xc1noise")
        assert (await raw_wire.answer_on(stream)).refused is not None
        stream.close()
        assert refused == {"not_a_member": 1, "malformed": 1}
        with pytest.raises(CheckpointError):
            await services[1].fetch(Offer(held(5, 6).holding, (hosts[0].peer_id,)))
        assert refused["unknown_state"] == 2


def holding(first: int, end: int, iteration: int = 0, *, mark: str = "0", size: int = 10) -> Holding:
    return Holding(first, end, False, iteration, size, mark * 64)


def test_of_two_digests_the_one_with_more_holders_counts() -> None:
    told = {"a": [holding(0, 2, mark="1")], "b": [holding(0, 2, mark="2")], "c": [holding(0, 2, mark="2")]}
    assert offers(told) == [Offer(holding(0, 2, mark="2"), ("b", "c"), backers=2)]
    del told["c"]
    assert offers(told) == [Offer(holding(0, 2, mark="1"), ("a",), is_disputed=True)]


def test_the_fewest_states_are_fetched_and_of_those_that_reach_as_far_the_smallest() -> None:
    offered = offers({"a": [holding(0, 1), holding(0, 3, size=99), holding(1, 3)], "b": [holding(3, 6)]})
    found = covering(offered, StagePart(0, 5), needs_ends=False, at_least=0, at_most=0)
    assert found is not None
    assert [(o.holding.first_layer, o.holding.end_layer) for o in found] == [(0, 3), (3, 6)]


def test_a_part_without_layers_needs_nothing_and_a_gap_is_no_cover() -> None:
    offered = offers({"a": [holding(0, 2), holding(3, 5)]})
    bounds = {"needs_ends": False, "at_least": 0, "at_most": 0}
    assert covering(offered, StagePart(0, 0), **bounds) == []
    assert covering(offered, StagePart(1, 4), **bounds) is None
    assert covering(offered, StagePart(1, 4), needs_ends=False, at_least=1, at_most=9) is None


def test_tensors_belong_to_layers_by_their_global_names() -> None:
    assert layer_of("exp_avg_sq/model.layers.12.mlp.weight") == 12
    assert layer_of("model.embed_tokens.weight") is None
    part = of_part(tensors(0, 4) | {"model.norm.weight": torch.ones(1)}, StagePart(1, 2))
    assert set(part) == {"model.layers.1.weight"}


def test_a_holding_has_its_layers_in_order() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode((3, 2, False, 0, 1, "0" * 64)), type=Holding)
