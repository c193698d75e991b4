"""Whatever a peer does, a node goes on: the offence is counted, and an honest peer's next group is accepted.

Every test puts a victim, an honest node and Mallory on one network. Mallory has a valid identity, speaks the
protocol as she likes, and is connected to both.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec
import pytest
import zstandard

from swarmnode.errors import NetworkError, Rejected, TaskError
from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, HASH_BYTES, MAX_REQUEST_BYTES
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.exchange_stats import PeerFigures
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.gossip.header_gossip import topic_of
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_POOL_HEADERS_PER_AUTHOR, MAX_RAW_BODY_BYTES, PROVEN_AFTER
from swarmnode.exchange.messages import Answer, decode_body, encode_body, encode_header, hash_body
from swarmnode.exchange.peers.reputation import FULL_SCORE
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT
from swarmnode.identity.envelope import seal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Handler
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.tasks.task import MAX_INDEX, draw_train, is_held_out, score_strictly
from swarmnode.types import Completion, Example, ExampleKey, FinishReason, RolloutGroup, Scores, one_span

TOPIC = topic_of("test")


# ---- the stage ----


class Addition:
    """`12 + 7 =`. Its judge has weaknesses that a hostile answer can reach."""

    name = "addition"
    version = "1"

    def __init__(self) -> None:
        self.release = threading.Event()

    def examples(self, seed: int) -> Iterator[Example]:
        rng = random.Random(seed)
        index = 0
        while True:
            a, b = rng.randrange(1000), rng.randrange(1000)
            yield Example(ExampleKey("addition", "1", seed, index), f"{a} + {b} =", {"answer": str(a + b)})
            index += 1

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        if "hang" in completions:
            self.release.wait()
        if "crash" in completions:
            raise ZeroDivisionError("the judge did not expect this answer")
        if "exit" in completions:
            raise SystemExit(1)
        if "refuse" in completions:
            raise TaskError("cannot be scored")
        if "reject" in completions:
            raise Rejected("a reason that nobody knows")
        if "nan" in completions:
            return [{"correct": float("nan")} for _ in completions]
        return [{"correct": float(text == example.columns["answer"])} for text in completions]


def encode(text: str, finish: FinishReason) -> tuple[int, ...]:
    if text == "untokenizable":
        raise OverflowError("the tokenizer did not expect this answer")
    return tuple(text.encode()) + ((256,) if finish == "stop" else ())


def prompt_ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def group_of(author: str, number: int, *, texts: Sequence[str] | None = None) -> RolloutGroup:
    """Two right and two wrong answers to the `number`-th example, or the texts given."""
    task = Addition()
    example = next(islice(draw_train(task, 1), number, None))
    if texts is None:
        answer = str(example.columns["answer"])
        texts = [answer, answer, "no idea", f"{number}?"]
    scores = tuple({"correct": float(place % 2)} for place in range(len(texts)))
    if all(text not in {"hang", "crash", "exit", "refuse", "reject", "nan"} for text in texts):
        scores = score_strictly(task, example, texts)
    return RolloutGroup(
        example=example,
        completions=tuple(Completion(text, (1,), None, one_span(0, 1), "stop") for text in texts),
        scores=scores,
        author=author,
        policy_version=0,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


@dataclass
class Node:
    key: NodeKey
    host: MemoryHost
    exchange: Exchange
    published: int = 0

    async def publish(self) -> None:
        """Announce one group that nobody announced before."""
        self.published += 1
        await self.exchange.publish([group_of(self.key.peer_id, 1000 + self.published)])

    def dropped(self, reason: str) -> int:
        return self.exchange.stats().dropped.get(reason, 0)


@dataclass
class Mallory:
    key: NodeKey
    host: MemoryHost
    clock: Clock
    bodies: dict[bytes, bytes] = field(default_factory=dict)

    async def serve(self, peer: str, request: bytes) -> bytes:
        return self.bodies.get(request[:HASH_BYTES], b"")

    def compose(self, number: int = 0, texts: Sequence[str] | None = None) -> SignedGroup:
        group = group_of(self.key.peer_id, number)
        honest = compose(group, self.key, swarm="test", model=ModelLabel("tiny", 1), now=self.clock())
        if texts is None:
            return honest
        answers = tuple(Answer(text, "stop") for text in texts)
        body = encode_body(msgspec.structs.replace(decode_body(honest.body), answers=answers))
        return self.with_body(honest, body, group_size=len(texts))

    def with_body(self, composed: SignedGroup, body: bytes, **changes: object) -> SignedGroup:
        """A correctly signed header for any bytes at all."""
        header = msgspec.structs.replace(
            composed.header, body_hash=hash_body(body), body_bytes=len(body), **changes
        )
        return SignedGroup(
            self.key.peer_id, header, seal(self.key, HEADER_CONTEXT, encode_header(header)), body
        )

    async def announce(self, composed: SignedGroup) -> None:
        self.bodies[composed.header.body_hash] = composed.body
        await self.host.publish(TOPIC, composed.sealed)


@dataclass
class Stage:
    victim: Node
    honest: Node
    mallory: Mallory
    task: Addition
    clock: Clock

    async def goes_on(self) -> None:
        """The honest node's next group is accepted by the victim."""
        await self.honest.publish()
        async with asyncio.timeout(60):
            while True:
                groups = await self.victim.exchange.collect(1, 0, 5.0)
                if any(group.author == self.honest.key.peer_id for group in groups):
                    return

    async def counted(self, reason: str, times: int = 1) -> None:
        await until(lambda: self.victim.dropped(reason) >= times)
        assert self.victim.dropped(reason) == times

    def figures_of(self, peer: str) -> PeerFigures:
        unknown = PeerFigures(peer, 0, 0, FULL_SCORE, False, "newcomer")
        return next((one for one in self.victim.exchange.stats().peers if one.peer == peer), unknown)

    def score_of(self, author: NodeKey) -> float:
        return self.figures_of(author.peer_id).score

    def score_of_mallory(self) -> float:
        return self.score_of(self.mallory.key)


@pytest.fixture
def stage() -> Callable[..., object]:
    @asynccontextmanager
    async def make(*, mallory_serves: Handler | None = None, **settings: object) -> AsyncIterator[Stage]:
        network, clock, task = MemoryNetwork(), Clock(), Addition()
        keys = [NodeKey(bytes([number]) * 32) for number in (1, 2, 3)]

        def exchange(host: MemoryHost, key: NodeKey, **own: object) -> Exchange:
            return Exchange(
                host,
                key,
                {"addition": task},
                encode=encode,
                prompt_ids=prompt_ids,
                settings=ExchangeSettings(swarm="test", **{"patience_s": 30.0, **own}),
                model_family="tiny",
                model_size=1,
                clock=clock,
                rng=random.Random(0),
            )

        async with (
            network.host(keys[0].peer_id) as host,
            network.host(keys[1].peer_id) as honest_host,
            network.host(keys[2].peer_id) as hostile_host,
            exchange(host, keys[0], **settings) as victim,
            exchange(honest_host, keys[1], prefetch_groups=0) as honest,
        ):
            for other in (honest_host, hostile_host):
                await other.connect(host.address)
            mallory = Mallory(keys[2], hostile_host, clock)
            await hostile_host.serve(
                BODY_PROTOCOL, mallory_serves or mallory.serve, max_request_bytes=MAX_REQUEST_BYTES
            )
            try:
                yield Stage(
                    Node(keys[0], host, victim), Node(keys[1], honest_host, honest), mallory, task, clock
                )
            finally:
                task.release.set()

    return make


async def test_the_stage_is_fair_when_nobody_is_hostile(stage):
    async with stage() as s:
        await s.mallory.announce(s.mallory.compose())
        [group] = await s.victim.exchange.collect(1, 0, 30.0)
        assert group.author == s.mallory.key.peer_id
        await s.goes_on()
        assert s.victim.exchange.stats().dropped == {}


# ---- headers ----


def resealed(mallory: Mallory, **changes: object) -> bytes:
    return mallory.with_body(mallory.compose(), b"any body", **changes).sealed


def sealed_fields(mallory: Mallory, place: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(encode_header(mallory.compose().header))
    fields[place] = value
    return seal(mallory.key, HEADER_CONTEXT, msgspec.msgpack.encode(fields))


def flip_last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


STRANGER = NodeKey(b"\x77" * 32)

HEADERS = {
    "nothing": (lambda m: b"", "malformed"),
    "garbage": (lambda m: b"\xc1" * 200, "malformed"),
    "text": (lambda m: b"{'batch_id': None}", "malformed"),
    "just 7": (lambda m: b"\x07", "malformed"),
    "deep nesting": (lambda m: b"\x91" * 1000, "malformed"),
    "oversized": (lambda m: m.compose().sealed + bytes(1024), "too_large"),
    "huge": (lambda m: bytes(60_000), "too_large"),
    "trailing byte": (lambda m: m.compose().sealed + b"\0", "malformed"),
    "wrong signature": (lambda m: flip_last_byte(m.compose().sealed), "bad_signature"),
    "another purpose": (
        lambda m: seal(m.key, "manifest", encode_header(m.compose().header)),
        "bad_signature",
    ),
    "signed by a stranger": (
        lambda m: seal(STRANGER, HEADER_CONTEXT, encode_header(m.compose().header)),
        "sender_mismatch",
    ),
    "author is no peer id": (
        lambda m: msgspec.msgpack.encode(["mallory", b"", bytes(64)]),
        "bad_peer_id",
    ),
    "another protocol": (lambda m: resealed(m, protocol=1), "other_protocol"),
    "another swarm": (lambda m: resealed(m, swarm="elsewhere"), "other_swarm"),
    "unknown task": (lambda m: resealed(m, task="os.system"), "other_task"),
    "unknown version": (lambda m: resealed(m, version="2"), "other_version"),
    "old": (lambda m: resealed(m, created_ms=0), "expired"),
    "from the future": (lambda m: resealed(m, created_ms=2**52), "from_the_future"),
    "index out of bounds": (lambda m: sealed_fields(m, 7, MAX_INDEX), "malformed"),
    "negative index": (lambda m: sealed_fields(m, 7, -1), "malformed"),
    "seed out of bounds": (lambda m: sealed_fields(m, 6, 2**63), "malformed"),
    "huge group": (lambda m: sealed_fields(m, 8, 2**31), "malformed"),
    "empty group": (lambda m: sealed_fields(m, 8, 0), "malformed"),
    "claim is NaN": (lambda m: sealed_fields(m, 9, float("nan")), "malformed"),
    "claim is infinite": (lambda m: sealed_fields(m, 9, float("inf")), "malformed"),
    "spread is NaN": (lambda m: sealed_fields(m, 10, float("nan")), "malformed"),
    "claim is text": (lambda m: sealed_fields(m, 9, "1.0"), "malformed"),
    "huge body": (lambda m: sealed_fields(m, 3, 2**40), "malformed"),
    "short hash": (lambda m: sealed_fields(m, 2, b"\0"), "malformed"),
    "no spread": (lambda m: resealed(m, reward_std=0.0), "no_spread"),
    "unknown spread": (lambda m: resealed(m, reward_std=None), "no_spread"),
}


@pytest.mark.parametrize("attack", HEADERS)
async def test_a_bad_header_is_counted_and_the_next_good_one_accepted(stage, attack: str):
    craft, reason = HEADERS[attack]
    async with stage() as s:
        await s.mallory.host.publish(TOPIC, craft(s.mallory))
        await s.counted(reason)
        assert s.victim.exchange.stats().headers_accepted == 0
        await s.goes_on()


async def test_no_mutation_of_a_header_gets_through(stage):
    rng = random.Random(0)
    async with stage(prefetch_groups=0) as s:
        sealed = s.mallory.compose().sealed
        for _ in range(300):
            mutated = bytearray(sealed)
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            if bytes(mutated) == sealed:
                continue
            # An hour later she is forgiven, so that every message is looked at.
            s.clock.now += 3600
            await s.mallory.host.publish(TOPIC, bytes(mutated))
            await asyncio.sleep(0)
        await until(lambda: s.victim.exchange.stats().headers_seen >= 295)
        stats = s.victim.exchange.stats()
        assert stats.headers_accepted == 0
        assert set(stats.dropped) <= {"malformed", "bad_signature", "bad_peer_id"}
        await s.goes_on()


async def test_a_header_of_another_node_cannot_be_sent_on_as_ones_own(stage):
    async with stage() as s:
        honest = compose(
            group_of(s.honest.key.peer_id, 5),
            s.honest.key,
            swarm="test",
            model=ModelLabel("", None),
            now=s.clock(),
        )
        await s.mallory.host.publish(TOPIC, honest.sealed)
        await s.counted("sender_mismatch")
        assert s.score_of_mallory() == 80.0
        assert s.score_of(s.honest.key) == 100.0
        await s.goes_on()


async def test_the_same_header_again_is_not_fetched_again(stage):
    async with stage() as s:
        replayed = s.mallory.compose()
        for _ in range(3):
            await s.mallory.announce(replayed)
        await s.counted("duplicate", 2)
        assert len(await s.victim.exchange.collect(4, 0, 0.2)) == 1
        await s.goes_on()


async def test_the_same_body_signed_again_is_not_fetched_again(stage):
    async with stage() as s:
        first = s.mallory.compose()
        await s.mallory.announce(first)
        later = s.mallory.with_body(first, first.body, created_ms=first.header.created_ms + 1, index=0)
        await s.mallory.announce(later)
        await s.counted("duplicate")
        await s.goes_on()


async def test_a_flood_of_headers_costs_the_flooder_only(stage):
    async with stage(prefetch_groups=0) as s:
        for number in range(300):
            await s.mallory.announce(s.mallory.compose(number))
            await asyncio.sleep(0)
        await until(lambda: s.victim.exchange.stats().headers_seen >= 300)
        stats = s.victim.exchange.stats()
        assert stats.dropped["rate_limited"] == 300 - 64
        assert stats.headers_waiting <= MAX_POOL_HEADERS_PER_AUTHOR
        await s.goes_on()


async def test_a_forger_is_banned_and_disconnected_and_not_heard(stage):
    async with stage() as s:
        for number in range(5):
            await s.mallory.host.publish(TOPIC, flip_last_byte(s.mallory.compose(number).sealed))
        await s.counted("bad_signature", 5)
        assert s.victim.exchange.stats().banned_peers == (s.mallory.key.peer_id,)
        async with asyncio.timeout(30):
            while s.mallory.key.peer_id in await s.victim.host.peers():  # noqa: ASYNC110  a Host has no event to wait for
                await asyncio.sleep(0.01)
        heard = s.victim.exchange.stats().headers_accepted
        await s.mallory.announce(s.mallory.compose(10))
        await s.goes_on()
        assert s.victim.exchange.stats().headers_accepted == heard + 1, "the honest one's"


async def test_what_a_forger_announced_before_is_not_fetched_any_more(stage):
    async with stage(prefetch_groups=0) as s:
        await s.mallory.announce(s.mallory.compose(10))
        for number in range(5):
            await s.mallory.host.publish(TOPIC, flip_last_byte(s.mallory.compose(number).sealed))
        await s.counted("bad_signature", 5)
        await s.goes_on()
        assert await s.victim.exchange.collect(1, 0, 0.1) == []
        assert s.victim.exchange.stats().headers_waiting == 1


async def test_a_swarm_with_a_list_hears_nobody_else(stage):
    listed = frozenset({NodeKey(b"\2" * 32).peer_id})
    async with stage(publishers=listed) as s:
        await s.mallory.announce(s.mallory.compose())
        await s.counted("not_a_publisher")
        await s.goes_on()


# ---- bodies ----


def bomb(m: Mallory) -> SignedGroup:
    return m.with_body(m.compose(), zstandard.compress(bytes(100 * MAX_RAW_BODY_BYTES)))


def raw_body(m: Mallory, raw: bytes) -> SignedGroup:
    return m.with_body(m.compose(), zstandard.compress(raw))


def edited(m: Mallory, **changes: object) -> SignedGroup:
    composed = m.compose()
    return m.with_body(composed, encode_body(msgspec.structs.replace(decode_body(composed.body), **changes)))


def held_out(m: Mallory) -> SignedGroup:
    index = next(e.key.index for e in Addition().examples(1) if is_held_out(e.prompt))
    composed = m.compose()
    body = encode_body(msgspec.structs.replace(decode_body(composed.body), index=index))
    return m.with_body(composed, body, index=index)


BODIES = {
    "garbage": (lambda m: m.with_body(m.compose(), b"\xff" * 500), "bad_compression"),
    "bomb": (bomb, "bad_compression"),
    "no content size": (
        lambda m: m.with_body(m.compose(), zstandard.ZstdCompressor(write_content_size=False).compress(b"a")),
        "bad_compression",
    ),
    "two frames": (lambda m: m.with_body(m.compose(), m.compose().body * 2), "bad_compression"),
    "trailing byte": (lambda m: m.with_body(m.compose(), m.compose().body + b"\0"), "bad_compression"),
    "truncated": (lambda m: m.with_body(m.compose(), m.compose().body[:-1]), "bad_compression"),
    "no msgpack": (lambda m: raw_body(m, b"\xc1" * 100), "malformed_body"),
    "deep nesting": (lambda m: raw_body(m, b"\x91" * 1_000_000 + b"\xc0"), "malformed_body"),
    "another shape": (lambda m: raw_body(m, msgspec.msgpack.encode({"completions": []})), "malformed_body"),
    "no answers": (lambda m: edited(m, answers=()), "malformed_body"),
    "one answer": (lambda m: edited(m, answers=(Answer("7", "stop"),)), "malformed_body"),
    "513 answers": (lambda m: edited(m, answers=(Answer("7", "stop"),) * 513), "malformed_body"),
    "long answer": (lambda m: edited(m, answers=(Answer("x" * 200_000, "stop"),) * 4), "malformed_body"),
    "three of four answers": (lambda m: edited(m, answers=(Answer("7", "stop"),) * 3), "body_mismatch"),
    "another author": (lambda m: edited(m, author=STRANGER.peer_id), "body_mismatch"),
    "another example": (lambda m: edited(m, index=4000), "body_mismatch"),
    "another task": (lambda m: edited(m, task="other"), "body_mismatch"),
    "held-out example": (held_out, "not_drawable"),
    "answers without tokens": (
        lambda m: edited(m, answers=(Answer("", "stop"),) * 4),
        "no_tokens",
    ),
    "too many tokens": (lambda m: m.compose(texts=["x" * 5000, "y" * 5000, "8", "9"]), "too_long"),
    "all wrong": (lambda m: m.compose(texts=["a", "b", "c", "d"]), "zero_advantage"),
    "judge crashes": (lambda m: m.compose(texts=["crash", "7"]), "internal"),
    "judge wants to exit": (lambda m: m.compose(texts=["exit", "7"]), "internal"),
    "judge refuses": (lambda m: m.compose(texts=["refuse", "7"]), "unscorable"),
    "judge rejects": (lambda m: m.compose(texts=["reject", "7"]), "internal"),
    "judge says NaN": (lambda m: m.compose(texts=["nan", "7"]), "unscorable"),
    "tokenizer crashes": (lambda m: m.compose(texts=["untokenizable", "7"]), "internal"),
}


@pytest.mark.parametrize("attack", BODIES)
async def test_a_bad_body_is_counted_and_the_next_good_one_accepted(stage, attack: str):
    craft, reason = BODIES[attack]
    async with stage() as s:
        await s.mallory.announce(craft(s.mallory))
        await s.counted(reason)
        await s.goes_on()
        accepted = {one.peer: one.accepted for one in s.victim.exchange.stats().peers if one.accepted}
        assert accepted == {s.honest.key.peer_id: 1}


async def test_a_prompt_that_our_policy_cannot_take_is_left_alone_and_is_no_offence(stage):
    async with stage(max_prompt_tokens=10) as s:
        long = next(n for n in range(100) if len(group_of("", n).example.prompt) > 10)
        await s.mallory.announce(s.mallory.compose(long))
        await s.counted("long_prompt")
        assert s.score_of_mallory() == 100.0
        assert s.victim.exchange.stats().accepted == 0


async def test_a_liar_is_trained_on_by_our_judge_and_found_out(stage):
    async with stage() as s:
        composed = s.mallory.compose()
        liar = s.mallory.with_body(composed, composed.body, reward_mean=1.0, reward_std=0.001)
        await s.mallory.announce(liar)
        [group] = await s.victim.exchange.collect(1, 0, 30.0)
        assert group.rewards == (1.0, 1.0, 0.0, 0.0)
        assert s.victim.dropped("false_claim") == 1
        assert s.score_of_mallory() == 90.0
        await s.goes_on()


async def test_claiming_reward_for_wrong_answers_trains_nobody_costs_score_and_a_pause(stage):
    async with stage() as s:
        for number in range(12):
            wrong = s.mallory.compose(number, texts=["a", "b", "c", f"wrong {number}"])
            await s.mallory.announce(
                s.mallory.with_body(wrong, wrong.body, reward_mean=0.75, reward_std=0.43)
            )
        await s.counted("false_claim")
        await s.counted("zero_advantage")
        await s.goes_on()
        assert s.victim.dropped("false_claim") == 1, "it is not asked for the others for a while"
        assert s.score_of_mallory() == 90.0
        await s.goes_on()


async def test_the_body_of_another_node_fits_under_no_other_header(stage):
    async with stage() as s:
        honest = compose(
            group_of(s.honest.key.peer_id, 5),
            s.honest.key,
            swarm="test",
            model=ModelLabel("", None),
            now=s.clock(),
        )
        await s.mallory.announce(s.mallory.with_body(s.mallory.compose(5), honest.body))
        await s.counted("body_mismatch")
        await s.goes_on()


async def test_the_answers_of_another_node_are_trained_on_once(stage):
    async with stage() as s:
        await s.honest.publish()
        [group] = await s.victim.exchange.collect(1, 0, 30.0)
        copied = compose(
            replace(group, author=s.mallory.key.peer_id),
            s.mallory.key,
            swarm="test",
            model=ModelLabel("", None),
            now=s.clock(),
        )
        await s.mallory.announce(copied)
        await s.counted("copied")
        assert s.score_of_mallory() == 100.0, "who comes second may be the one that was copied"
        assert s.figures_of(s.mallory.key.peer_id).paused_s > 0
        await s.goes_on()


async def test_a_proven_author_whose_answers_somebody_else_told_first_is_asked_on(stage):
    async with stage() as s:
        ledger, author = s.victim.exchange._ledger, s.mallory.key.peer_id
        await s.honest.publish()
        [group] = await s.victim.exchange.collect(1, 0, 30.0)
        for _ in range(PROVEN_AFTER):
            ledger.accept(author)
        told = replace(group, author=author)
        await s.mallory.announce(
            compose(told, s.mallory.key, swarm="test", model=ModelLabel("", None), now=s.clock())
        )
        await s.counted("copied")
        assert s.figures_of(author).paused_s == 0


async def test_a_judge_that_hangs_stalls_neither_the_loop_nor_the_next_judgement(stage):
    async with stage(score_timeout_s=1.0) as s:
        await s.mallory.announce(s.mallory.compose(texts=["hang", "7"]))
        await s.counted("score_timeout")
        assert s.score_of_mallory() == 99.0
        await s.goes_on()


# ---- streams ----


async def never_answer(peer: str, request: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


async def answer_late(peer: str, request: bytes) -> bytes:
    await asyncio.sleep(5)
    return b"late"


async def hang_up(peer: str, request: bytes) -> bytes:
    raise ConnectionResetError


async def answer_wrongly(peer: str, request: bytes) -> bytes:
    return b"another body"


async def answer_too_much(peer: str, request: bytes) -> bytes:
    return bytes(3_000_000)


async def answer_nothing(peer: str, request: bytes) -> bytes:
    return b""


SERVERS = {
    "never": (never_answer, "timeout"),
    "late": (answer_late, "timeout"),
    "hangs up": (hang_up, "unavailable"),
    "wrong body": (answer_wrongly, "wrong_body"),
    "too large": (answer_too_much, "wrong_body"),
    "nothing": (answer_nothing, "unavailable"),
}


@pytest.mark.parametrize("behaviour", SERVERS)
async def test_a_peer_that_serves_badly_costs_one_deadline(stage, behaviour: str):
    handler, reason = SERVERS[behaviour]
    async with stage(mallory_serves=handler, fetch_timeout_s=1.0) as s:
        for number in range(20):
            await s.mallory.announce(s.mallory.compose(number))
        await s.goes_on()
        await until(lambda: s.victim.dropped(reason) > 0)
        await s.goes_on()


async def test_a_silent_peer_is_not_asked_again_for_a_while(stage):
    asked: list[bytes] = []

    async def never(peer: str, request: bytes) -> bytes:
        asked.append(request)
        return await never_answer(peer, request)

    async with stage(mallory_serves=never, fetch_timeout_s=0.2) as s:
        for number in range(5):
            await s.mallory.announce(s.mallory.compose(number))
        await s.counted("timeout")
        await s.goes_on()
        assert len(asked) == 1
        s.clock.now += 6
        await s.counted("timeout", 2)
        assert len(asked) == 2


async def test_a_body_of_the_right_length_and_the_wrong_hash_is_the_servers_fault(stage):
    async with stage() as s:
        composed = s.mallory.compose()
        await s.mallory.announce(composed)
        s.mallory.bodies[composed.header.body_hash] = flip_last_byte(composed.body)
        await s.counted("wrong_body")
        await s.counted("unavailable")
        assert s.score_of_mallory() == 75.0
        await s.goes_on()


async def test_garbage_requests_are_answered_with_nothing(stage):
    async with stage() as s:
        for request in (b"", b"garbage", bytes(31)):
            assert await ask(s, request) == b""
        assert s.victim.dropped("bad_request") == 3
        assert await ask(s, bytes(32) + s.victim.key.peer_id.encode()) == b""
        with pytest.raises(NetworkError):
            await ask(s, bytes(100_000))
        assert s.score_of_mallory() == 70.0
        await s.goes_on()


async def test_a_flood_of_requests_starves_the_flooder_only(stage):
    async with stage() as s:
        await s.victim.publish()
        wanted = compose_of(s)
        answers = [await ask(s, wanted + s.victim.key.peer_id.encode()) for _ in range(100)]
        assert sum(bool(answer) for answer in answers) == 64
        assert s.victim.dropped("too_many_requests") == 36
        assert len(await s.honest.exchange.collect(1, 0, 30.0)) == 1
        await s.goes_on()


async def test_all_uploads_together_have_a_bound(stage):
    async with stage(upload_bytes_per_s=1024 * 1024) as s:
        noise = random.Random(0)
        texts = [noise.randbytes(45_000).hex() for _ in range(10)] + ["7"]
        groups = [group_of(s.victim.key.peer_id, number, texts=texts) for number in range(10)]
        large = [replace(g, scores=({"correct": 1.0}, *g.scores[1:])) for g in groups]
        await s.victim.exchange.publish(large)
        hashes = [
            hash_body(compose(g, s.victim.key, swarm="test", model=ModelLabel("tiny", 1), now=s.clock()).body)
            for g in large
        ]
        sizes = [len(await ask(s, wanted + s.victim.key.peer_id.encode())) for wanted in hashes]
        # Half of what may go out at once is kept for those who gave something; Mallory gave nothing.
        assert 1024 * 1024 < sum(sizes) <= 2 * 1024 * 1024
        assert s.victim.dropped("upload_limited") == sizes.count(0) > 0
        await s.goes_on()


async def ask(s: Stage, request: bytes) -> bytes:
    return await s.mallory.host.request(
        s.victim.key.peer_id, BODY_PROTOCOL, request, max_response_bytes=2 * 1024 * 1024
    )


def compose_of(s: Stage) -> bytes:
    """The hash of the group that the victim published last."""
    group = group_of(s.victim.key.peer_id, 1000 + s.victim.published)
    return hash_body(compose(group, s.victim.key, swarm="test", model=ModelLabel("tiny", 1), now=0.0).body)
