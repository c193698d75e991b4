"""Holders that lie or stall, authors that use them up and homes that only take: the others go on."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from swarmnode.errors import HostDown
from swarmnode.exchange.bodies import body_transfer
from swarmnode.exchange.bodies.body_transfer import (
    BODY_PROTOCOL,
    MAX_REQUEST_BYTES,
    UPLOAD_BURST_S,
    BodyTransfer,
)
from swarmnode.exchange.bodies.holder import (
    MAX_ANNOUNCED_PER_AUTHOR,
    MAX_PULLS,
    MAX_PULLS_OF_STRANGERS,
    MAX_WAITING,
    MAX_WAITING_FOR_STRANGERS,
    PULL_S,
    Holder,
)
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_BODY_BYTES
from swarmnode.exchange.messages import Announcement, Arrival, hash_body
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork

Answer = Callable[[str, bytes], Awaitable[bytes]]


def key(number: int) -> NodeKey:
    return NodeKey(number.to_bytes(4, "big") * 8)


@pytest.fixture
def plane(clock):
    """Serve and fetch bodies on a host."""

    def make(host: MemoryHost) -> BodyTransfer:
        settings = ExchangeSettings(upload_bytes_per_s=MAX_BODY_BYTES)
        return BodyTransfer(host, settings, Ledger(Reputation(), clock), clock=clock, rng=random.Random(0))

    return make


@asynccontextmanager
async def running(holder: Holder) -> AsyncIterator[Holder]:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(holder.run())
        await asyncio.sleep(0)
        yield holder
        run.cancel()


async def silence(peer: str, request: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def nothing(peer: str, request: bytes) -> bytes:
    return b""


async def a_lie(peer: str, request: bytes) -> bytes:
    return b"this is what you asked for"


# ---- the cap of our download ----


async def test_who_has_used_up_its_download_fetches_nothing_until_time_made_up_for_it(clock) -> None:
    settings = ExchangeSettings(download_bytes_per_s=1000.0)
    bodies = BodyTransfer(
        MemoryNetwork().host(key(1).peer_id),
        settings,
        Ledger(Reputation(), clock),
        clock=clock,
        rng=random.Random(0),
    )
    assert bodies.may_fetch
    bodies.count_download(10_000)
    assert not bodies.may_fetch and await bodies._pull(key(2).peer_id, b"h" * 32, 10) is None
    clock.advance(5.9)
    assert not bodies.may_fetch
    clock.advance(0.2)
    assert bodies.may_fetch


# ---- holders ----


@asynccontextmanager
async def asking(
    network: MemoryNetwork, plane: Callable[[MemoryHost], BodyTransfer], body: bytes, *liars: Answer
) -> AsyncIterator[tuple[BodyTransfer, str, list[str]]]:
    """A home that is connected to holders that do this, and to one that has a body."""
    async with AsyncExitStack() as stack:
        honest, *hosts = [await stack.enter_async_context(network.host()) for _ in range(2 + len(liars))]
        home = hosts.pop()

        async def give(peer: str, request: bytes) -> bytes:
            return body

        for host, answer in zip((honest, *hosts), (give, *liars), strict=True):
            await host.serve(BODY_PROTOCOL, answer, max_request_bytes=MAX_REQUEST_BYTES)
            await home.connect(host.address)
        asker = plane(home)
        asker.set_connected(await home.peers())
        yield asker, honest.peer_id, [host.peer_id for host in hosts]


def announcement_of(composed: SignedGroup, author: NodeKey) -> Announcement:
    return Announcement(author.peer_id, composed.header, composed.sealed, Arrival(0.0, 0))


def half_of(body: bytes) -> Answer:
    async def answer(peer: str, request: bytes) -> bytes:
        return body[: len(body) // 2]

    return answer


@pytest.mark.parametrize("kind", ["silent", "lying", "half", "empty"])
async def test_a_body_comes_from_the_honest_holder_whatever_the_others_do(composed_by, plane, kind) -> None:
    """Nobody waits for the one that stalls, who lied is found out, and all of them are asked last."""
    author = key(1)
    composed = composed_by(author)
    bad = {"silent": silence, "lying": a_lie, "empty": nothing, "half": half_of(composed.body)}[kind]
    async with asking(MemoryNetwork(), plane, composed.body, bad, bad) as (asker, honest, liars):
        for number in range(6):
            one = announcement_of(composed, key(10 + number))
            began = asyncio.get_running_loop().time()
            # Long enough that waiting for one of them could not be mistaken for a busy machine.
            assert await asker.fetch(one, timeout_s=600.0) == composed.body
            assert asyncio.get_running_loop().time() < began + 120
        assert asker.routes.holders("anybody", random.Random(0))[0] == honest
        found_out = kind in ("lying", "half")
        scores = [asker._ledger.reputation.score(peer, 0.0) for peer in liars]
        assert (min(scores) < 100) == found_out
        assert asker._ledger.reputation.score(honest, 0.0) == 100


async def test_an_author_that_announces_another_size_does_not_get_a_holder_punished(
    composed_by, plane
) -> None:
    """The header says 10 bytes to us and the truth to the holder, who hands on what it has."""
    author = key(1)
    composed = composed_by(author)
    lied = replace(composed, header=msgspec.structs.replace(composed.header, body_bytes=10))
    async with asking(MemoryNetwork(), plane, composed.body) as (asker, honest, _):
        for number in range(8):
            one = announcement_of(lied, key(10 + number))
            with pytest.raises(Exception, match="unavailable"):
                await asker.fetch(one, timeout_s=5.0)
        assert asker._ledger.reputation.score(honest, 0.0) == 100


async def test_names_that_nobody_can_reach_make_no_holder_look_bad(composed_by, plane) -> None:
    """A stranger that never gave anything would be preferred to the seed otherwise."""
    composed = composed_by(key(1))
    async with asking(MemoryNetwork(), plane, b"") as (asker, honest, _):
        for number in range(6):
            one = announcement_of(composed, key(10 + number))
            with pytest.raises(Exception, match="unavailable"):
                await asker.fetch(one, timeout_s=5.0)
        asker.routes.connected = frozenset({honest, "stranger"})
        first = {asker.routes.holders("author", random.Random(number))[0] for number in range(16)}
        assert first == {honest, "stranger"}, "neither is preferred"


@asynccontextmanager
async def between(
    composed: SignedGroup, author: NodeKey, says: Answer
) -> AsyncIterator[tuple[MemoryHost, ...]]:
    """A home, a holder that it is connected to and that has the body, and the author beyond the holder."""
    network = MemoryNetwork()

    async def give(peer: str, request: bytes) -> bytes:
        return composed.body

    async with network.host() as home, network.host() as holder, network.host(author.peer_id) as host:
        await holder.serve(BODY_PROTOCOL, give, max_request_bytes=MAX_REQUEST_BYTES)
        await host.serve(BODY_PROTOCOL, says, max_request_bytes=MAX_REQUEST_BYTES)
        await home.connect(holder.address)
        await holder.connect(host.address)
        yield home, holder, host


@pytest.mark.parametrize("why", ["it has no time now", "we may not ask more of it now", "our host is down"])
async def test_an_author_that_was_not_dialled_in_vain_is_dialled_again(
    composed_by, plane, clock, why
) -> None:
    composed = composed_by(key(1))
    async with between(composed, key(1), nothing) as (home, *_):
        asker, one = plane(home), announcement_of(composed, key(1))
        asker.set_connected(await home.peers())
        if why == "our host is down":
            home.go_down()
            with pytest.raises(HostDown):
                await asker.fetch(one, timeout_s=60.0)
        else:
            while "may not" in why and asker._ledger.reputation.take_ask(one.author, clock()):
                pass
            assert await asker.fetch(one, timeout_s=60.0) == composed.body
        assert asker.routes.reaches(one.author, clock()) is None


async def test_an_author_that_hangs_in_the_dial_is_dialled_again_only_after_a_while(
    composed_by, plane, clock, monkeypatch
) -> None:
    monkeypatch.setattr(body_transfer, "HEAD_START_S", 0.0)
    composed = composed_by(key(1))
    async with between(composed, key(1), silence) as (home, *_):
        asker, one = plane(home), announcement_of(composed, key(1))
        asker.set_connected(await home.peers())
        assert await asker.fetch(one, timeout_s=60.0) == composed.body
        assert asker.routes.reaches(one.author, clock()) is False


async def test_a_connected_author_that_says_nothing_does_not_keep_us_from_a_holder(
    composed_by, plane, monkeypatch
) -> None:
    monkeypatch.setattr(body_transfer, "HEAD_START_S", 0.0)
    composed = composed_by(key(1))
    async with between(composed, key(1), silence) as (home, _, author), asyncio.timeout(60):
        await home.connect(author.address)
        asker = plane(home)
        asker.set_connected(await home.peers())
        assert await asker.fetch(announcement_of(composed, key(1)), timeout_s=600.0) == composed.body


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.01)


# ---- authors ----


async def test_silent_strangers_take_no_places_from_authors_who_gave(composed_by) -> None:
    giver, crowd = key(1), [key(number) for number in range(100, 100 + 2 * MAX_PULLS)]

    asked = list[str]()

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        asked.append(peer)
        if peer != giver.peer_id:
            await asyncio.Event().wait()
        return b"body"

    async with running(Holder(pull)) as holder, asyncio.TaskGroup() as tasks:
        holder.set_connected({giver.peer_id, *(one.peer_id for one in crowd)})
        first, second = composed_by(giver), composed_by(giver, 1)
        for one in (first, second):
            holder.note_announcement(Message("topic", giver.peer_id, one.sealed))
        assert await holder.pull(giver.peer_id, first.header.body_hash) == b"body"
        waiting = []
        for one in crowd:
            composed = composed_by(one)
            holder.note_announcement(Message("topic", one.peer_id, composed.sealed))
            waiting.append(tasks.create_task(holder.pull(one.peer_id, composed.header.body_hash)))
        await asyncio.sleep(0)
        assert await holder.pull(giver.peer_id, second.header.body_hash) == b"body"
        assert sum(peer != giver.peer_id for peer in asked) == MAX_PULLS_OF_STRANGERS
        for task in waiting:
            task.cancel()


async def test_a_crowd_that_waits_for_silent_authors_leaves_places_for_streams(composed_by) -> None:
    giver, stranger = key(1), key(2)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        if body_hash in silent:
            await asyncio.Event().wait()
        return b"body"

    first, second, third = (composed_by(giver, number) for number in range(3))
    of_stranger = composed_by(stranger)
    silent = {of_stranger.header.body_hash, second.header.body_hash}
    async with running(Holder(pull)) as holder, asyncio.TaskGroup() as tasks:
        holder.set_connected({giver.peer_id, stranger.peer_id})
        for one in (first, second, third, of_stranger):
            holder.note_announcement(Message("topic", one.author, one.sealed))
        assert await holder.pull(giver.peer_id, first.header.body_hash) == b"body"

        async def waiting_for(one: SignedGroup) -> list[asyncio.Task[bytes | None]]:
            asked = [
                tasks.create_task(holder.pull(one.author, one.header.body_hash)) for _ in range(MAX_WAITING)
            ]
            await asyncio.sleep(0)
            return [task for task in asked if not task.done()]

        waiting = await waiting_for(of_stranger)
        assert len(waiting) == MAX_WAITING_FOR_STRANGERS
        assert await holder.pull(giver.peer_id, third.header.body_hash) == b"body"
        waiting += await waiting_for(second)
        assert len(waiting) == MAX_WAITING
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert await holder.pull(giver.peer_id, third.header.body_hash) == b"body", "who left makes room"


async def test_an_author_that_let_us_wait_is_not_waited_for_again_at_once(composed_by, monkeypatch) -> None:
    author, now, asked = key(1), 0.0, 0
    monkeypatch.setattr("swarmnode.exchange.bodies.holder.monotonic", lambda: now)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        nonlocal now, asked
        asked += 1
        now += PULL_S + 1.0
        return None

    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        sent = [composed_by(author, number) for number in range(8)]
        for one in sent:
            holder.note_announcement(Message("topic", author.peer_id, one.sealed))
        for one in sent:
            await holder.pull(author.peer_id, one.header.body_hash)
        assert asked < len(sent)
        now += 60.0
        before = asked
        await holder.pull(author.peer_id, sent[-1].header.body_hash)
        assert asked == before + 1, "it is asked again after a while"


async def test_old_headers_that_somebody_sends_again_displace_no_new_ones(composed_by, clock) -> None:
    author = key(1)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        return b"body"

    old = [composed_by(author, number) for number in range(2 * MAX_ANNOUNCED_PER_AUTHOR)]
    clock.now += 600.0
    new = composed_by(author, 1000)
    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        for one in (new, *old):
            holder.note_announcement(Message("topic", author.peer_id, one.sealed))
        assert await holder.pull(author.peer_id, new.header.body_hash) == b"body"


async def test_what_goes_wrong_with_one_author_does_not_end_the_holder(composed_by) -> None:
    bad, good = key(1), key(2)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        if peer == bad.peer_id:
            raise RuntimeError("nobody thought of this")
        return b"body"

    async with running(Holder(pull)) as holder:
        holder.set_connected({bad.peer_id, good.peer_id})
        for author, body in ((bad, None), (good, b"body")):
            composed = composed_by(author)
            holder.note_announcement(Message("topic", author.peer_id, composed.sealed))
            assert await holder.pull(author.peer_id, composed.header.body_hash) == body


async def test_who_waits_for_a_body_while_the_holder_stops_gets_none(composed_by) -> None:
    """And is not cancelled: what asks may be somebody else's stream."""
    author = key(1)
    composed = composed_by(author)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        await asyncio.Event().wait()
        raise AssertionError

    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        holder.note_announcement(Message("topic", author.peer_id, composed.sealed))
        waiting = asyncio.create_task(holder.pull(author.peer_id, composed.header.body_hash))
        await asyncio.sleep(0)
    assert await waiting is None


# ---- askers ----


def test_the_slowest_upload_gives_the_largest_body_to_a_stranger_and_then_rests(clock) -> None:
    settings = ExchangeSettings(upload_bytes_per_s=10_000.0)
    ledger = Ledger(Reputation(), clock)
    bodies = BodyTransfer(
        MemoryNetwork().host(key(1).peer_id), settings, ledger, clock=clock, rng=random.Random(0)
    )
    largest, stranger = bytes(MAX_BODY_BYTES), key(2).peer_id
    assert bodies.give(stranger, largest) == largest
    assert bodies.give(stranger, largest) == b""
    clock.advance(MAX_BODY_BYTES / 10_000.0 + 1)
    assert bodies.give(stranger, largest) == largest


async def test_nothing_is_fetched_for_whom_the_upload_has_nothing_left(composed_by, plane) -> None:
    network, author, asked = MemoryNetwork(), key(1), 0
    composed = composed_by(author)

    async def give(peer: str, request: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return composed.body

    async with network.host(author.peer_id, dialable=False) as home, network.host() as public:
        await home.serve(BODY_PROTOCOL, give, max_request_bytes=MAX_REQUEST_BYTES)
        await home.connect(public.address)
        holder = plane(public)
        holder.set_connected(await public.peers())
        async with running(holder.holder):
            holder.holder.note_announcement(Message("topic", author.peer_id, composed.sealed))
            big = [bytes([number]) * MAX_BODY_BYTES for number in range(4)]
            for body in big:
                holder.foreign.put(hash_body(body), body)
            name = author.peer_id.encode()
            taken = [await holder.answer(key(9).peer_id, hash_body(body) + name) for body in big]
            assert 0 < len(list(filter(None, taken))) < len(big), "what is left is for those who give"
            request = composed.header.body_hash + name
            await holder.answer(key(9).peer_id, hash_body(big[-1]) + name)
            holder._upload.owe(2 * MAX_BODY_BYTES)
            assert await holder.answer(key(9).peer_id, request) == b""
            assert asked == 0
            holder._ledger.reputation.note_given(key(8).peer_id, MAX_BODY_BYTES)
            holder._upload.owe(-2 * MAX_BODY_BYTES)
            assert await holder.answer(key(8).peer_id, request) == composed.body


async def test_the_cap_holds_while_authors_let_us_wait(composed_by, plane, clock) -> None:
    """The time of an answer is that when it is given, or each slow one would make up the time once more."""
    network, author, asked, go_on = MemoryNetwork(), key(1), asyncio.Event(), asyncio.Event()
    composed = composed_by(author)

    async def give_late(peer: str, request: bytes) -> bytes:
        asked.set()
        await go_on.wait()
        return composed.body

    async with network.host(author.peer_id, dialable=False) as home, network.host() as public:
        await home.serve(BODY_PROTOCOL, give_late, max_request_bytes=MAX_REQUEST_BYTES)
        await home.connect(public.address)
        holder = plane(public)
        holder.set_connected(await public.peers())
        asker, name = key(9).peer_id, author.peer_id.encode()
        holder._ledger.reputation.note_given(asker, 64 * MAX_BODY_BYTES)
        async with running(holder.holder):
            holder.holder.note_announcement(Message("topic", author.peer_id, composed.sealed))
            late = asyncio.create_task(holder.answer(asker, composed.header.body_hash + name))
            await asked.wait()
            clock.now += UPLOAD_BURST_S
            big = [bytes([number]) * (MAX_BODY_BYTES - 1024) for number in range(8)]
            for body in big:
                holder.foreign.put(hash_body(body), body)
            first = [await holder.answer(asker, hash_body(body) + name) for body in big[:4]]
            assert all(first)
            go_on.set()
            await late
            assert await holder.answer(asker, hash_body(big[4]) + name) == b""


async def test_an_author_is_thanked_for_its_own_body_as_any_holder_is(composed_by, clock) -> None:
    network, reputation = MemoryNetwork(), Reputation()
    author, home = network.host(key(1).peer_id), network.host()
    composed = composed_by(key(1))

    async def give(peer: str, request: bytes) -> bytes:
        return composed.body

    async with author, home:
        await author.serve(BODY_PROTOCOL, give, max_request_bytes=MAX_REQUEST_BYTES)
        await home.connect(author.address)
        ledger = Ledger(reputation, clock)
        bodies = BodyTransfer(home, ExchangeSettings(), ledger, clock=clock, rng=random.Random(0))
        bodies.set_connected({author.peer_id})
        announced = Announcement(author.peer_id, composed.header, composed.sealed, Arrival(clock(), 0))
        assert await bodies.fetch(announced, timeout_s=10.0) == composed.body
    assert reputation.gives_enough(author.peer_id)
