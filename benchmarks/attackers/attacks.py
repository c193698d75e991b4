"""The attacks, by name. Each is bounded in count and in time, and says what it sent.

process -> [ATTACKS[name]] -> Identity, Poisoner -> the victim

The first target is the victim. An attack that needs to be told when to go on reads lines (`Stage.line`).
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256

from swarmnode.errors import NetworkError
from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, HASH_BYTES
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.multiaddr import address_to_bytes, peer_id_to_bytes, split_peer
from swarmnode.network.rpc import READ_TIMEOUT_S

from .daemon import Identity
from .member import steering_member
from .poison import Poisoner, Style, at_length, honestly, lying
from .stage import Line, Stage, swallow
from .wire import (
    ADD_PROVIDER,
    GET_PROVIDERS,
    GOSSIP,
    KADEMLIA,
    Author,
    field,
    fields,
    gossip,
    kademlia,
    provider,
    publishing,
    subscribing,
    subscribing_to_many,
)

MIB = 2**20
NOWHERE = address_to_bytes("/ip4/127.0.0.1/tcp/9")
TOPICS_PER_RPC = 35_000
"""Half a MiB of them."""
STREAMS_EACH = 34
PROVIDER_KEY_BYTES = 80
"""The longest that Kademlia takes."""

HELD_CLIENTS = 300
"""Clients of a page, or of the endpoints, at once."""
HOST = b"Host: 127.0.0.1\r\n"

Attack = Callable[[Stage], Awaitable[bool | None]]
"""Returns whether the attacker is still connected to the victim afterwards; None: nobody should mind it."""


async def control_load(stage: Stage) -> bool | None:
    """No attack at all: a connected peer that keeps its core busy, as much as any attacker here could."""
    async with stage.attacker():
        stage.say("ready")
        async for _ in stage.pace(100.0):
            ends_s = asyncio.get_running_loop().time() + 0.01
            while asyncio.get_running_loop().time() < ends_s:
                stage.sent["hashes"] += bool(sha256(bytes(4096)).digest())
    return None


# ---- gossip that is no announcement ----


async def ecdsa_author(stage: Stage) -> bool | None:
    """217 bytes, correctly signed by an author whose id holds an ECDSA key."""
    async with gossiping(stage) as (one, lines):
        async for _ in stage.pace(1.0, most=60):
            await _send(stage, lines, gossip(Author.with_ecdsa(), stage.topic, b"hello"), "packets")
        return await stage.connected_after(one)


async def oversized_gossip(stage: Stage) -> bool | None:
    """1 MB messages, the longest that GossipSub passes on."""
    async with gossiping(stage) as (one, lines):
        async for number in stage.pace(20.0, most=300):
            data = number.to_bytes(4, "big") * (MIB // 4 - 1024)
            await _send(stage, lines, gossip(Author.of(one.key), stage.topic, data), "messages")
        return await stage.connected_after(one)


async def junk_gossip(stage: Stage) -> bool | None:
    """Small messages that are no headers, each a new one."""
    async with gossiping(stage) as (one, lines):
        async for number in stage.pace(300.0, most=10_000):
            data = b"\xc1" * 200 + number.to_bytes(4, "big")
            await _send(stage, lines, gossip(Author.of(one.key), stage.topic, data), "messages")
        return await stage.connected_after(one)


async def subscribe_flood(stage: Stage) -> bool | None:
    """44 MiB of subscriptions to topics that nobody heard of: three million of them."""
    async with gossiping(stage) as (one, lines):
        async for number in stage.pace(8.0, most=88):
            first = number * TOPICS_PER_RPC
            sent = await lines[0].send(subscribing_to_many(range(first, first + TOPICS_PER_RPC)))
            stage.sent["topics"] += TOPICS_PER_RPC * sent
        return await stage.connected_after(one)


# ---- the routing table ----


async def short_provider(stage: Stage) -> bool | None:
    """A member of the routing table that names providers whose ids have three bytes."""

    async def answer(peer: str, request: bytes) -> bytes:
        asked = dict(fields(request))
        kind, key = asked.get(1, 0), asked.get(2, b"")
        assert isinstance(kind, int) and isinstance(key, bytes)
        stage.sent["answers"] += kind == GET_PROVIDERS
        short = provider(b"abc", NOWHERE)
        # Who knows nobody is not taken into a routing table: we know the asker.
        known = provider(peer_id_to_bytes(peer), NOWHERE)
        return field(1, kind) + field(2, key) + field(8, known) + field(9, short) + field(10, 1)

    async with stage.attacker() as one:
        await one.serve(KADEMLIA, answer)
        # Identify tells the victim what we serve, once per connection.
        await reconnect(stage, one)
        stage.say("ready")
        while await stage.line():
            stage.say("answered", answers=stage.sent["answers"])
    return None


async def provider_flood(stage: Stage) -> bool | None:
    """100,000 provider records of our own id for keys that nobody asks for."""
    async with stage.attacker() as one:
        ours = provider(peer_id_to_bytes(one.key.peer_id), NOWHERE)
        stream: asyncio.StreamWriter | None = None
        stage.say("ready")
        async for number in stage.pace(50.0, most=500):
            with suppress(NetworkError, OSError, TimeoutError):
                if stream is None:
                    _, stream = await one.open(_peer(stage), KADEMLIA)
                for place in range(200):
                    if stream.transport.is_closing():
                        break  # the victim hung up; `drain` says so
                    key = (number * 200 + place).to_bytes(PROVIDER_KEY_BYTES, "big")
                    stream.write(kademlia(ADD_PROVIDER, key, ours))
                async with asyncio.timeout(5.0):
                    await stream.drain()
                stage.sent["records"] += 200
                continue
            if stream is not None:
                stream.transport.abort()
                stream = None
            await reconnect(stage, one)
        return await stage.connected_after(one)


# ---- bodies ----


async def slow_bodies(stage: Stage) -> bool | None:
    """Valid bodies, nine seconds after they are asked for."""
    return await announce(stage, delay_s=9.0)


async def bodies_that_never_come(stage: Stage) -> bool | None:
    """Streams that are taken and never answered."""
    return await announce(stage, delay_s=None)


async def too_long_bodies(stage: Stage) -> bool | None:
    """Bodies of almost 1 MiB that keep every rule of the wire and that no policy here can train on."""
    return await announce(stage, compose=Poisoner.too_long, per_s=4.0)


async def longer_bodies(stage: Stage) -> bool | None:
    """Bodies as small as any, with answers a few times longer than what the tiny policy trains on."""
    return await announce(stage, style=at_length)


async def finish_lies(stage: Stage) -> bool | None:
    """Right answers marked as cut off, wrong ones as ended: what is learnt is to go on after the answer."""
    return await announce(stage, style=lying, per_s=30.0)


async def honest_texts(stage: Stage) -> bool | None:
    """The texts of `finish_lies`, truly marked: what they do is not the lie's doing."""
    return await announce(stage, style=honestly, per_s=30.0)


async def false_claims(stage: Stage) -> bool | None:
    """Mostly wrong answers, announced as mostly right."""
    return await announce(stage, compose=Poisoner.false_claim, per_s=30.0)


async def one_sided(stage: Stage) -> bool | None:
    """Right answers to the questions of one task and no other, as fast as a peer may announce them."""
    return await announce(stage, compose=Poisoner.one_sided, per_s=30.0)


async def crowd(stage: Stage) -> bool | None:
    """500 free identities behind one connection announce a hundred bodies a second that do not exist."""
    keys = [NodeKey.generate() for _ in range(500)]
    authors = [Poisoner(key, stage.swarm, seed=place << 32) for place, key in enumerate(keys)]
    async with gossiping(stage) as (_, lines):
        async for number in stage.pace(100.0, most=6000):
            author = authors[number % len(authors)]
            await _send(
                stage,
                lines,
                gossip(Author.of(author.key), stage.topic, author.unheld(number // len(authors))),
                "headers",
            )
    return None


async def half_open(stage: Stage) -> bool | None:
    """34 streams for bodies from each of eight identities, over which nothing is ever asked."""
    protocol = stage.about or BODY_PROTOCOL

    async def hold(crowd: list[Identity]) -> list[asyncio.StreamWriter]:
        held: list[asyncio.StreamWriter] = []

        async def hold_of(one: Identity) -> None:
            for _ in range(STREAMS_EACH):
                with suppress(NetworkError, OSError):
                    _, writer = await one.open(_peer(stage), protocol)
                    writer.write(b"\x20half")  # without a byte the stream is not even negotiated
                    held.append(writer)

        async with asyncio.TaskGroup() as tasks:
            for one in crowd:
                tasks.create_task(hold_of(one))
        stage.sent["streams"] += len(held)
        return held

    async with AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(stage.attacker()) for _ in range(8)]
        held = await hold(crowd)
        stage.say("ready", streams=len(held))
        # The victim gives up a stream that says nothing; then there is another one.
        async for number in stage.pace(1 / (READ_TIMEOUT_S - 2)):
            if number:
                for writer in held:
                    writer.transport.abort()
                held = await hold(crowd)
        # The last ones are held to the end.
        await asyncio.sleep(max(0.0, stage.until_s - asyncio.get_running_loop().time()))
    return None


# ---- what was said before ----


async def replay_own(stage: Stage) -> bool | None:
    """Forty good groups; told `again`, the same forty headers, and then one that is new."""
    async with gossiping(stage) as (one, lines):
        author = Poisoner(one.key, stage.swarm, seed=stage.seed)
        groups = [author.group(number) for number in range(40)]
        bodies = {group.header.body_hash: group.body for group in groups}
        await serve_bodies(one, bodies)
        await _announce_all(stage, one, lines, groups)
        stage.say("announced", author=one.key.peer_id)
        while await stage.line() == "again":
            await reconnect(stage, one)
            await _announce_all(stage, one, lines, groups)
            stage.say("replayed")
        new = author.group(len(groups))
        bodies[new.header.body_hash] = new.body
        await _announce_all(stage, one, lines, [new])
        stage.say("new")
        await stage.line()
    return None


async def replay_victim(stage: Stage) -> bool | None:
    """Everything that the first target says is recorded; told `again`, it is said once more to the second."""
    heard: list[bytes] = []
    speaker = peer_id_to_bytes(_peer(stage))

    async def record(peer: str, rpc: bytes) -> None:
        for number, message in fields(rpc):
            if number == 2 and isinstance(message, bytes) and dict(fields(message)).get(1) == speaker:
                heard.append(message)

    async with stage.attacker() as one:
        await one.serve(GOSSIP, record)
        await reconnect(stage, one)
        lines = [Line(stage, one, target) for target in stage.targets]
        for line in lines:
            await line.send(subscribing(stage.topic))
        stage.say("ready")
        while (line := await stage.line()) and line != "again":
            stage.say("heard", messages=len(heard))
        for message in tuple(heard):
            stage.sent["messages"] += await lines[-1].send(publishing(message))
        stage.say("replayed", messages=len(heard))
        await stage.line()
    return None


# ---- what they share ----


@asynccontextmanager
async def gossiping(stage: Stage) -> AsyncIterator[tuple[Identity, list[Line]]]:
    """An attacker that speaks GossipSub to every target."""
    async with stage.attacker() as one:
        await one.serve(GOSSIP, swallow)
        await reconnect(stage, one)
        stage.say("ready", author=one.key.peer_id)
        yield one, [Line(stage, one, target) for target in stage.targets]


async def announce(
    stage: Stage,
    *,
    style: Style = honestly,
    compose: Callable[[Poisoner, int], SignedGroup] | None = None,
    per_s: float = 10.0,
    delay_s: float | None = 0.0,
) -> bool | None:
    """Announce groups, and give their bodies after `delay_s`; None: never."""
    bodies: dict[bytes, bytes] = {}
    async with gossiping(stage) as (one, lines):
        author = Poisoner(one.key, stage.swarm, seed=stage.seed)
        await serve_bodies(one, bodies, delay_s)
        async for number in stage.pace(per_s):
            group = compose(author, number) if compose else author.group(number, style)
            bodies[group.header.body_hash] = group.body
            await _send(stage, lines, gossip(Author.of(one.key), stage.topic, group.sealed), "headers")
    return None


async def serve_bodies(one: Identity, bodies: dict[bytes, bytes], delay_s: float | None = 0.0) -> None:
    async def answer(peer: str, request: bytes) -> bytes | None:
        if delay_s is None:
            return None
        await asyncio.sleep(delay_s)
        return bodies.get(request[:HASH_BYTES], b"")

    await one.serve(BODY_PROTOCOL, answer)


async def reconnect(stage: Stage, one: Identity) -> None:
    """Dial again, so that identify tells the victim what we serve by now."""
    for target in stage.targets:
        with suppress(NetworkError):
            await one.control.disconnect(split_peer(target)[1])
            await asyncio.sleep(0.2)
            await one.connect(target)


async def _announce_all(stage: Stage, one: Identity, lines: list[Line], groups: list[SignedGroup]) -> None:
    for group in groups:
        message = gossip(Author.of(one.key), stage.topic, group.sealed)
        # A line that was lost with the victim's daemon needs a second or two.
        for _ in range(20):
            if await lines[0].send(publishing(message)):
                stage.sent["headers"] += 1
                break
            await asyncio.sleep(0.5)


async def _send(stage: Stage, lines: list[Line], message: bytes, what: str) -> None:
    for line in lines:
        stage.sent[what] += await line.send(publishing(message))


def _peer(stage: Stage) -> str:
    return split_peer(stage.targets[0])[1]


# ---- clients of the page and of the endpoints ----


async def page_flood(stage: Stage) -> bool | None:
    """Clients of the page at port `about` that say nothing, half a request, nonsense or far too much."""
    begun = (
        b"",
        b"GET /state HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST /control HTTP/1.1\r\n" + HOST + b"Content-Length: 900\r\n\r\n{",
        b"\x16\x03\x01\x00\xff" * 100,
    )
    return await _flood(stage, begun)


async def serve_flood(stage: Stage) -> bool | None:
    """Clients of `swarmnode serve` at port `about` that ask and never read, ask too much, or say nothing."""
    stream = _completion(b'{"model": "policy", "prompt": "reverse abc", "stream": true}')
    too_long = _completion(b'{"model": "policy", "prompt": "' + b"a" * 60_000 + b'"}')
    return await _flood(stage, (b"", stream, stream, stream[:-1], too_long, b"\x16\x03\x01\x00\xff" * 100))


def _completion(content: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (HOST, len(content), content)


async def _flood(stage: Stage, begun: Sequence[bytes]) -> None:
    stage.say("ready")
    held: deque[socket.socket] = deque()
    async for number in stage.pace(1000.0):
        if len(held) == HELD_CLIENTS:
            held.popleft().close()
        with suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", int(stage.about)), timeout=1.0))
            held[-1].setblocking(False)
            held[-1].send(begun[number % len(begun)])
            stage.sent["clients"] += 1
    for client in held:
        client.close()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        control_load,
        ecdsa_author,
        short_provider,
        oversized_gossip,
        junk_gossip,
        slow_bodies,
        bodies_that_never_come,
        crowd,
        finish_lies,
        honest_texts,
        false_claims,
        one_sided,
        too_long_bodies,
        longer_bodies,
        subscribe_flood,
        provider_flood,
        replay_own,
        replay_victim,
        half_open,
        steering_member,
        page_flood,
        serve_flood,
    )
}
