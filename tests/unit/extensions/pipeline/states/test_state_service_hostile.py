"""Members that say they hold what they should not: whom a newcomer believes, and whose copies are kept."""

import msgspec
import pytest
import torch
from safetensors.torch import save

from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.stages.packed_state import digest_of
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.states.holdings import (
    HeldState,
    HolderCredibility,
    Holding,
    LayerHolders,
    covering,
    offers,
)
from swarmnode.extensions.pipeline.states.state_questions import StateQuestion
from swarmnode.extensions.pipeline.states.state_service import StateLimits
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL
from swarmnode.network.streams import ByteStream
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.states.test_state_service import held, ids, members, same, tensors

HOLDERS = LayerHolders({"a": (0, 4), "b": (4, 8), "b2": (4, 8), "c": (8, 12)}, {"c": "a", "a": "b"})


def said(first: int, end: int, mark: str, iteration: int = 7) -> Holding:
    return Holding(first, end, first == 0, iteration, 100, mark * 64)


def chosen(told: dict[str, list[Holding]], part: StagePart, *holders: LayerHolders) -> list[str]:
    found = covering(offers(told, holders), part, needs_ends=False, at_least=1, at_most=9)
    assert found is not None
    return [offer.holding.digest[0] for offer in found]


HONEST = {"a": [said(0, 4, "a")], "b": [said(4, 8, "b")], "b2": [said(4, 8, "b")], "c": [said(8, 12, "c")]}


@pytest.mark.parametrize("iteration", [7, 9])
def test_who_claims_every_layer_is_believed_for_none(iteration: int) -> None:
    told = HONEST | {"liar": [said(0, 4096, "e", iteration)], "z": [said(0, 4096, "e", iteration)]}
    assert chosen(told, StagePart(4, 8), HOLDERS) == ["b"]
    assert chosen(told, StagePart(0, 12, has_ends=True), HOLDERS) == ["a", "b", "c"]


def test_two_that_are_not_of_a_stage_do_not_outvote_the_one_that_is() -> None:
    told = {"a": [said(0, 4, "a")], "b": [said(0, 4, "e")], "c": [said(0, 4, "e")]}
    assert chosen(told, StagePart(0, 4)) == ["e"]
    assert chosen(told, StagePart(0, 4), HOLDERS) == ["a"]


def test_the_keeper_of_a_stage_that_is_gone_is_believed_before_others() -> None:
    told = {"a": [said(0, 4, "a"), said(8, 12, "c", 6)], "b": [said(8, 12, "e")], "z": [said(8, 12, "e")]}
    assert chosen(told, StagePart(8, 12), HOLDERS) == ["c"]


def test_before_the_first_plan_everybody_counts_and_the_whole_model_of_a_data_node_does() -> None:
    told = {"d": [said(0, 12, "d", 9)], "b": [said(4, 8, "b", 6)]}
    assert chosen(told, StagePart(4, 8)) == ["d"]
    assert chosen(told, StagePart(4, 12), HOLDERS) == ["d"]  # nobody whose stage it is has all of it


def test_credibility_follows_from_the_plan() -> None:
    assert HOLDERS.credibility("c", said(8, 12, "c")) is HolderCredibility.ASSIGNED
    assert HOLDERS.credibility("a", said(8, 12, "c")) is HolderCredibility.KEEPER
    assert HOLDERS.credibility("b", said(8, 12, "c")) is HolderCredibility.FITS
    assert HOLDERS.credibility("c", said(8, 13, "c")) is HolderCredibility.NONE


async def test_a_digest_that_is_no_text_is_a_malformed_answer() -> None:
    wrong = msgspec.msgpack.encode([[[0, 1, True, 1, 10, "x" * 64]]]).replace(b"x" * 64, b"\xff" * 64)
    async with members(3, honest=2) as (services, hosts):

        async def handler(stream: ByteStream) -> None:
            await raw_wire.read(stream, StateQuestion)
            await raw_wire.say(stream, msgspec.Raw(wrong))
            await stream.discard()

        await hosts[2].serve_streams(PROTOCOL, handler)
        services[1].publish(held(0, 2, 5))
        found = await services[0].assemble(ids(hosts), StagePart(0, 2), at_most=5)
    same(found.tensors, tensors(0, 2, 5))


async def test_a_state_without_all_its_layers_or_of_other_shapes_is_looked_for_elsewhere() -> None:
    lacking = HeldState.of(StagePart(0, 4), 5, tensors(0, 1, 5))
    other = HeldState.of(StagePart(0, 3), 5, tensors(0, 3, 5, width=4))
    narrow = {name: t.to(torch.float8_e4m3fn) for name, t in tensors(0, 2, 5).items()}
    data = save(narrow)
    tiny = HeldState(Holding(0, 5, False, 5, len(data), digest_of(data)), data)
    async with members(5) as (services, hosts):
        for service, state in zip(services[1:], (lacking, other, held(0, 2, 5), tiny), strict=True):
            service.publish(state)
        found = await services[0].assemble(ids(hosts), StagePart(0, 2), at_most=5, wanted=tensors(0, 2))
    same(found.tensors, tensors(0, 2, 5))


async def test_layers_that_a_holder_did_not_speak_of_are_not_taken_from_it() -> None:
    poison = tensors(0, 2, 5) | {name: t * 0 - 1 for name, t in tensors(2, 4, 5).items()}
    async with members(3) as (services, hosts):
        services[1].publish(HeldState.of(StagePart(0, 2), 5, poison))
        services[2].publish(held(2, 4, 5))
        found = await services[0].assemble(ids(hosts), StagePart(0, 4), at_most=5)
    same(found.tensors, tensors(0, 4, 5))


async def test_a_state_larger_than_the_stage_can_have_is_not_asked_for() -> None:
    async with members(3) as (services, hosts):
        services[1].publish(held(0, 2, 6, width=4000))
        services[2].publish(held(0, 2, 5))
        found = await services[0].assemble(ids(hosts), StagePart(0, 2), at_most=6, most_bytes=4000)
        assert found.iteration == 5
        with pytest.raises(CheckpointError):
            await services[0].assemble(ids(hosts), StagePart(0, 2), at_least=6, at_most=6, most_bytes=4000)


async def test_copies_are_kept_for_those_whom_the_plan_gives_us_only() -> None:
    async with members(3, StateLimits(max_copies=1)) as (services, hosts):
        keeper, owner, other = services
        names = ids(hosts)
        holders = LayerHolders({names[1]: (0, 2), names[2]: (2, 4)}, {names[1]: names[0], names[2]: names[1]})
        for service in services:
            service.admit(names, holders)
        other.publish(held(2, 4, 1))
        owner.publish(held(0, 3, 1))
        for service, state in ((other, held(2, 4, 1)), (owner, held(0, 3, 1))):
            assert not await service.push_copy(names[0], state)
        owner.publish(held(0, 2, 1))
        assert await owner.push_copy(names[0], held(0, 2, 1))
        # Another plan: the former owner lives, its copy is kept elsewhere and makes room.
        keeper.admit(names, LayerHolders(holders.ranges, {names[2]: names[0]}))
        assert await other.push_copy(names[0], held(2, 4, 1))
        assert keeper._copies.kept.get(names[1]) is None
