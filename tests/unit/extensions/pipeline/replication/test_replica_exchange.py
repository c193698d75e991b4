"""Replicas of a stage add up their gradients: the same bits everywhere, whatever one of them does."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.contributions import Contribution, Head, contribute
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    Combined,
    ContributionBounds,
    ContributionFault,
    GradientExchangeSettings,
    StageIteration,
)
from swarmnode.extensions.pipeline.replication.replica_exchange import ReplicaExchange
from swarmnode.extensions.pipeline.replication.replica_questions import (
    AskGradients,
    HeldContributions,
    Question,
)
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.frames import CHUNK_BYTES, encode, framed
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, MemberStreams
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.network.streams import ByteStream
from tests.contracts.hosts import p2pd_hosts
from tests.unit.extensions.pipeline import raw_wire
from tests.unit.extensions.pipeline.members import instance_of

PLAN = "ab" * 32
SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2)}
EXPECTED = ContributionBounds(SHAPES, max_tokens=100, max_visits=10)
ABOUT = StageIteration(PLAN, 1, 4)
PATIENT = GradientExchangeSettings()
SHORT = GradientExchangeSettings(contribution_timeout_s=1.5, round_timeout_s=1.5, least_bytes_per_s=1e9)
"""Where somebody is silent and that has to be waited for."""
KEYS = sorted((NodeKey(bytes([n]) * 32) for n in range(1, 6)), key=lambda key: key.peer_id)


def gradients(
    seed: int, *, tokens: int = 20, names: Sequence[str] = "abc", scale: float = 1.0
) -> GradientSum:
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: scale * tokens * torch.randn(SHAPES[n], generator=generator) for n in names}
    return GradientSum(tensors, tokens, visits=2)


@asynccontextmanager
async def replicas(
    count: int, settings: GradientExchangeSettings = PATIENT, *, honest: int | None = None
) -> AsyncGenerator[tuple[list[ReplicaExchange], list[MemoryHost]], None]:
    """Connected replicas of one stage, by peer id; those from `honest` on are bare hosts."""
    network = MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host(KEYS[n].peer_id)) for n in range(count)]
        for one, other in combinations(hosts, 2):
            await one.connect((await other.addresses())[0])
        made: list[ReplicaExchange] = []
        for host in hosts[: honest or count]:
            streams = await stack.enter_async_context(MemberStreams(host))
            made.append(await stack.enter_async_context(ReplicaExchange(streams, settings)))
        for exchange in made:
            exchange.admit([host.peer_id for host in hosts])
        yield made, hosts


async def combine(
    exchange: ReplicaExchange, own: GradientSum, count: int, bounds: ContributionBounds = EXPECTED
) -> Combined:
    replicas = [key.peer_id for key in KEYS[:count]]
    return await exchange.combine(own, StageIteration(PLAN, 1, 4), replicas, bounds)


async def together(*running: Awaitable[Combined]) -> list[Combined]:
    return list(await asyncio.gather(*running))


def same(results: Sequence[Combined]) -> dict[str, Tensor]:
    """All replicas have one sum, to the bit."""
    first = results[0]
    for other in results[1:]:
        assert other.contributors == first.contributors
        assert (other.sum.tokens, other.sum.visits) == (first.sum.tokens, first.sum.visits)
        assert set(other.sum.tensors) == set(first.sum.tensors)
        assert all(torch.equal(other.sum.tensors[name], t) for name, t in first.sum.tensors.items())
    return dict(first.sum.tensors)


def peers(*numbers: int) -> tuple[str, ...]:
    return tuple(KEYS[number].peer_id for number in numbers)


def stage_of_two() -> Assignment:
    """What peer 0 has to do under `PLAN`, from iteration 4 on: hold stage 1 together with peer 1."""
    plan = Plan(instance_of([[2], [0, 1]], path_length=2), ())
    return Assignment(plan, PLAN, peers(0, 1, 2), own=0, iteration=4)


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_replicas_end_with_the_same_weighted_mean(count: int) -> None:
    own = [gradients(n, tokens=10 + n) for n in range(count)]
    async with replicas(count) as (exchanges, _):
        results = await together(*(combine(x, g, count) for x, g in zip(exchanges, own, strict=True)))
    found = same(results)
    assert all(r.contributors == peers(*range(count)) and not r.rejected for r in results)
    tokens = sum(g.tokens for g in own)
    for name in SHAPES:
        mean = torch.stack([g.tensors[name].double() for g in own]).sum(0) / tokens
        ours = GradientSum(found, tokens, 0).of_step(1)[name].double()
        assert (ours - mean).abs().max() <= 1e-5 * mean.abs().max()


async def test_a_lone_replica_has_its_own_sum() -> None:
    own = gradients(1)
    async with replicas(1) as (exchanges, _):
        found = await combine(exchanges[0], own, 1)
    assert found.contributors == peers(0)
    assert all(torch.equal(found.sum.tensors[name], own.tensors[name]) for name in SHAPES)


async def test_a_replica_may_have_seen_nothing_or_only_a_part() -> None:
    own = [gradients(0, names="ab"), GradientSum({}, 0, 0), gradients(2, names="b")]
    async with replicas(3) as (exchanges, _):
        results = await together(*(combine(x, g, 3) for x, g in zip(exchanges, own, strict=True)))
    found = same(results)
    assert set(found) == {"a", "b"}
    assert torch.equal(found["a"], own[0].tensors["a"])
    assert results[0].contributors == peers(0, 1, 2)
    assert results[0].sum.tokens == 40


async def test_whoever_is_late_is_waited_for() -> None:
    async with replicas(3) as (exchanges, _):

        async def late() -> Combined:
            await asyncio.sleep(0.15)
            return await combine(exchanges[2], gradients(2), 3)

        results = await together(*(combine(exchanges[n], gradients(n), 3) for n in (0, 1)), late())
    same(results)
    assert results[0].contributors == peers(0, 1, 2)


@pytest.mark.parametrize("spoil", ["infinite", "too heavy"])
async def test_own_gradients_that_nobody_would_take_count_as_none(spoil: str) -> None:
    own = gradients(0) if spoil == "infinite" else gradients(0, tokens=EXPECTED.max_tokens + 1)
    if spoil == "infinite":
        own.tensors["b"][3] = math.inf
    async with replicas(2) as (exchanges, _):
        results = await together(combine(exchanges[0], own, 2), combine(exchanges[1], gradients(1), 2))
    same(results)
    assert torch.equal(results[0].sum.tensors["b"], gradients(1).tensors["b"])
    assert results[0].sum.tokens == 20


@pytest.mark.parametrize("count", [2, 3])
async def test_a_gradient_far_above_the_others_is_left_out_by_all(count: int) -> None:
    own = [gradients(n) for n in range(count - 1)] + [gradients(9, scale=100.0)]
    async with replicas(count) as (exchanges, _):
        results = await together(*(combine(x, g, count) for x, g in zip(exchanges, own, strict=True)))
    same(results)
    assert results[0].contributors == peers(*range(count - 1))
    assert all(r.rejected == {KEYS[count - 1].peer_id: ContributionFault.NORM} for r in results)


async def test_no_gradient_at_all_is_no_reason_to_distrust_the_others() -> None:
    own = [gradients(0, scale=0.0), gradients(1), gradients(2)]
    async with replicas(3) as (exchanges, _):
        results = await together(*(combine(x, g, 3) for x, g in zip(exchanges, own, strict=True)))
    same(results)
    assert results[0].contributors == peers(0, 1, 2)


# What a replica can do that is none of ours: it answers for itself, byte by byte.

Play = Callable[["Liar", ByteStream, Any], Awaitable[None]]


class Liar:
    """A replica that hears the questions of the others; `play` decides what it says."""

    def __init__(self, number: int, host: MemoryHost, play: Play) -> None:
        self.number, self.host, self.play = number, host, play
        self.asked: list[tuple[str, str]] = []

    async def serve(self, stream: ByteStream) -> None:
        question = await raw_wire.read(stream, Question)
        self.asked.append((stream.peer_id, type(question).__name__))
        await self.play(self, stream, question)

    async def give(
        self, stream: ByteStream, contribution: Any, data: bytes | bytearray, more: bytes = b""
    ) -> None:
        await raw_wire.say(stream, contribution, body_bytes=len(data))
        await stream.send(bytes(data) + more)
        await stream.discard()

    async def say(self, stream: ByteStream, contributions: Sequence[Contribution]) -> None:
        """What it holds: one contribution of each replica, from the first on."""
        held = {KEYS[author].peer_id: one.digest for author, one in enumerate(contributions)}
        await raw_wire.say(stream, HeldContributions(held))
        await stream.discard()


async def against(play: Play, count: int = 3, settings: GradientExchangeSettings = PATIENT) -> list[Combined]:
    """What the honest ones come to when the last replica plays this."""
    honest = count - 1
    async with replicas(count, settings, honest=honest) as (exchanges, hosts):
        liar = Liar(honest, hosts[honest], play)
        await hosts[honest].serve_streams(PROTOCOL, liar.serve)
        results = await together(*(combine(x, gradients(n), count) for n, x in enumerate(exchanges)))
    same(results)
    return results


def given(number: int) -> Contribution:
    return contribute(gradients(number), EXPECTED)


def doctored(**fields: Any) -> tuple[Head, bytes]:
    """(head, bytes) of the last replica's contribution with these fields of the head changed."""
    honest = given(2)
    data = fields.pop("data", bytes(honest.data))
    return msgspec.structs.replace(honest.head, **fields), data


def poisoned(value: float) -> tuple[Head, bytes]:
    flat = torch.cat([gradients(2).tensors[name].reshape(-1) for name in sorted(SHAPES)])
    flat[11] = value
    return doctored(data=flat.numpy().tobytes())


BAD: dict[str, tuple[Callable[[], tuple[Any, bytes]], str]] = {
    "nan": (lambda: poisoned(math.nan), Refusal.NOT_FINITE),
    "infinite": (lambda: poisoned(math.inf), Refusal.NOT_FINITE),
    "huge weight": (lambda: doctored(tokens=1_000_000), ContributionFault.WEIGHT),
    "many micro-batches": (lambda: doctored(visits=11), ContributionFault.WEIGHT),
    "no token": (lambda: doctored(tokens=0), ContributionFault.WEIGHT),
    "other parameters": (lambda: doctored(present=b"\xff"), Refusal.WRONG_SHAPE),
    "more parameters": (lambda: doctored(present=b"\x07\x00"), Refusal.WRONG_SHAPE),
    "bytes that are not the head's": (lambda: doctored(present=b"\x03"), Refusal.WRONG_SHAPE),
    "a negative weight": (lambda: ([-1, 2, b"\x07"], b""), Refusal.MALFORMED),
    "noise": (lambda: (["noise"], b""), Refusal.MALFORMED),
}


@pytest.mark.parametrize("what", BAD)
async def test_what_no_replica_may_send_is_left_out_by_all_and_named(what: str) -> None:
    make, fault = BAD[what]
    head, data = make()

    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        if isinstance(question, AskGradients):
            await liar.give(stream, head, data)
        else:
            await liar.say(stream, [])

    results = await against(play)
    assert all(r.contributors == peers(0, 1) for r in results)
    assert all(r.rejected == {KEYS[2].peer_id: fault} for r in results)


async def test_bytes_beyond_those_that_belong_to_the_head_are_not_read() -> None:
    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        if isinstance(question, AskGradients):
            await liar.give(stream, *doctored(), bytes(64 * CHUNK_BYTES))
        else:
            await liar.say(stream, [given(n) for n in range(3)])

    results = await against(play)
    assert results[0].contributors == peers(0, 1, 2)


async def test_a_head_without_end_is_not_read() -> None:
    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        await stream.send(framed(MemberService.GRADIENTS, b"")[:6] + (2**31).to_bytes(4, "big"))
        await stream.discard()

    results = await against(play)
    assert results[0].contributors == peers(0, 1)


async def test_whoever_tells_two_stories_is_left_out_where_most_others_heard_another() -> None:
    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        story = contribute(gradients(20 + (stream.peer_id == KEYS[0].peer_id)), EXPECTED)
        if isinstance(question, AskGradients):
            await liar.give(stream, story.head, story.data)
        else:
            await liar.say(stream, [given(0), given(1), given(2), story])

    honest, count = 3, 4
    async with replicas(count, honest=honest) as (exchanges, hosts):
        await hosts[honest].serve_streams(PROTOCOL, Liar(honest, hosts[honest], play).serve)
        results = await together(*(combine(x, gradients(n), count) for n, x in enumerate(exchanges)))
    assert results[0].contributors == peers(0, 1, 2)
    assert results[0].rejected == {KEYS[3].peer_id: ContributionFault.LATE}
    assert results[1].contributors == results[2].contributors == peers(0, 1, 2, 3)


async def test_nobody_can_speak_against_most_others() -> None:
    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        if isinstance(question, AskGradients):
            await liar.give(stream, *doctored())
        else:
            await liar.say(stream, [given(7), given(8), given(2)])

    results = await against(play)
    assert all(r.contributors == peers(0, 1, 2) for r in results)


PHASES = ["absent", "frozen", "after one contribution", "half-way", "before agreeing", "after one agreeing"]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_death_in_any_phase_leaves_the_survivors_equal(phase: str) -> None:
    honest = given(2)
    met: set[str] = set()

    async def play(liar: Liar, stream: ByteStream, question: Any) -> None:
        first = not met
        met.add(type(question).__name__)
        if phase == "absent":
            return
        if phase == "frozen":
            await asyncio.sleep(3600)
        if isinstance(question, AskGradients):
            if phase == "half-way":
                await raw_wire.say(stream, honest.head, body_bytes=len(honest.data))
                await stream.send(bytes(honest.data)[:50])
                return
            if phase != "after one contribution" or first:
                await liar.give(stream, honest.head, honest.data)
        elif phase == "after one agreeing" and stream.peer_id == KEYS[0].peer_id:
            await liar.say(stream, [given(n) for n in range(3)])

    results = await against(play, settings=SHORT if phase == "frozen" else PATIENT)
    counted = phase not in ("absent", "frozen", "half-way", "after one contribution")
    assert all(r.contributors == (peers(0, 1, 2) if counted else peers(0, 1)) for r in results)
    if counted:
        return
    faults = {r.rejected[KEYS[2].peer_id] for r in results}
    assert faults == ({"late", "silent"} if phase == "after one contribution" else {"silent"})


async def test_who_comes_after_all_is_over_learns_that_it_did_not_count() -> None:
    async with replicas(3, SHORT) as (exchanges, _):
        results = await together(*(combine(exchanges[n], gradients(n), 3) for n in range(2)))
        assert all(r.rejected == {KEYS[2].peer_id: ContributionFault.SILENT} for r in results)
        late = await combine(exchanges[2], gradients(2), 3)
        digests = ("1" * 64, "1" * 64, "2" * 64)
        again = await asyncio.gather(*(_compare(x, d, 3) for x, d in zip(exchanges, digests, strict=True)))
    same([*results, late])
    assert late.rejected == {KEYS[2].peer_id: ContributionFault.LATE}
    assert [one.agrees for one in again] == [True, True, False]


async def test_after_the_step_its_gradients_are_forgotten_and_a_late_one_follows_the_others() -> None:
    async with replicas(3, SHORT) as (exchanges, _):
        await together(*(combine(exchanges[n], gradients(n), 3) for n in range(2)))
        await asyncio.gather(*(_compare(exchanges[n], "1" * 64, 3) for n in range(2)))
        late = await combine(exchanges[2], gradients(2), 3)
        found = await _compare(exchanges[2], "2" * 64, 3)
    assert late.contributors == peers(2)
    assert not found.agrees
    assert found.ask == peers(0, 1)


async def _compare(exchange: ReplicaExchange, digest: str, count: int, before: str = "0" * 64) -> Any:
    replicas = [key.peer_id for key in KEYS[:count]]
    return await exchange.compare(digest, StageIteration(PLAN, 1, 4), replicas, before=before)


async def test_the_minority_is_told_whom_to_ask() -> None:
    async with replicas(3) as (exchanges, _):
        digests = ["1" * 64, "2" * 64, "2" * 64]
        found = await asyncio.gather(*(_compare(x, d, 3) for x, d in zip(exchanges, digests, strict=True)))
    assert [one.agrees for one in found] == [False, True, True]
    assert found[0].ask == peers(1, 2)
    assert found[1].ask == peers(2)


async def test_of_two_that_differ_none_is_right_and_silence_is_no_vote() -> None:
    async with replicas(3, SHORT) as (exchanges, _):
        digests = ["1" * 64, "2" * 64]
        found = await asyncio.gather(*(_compare(exchanges[n], d, 3) for n, d in enumerate(digests)))
    assert [one.agrees for one in found] == [False, False]
    assert [side.peers for side in found[0].rivals] == [peers(0), peers(1)]
    assert found[0].rivals == found[1].rivals


async def test_who_does_not_know_where_it_stands_has_no_vote() -> None:
    async with replicas(2) as (exchanges, _):
        found = await asyncio.gather(
            _compare(exchanges[0], "1" * 64, 2, before=""), _compare(exchanges[1], "2" * 64, 2)
        )
    assert [one.agrees for one in found] == [False, True]
    assert (found[0].ask, found[0].digest) == (peers(1), "2" * 64)


async def test_strangers_and_other_stages_are_told_nothing() -> None:
    async with replicas(3, honest=2) as (exchanges, hosts):
        for exchange in exchanges:
            exchange.admit(peers(0, 1))
        results = await together(*(combine(x, gradients(n), 2) for n, x in enumerate(exchanges)))
        stream = await hosts[2].open_stream(KEYS[0].peer_id, PROTOCOL)
        await stream.discard()
        exchanges[0].admit(peers(0, 1, 2), stage_of_two())
        nosy = ReplicaExchange(MemberStreams(hosts[2]))
        found = await combine(nosy, gradients(2), 3)
    same(results)
    assert exchanges[0]._streams.incoming.refused == {"not_a_member": 2}
    assert found.contributors == peers(2)


async def test_what_is_no_question_is_refused() -> None:
    async with replicas(2, honest=1) as (exchanges, hosts):
        stream = await hosts[1].open_stream(KEYS[0].peer_id, PROTOCOL)
        await raw_wire.write(stream, MemberService.GRADIENTS, encode(["gradients", [PLAN, 1, -4]]))
        assert (await raw_wire.answer_on(stream)).refused is not None
        stream.close()
        assert exchanges[0]._streams.incoming.refused == {Refusal.MALFORMED: 1}


async def test_over_the_daemon_replicas_combine_and_compare(tmp_path: Path) -> None:
    new_host = p2pd_hosts(tmp_path)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(new_host()) for _ in range(3)]
        for one, other in combinations(hosts, 2):
            await one.connect((await other.addresses())[0])
        peer_ids = [host.peer_id for host in hosts]
        expected = ContributionBounds({"w": (300_000,)}, max_tokens=100, max_visits=10)
        about = StageIteration(PLAN, 1, 4), peer_ids
        exchanges: list[ReplicaExchange] = []
        for host in hosts:
            streams = await stack.enter_async_context(MemberStreams(host))
            exchange = ReplicaExchange(streams)
            exchanges.append(await stack.enter_async_context(exchange))
            exchange.admit(peer_ids)
        own = [GradientSum({"w": torch.full((300_000,), 2.0**n)}, 10, 1) for n in range(3)]
        results = await together(
            *(x.combine(one, *about, expected) for x, one in zip(exchanges, own, strict=True))
        )
        agreements = await asyncio.gather(*(x.compare("1" * 64, *about) for x in exchanges))
    assert torch.equal(same(results)["w"], torch.full((300_000,), 7.0))
    assert all(len(one.contributors) == 3 for one in results)
    assert all(one.agrees for one in agreements)
