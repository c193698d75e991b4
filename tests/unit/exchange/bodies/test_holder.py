"""Two homes behind their routers exchange through whom both are connected to, who need not be believed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from swarmnode.exchange.bodies import body_transfer
from swarmnode.exchange.bodies.body_routes import DIAL_AGAIN_S, BodyRoutes
from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, LOOK_EVERY_S, MAX_REQUEST_BYTES
from swarmnode.exchange.bodies.holder import MAX_ANNOUNCED_PER_AUTHOR, MAX_TRIES, Holder
from swarmnode.exchange.gossip.header_gossip import topic_of
from swarmnode.exchange.limits import TAKEN_PER_GIVEN
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.extensions.seed.seed_node import SeedNode
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.host import Message
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.settings.config_layers import load_config
from tests.unit.exchange.conftest import Node, StartNode, until


@pytest.fixture
def home(start_node: StartNode) -> StartNode:
    """Start a home behind a router, connected to the hosts given."""
    return partial(start_node, dialable=False, swarm="commons", patience_s=30.0)


@asynccontextmanager
async def a_seed(network: MemoryNetwork) -> AsyncIterator[tuple[SeedNode, MemoryHost]]:
    host = network.host()
    config = load_config(environ={}).config
    seed = SeedNode(config, host, Discovery(host, PeerBook(), (), "test"), peer_id=host.peer_id, name="otter")
    async with seed, asyncio.TaskGroup() as tasks:
        tasks.create_task(seed.run())
        yield seed, host
        seed.request_stop()


# ---- two homes and a seed ----


async def test_two_homes_learn_from_each_other_through_a_seed(home, groups_of) -> None:
    network = MemoryNetwork(seed=1)
    async with (
        a_seed(network) as (seed, public),
        home(network, 1, public) as a,
        home(network, 2, public) as b,
    ):
        await until(lambda: knows(seed, a, b))
        assert a.host.peer_id not in await b.host.peers()
        await a.exchange.publish([groups_of(a.key.peer_id, number=number) for number in range(2)])
        await b.exchange.publish([groups_of(b.key.peer_id, number=number) for number in range(2, 4)])
        (from_a, *_), (from_b, *_) = (
            await b.exchange.collect(1, 1, deadline_s=30.0),
            await a.exchange.collect(1, 1, deadline_s=30.0),
        )
        assert (from_a.author, from_b.author) == (a.key.peer_id, b.key.peer_id)
        assert b.exchange.stats().through_holders >= 1
        await until(lambda: seed.status.exchange.pulled >= 2 and seed.status.exchange.served >= 2)


async def test_who_announces_and_asks_in_the_moment_in_which_it_comes_is_served(
    home, groups_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is connected was last looked up just before the homes came, and will not be for long."""
    network = MemoryNetwork(seed=1)
    async with (
        a_seed(network) as (seed, public),
        home(network, 1, public) as a,
        home(network, 2, public) as b,
    ):
        monkeypatch.setattr(body_transfer, "LOOK_EVERY_S", 3600.0)
        await until(lambda: knows(seed, a, b))
        await asyncio.sleep(1.5 * LOOK_EVERY_S)
        for bodies in (seed._bodies, b.exchange._bodies):
            bodies.set_connected(())
        await a.exchange.publish([groups_of(a.key.peer_id)])
        (group,) = await b.exchange.collect(1, 1, deadline_s=30.0)
        assert group.author == a.key.peer_id
        assert b.exchange.stats().dropped == {}


async def test_a_body_that_many_ask_for_is_fetched_once(home, groups_of) -> None:
    network = MemoryNetwork(seed=1)
    async with (
        a_seed(network) as (seed, public),
        home(network, 1, public) as a,
        home(network, 2, public) as b,
        home(network, 3, public) as c,
    ):
        await until(lambda: knows(seed, a, b, c))
        await a.exchange.publish([groups_of(a.key.peer_id)])
        collected = await asyncio.gather(
            b.exchange.collect(1, 1, deadline_s=30.0), c.exchange.collect(1, 1, deadline_s=30.0)
        )
        assert [group.author for (group,) in collected] == [a.key.peer_id] * 2
        assert a.exchange.stats().served == 1
        await until(lambda: seed.status.exchange.served == 2)


async def test_a_home_that_left_is_still_read_from_the_seed_that_handed_its_answers_on(
    home, groups_of
) -> None:
    network = MemoryNetwork(seed=1)
    async with (
        a_seed(network) as (seed, public),
        home(network, 2, public) as b,
        home(network, 3, public) as c,
    ):
        async with home(network, 1, public) as a:
            await until(lambda: knows(seed, a, b, c))
            await a.exchange.publish([groups_of(a.key.peer_id)])
            await b.exchange.collect(1, 1, deadline_s=30.0)
        (group,) = await c.exchange.collect(1, 1, deadline_s=30.0)
        assert group.author == a.key.peer_id


async def test_a_holder_that_lies_is_found_out_and_another_is_asked(home, groups_of) -> None:
    network = MemoryNetwork(seed=1)

    async def lie(peer: str, request: bytes) -> bytes:
        return b"this is what you asked for"

    async with a_seed(network) as (seed, public), network.host() as liar:
        await liar.serve(BODY_PROTOCOL, lie, max_request_bytes=MAX_REQUEST_BYTES)
        # Headers pass only through who is subscribed; the liar hears them as everybody does.
        await liar.subscribe(topic_of("commons"))
        async with home(network, 1, public) as a, home(network, 2, public, liar) as b:
            await until(lambda: knows(seed, a, b))
            for number in range(8):
                await a.exchange.publish([groups_of(a.key.peer_id, number=number)])
                (group,) = await b.exchange.collect(1, 1, deadline_s=30.0)
                assert group.author == a.key.peer_id
            assert b.exchange.stats().banned_peers in ((), (liar.peer_id,))
            assert b.exchange.stats().accepted == 8


def knows(seed: SeedNode, *homes: Node) -> bool:
    return {home.key.peer_id for home in homes} <= seed._bodies.routes.connected


# ---- the holder ----


@asynccontextmanager
async def running(holder: Holder) -> AsyncIterator[Holder]:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(holder.run())
        await asyncio.sleep(0)
        yield holder
        run.cancel()


async def test_a_holder_asks_an_author_only_for_what_it_announced_itself(composed_by) -> None:
    author, other = NodeKey(bytes([1]) * 32), NodeKey(bytes([2]) * 32)
    asked: list[tuple[str, bytes]] = []

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        asked.append((peer, body_hash))
        return b"body"

    sent = composed_by(author)
    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id, other.peer_id})
        holder.note_announcement(Message("topic", author.peer_id, sent.sealed))
        holder.note_announcement(Message("topic", other.peer_id, sent.sealed))
        assert await holder.pull(author.peer_id, bytes(32)) is None
        assert await holder.pull(other.peer_id, sent.header.body_hash) is None
        assert asked == []
        assert await holder.pull(author.peer_id, sent.header.body_hash) == b"body"
        assert asked == [(author.peer_id, sent.header.body_hash)]


async def test_an_author_that_has_left_is_not_asked(composed_by) -> None:
    author = NodeKey(bytes([1]) * 32)
    sent = composed_by(author)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        raise AssertionError("nobody should be asked")

    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        holder.note_announcement(Message("topic", author.peer_id, sent.sealed))
        holder.set_connected(set())
        holder.set_connected({author.peer_id})
        assert await holder.pull(author.peer_id, sent.header.body_hash) is None


async def test_nobody_makes_a_holder_ask_in_vain_for_ever(composed_by) -> None:
    author = NodeKey(bytes([1]) * 32)
    sent = composed_by(author)
    asked = 0

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        nonlocal asked
        asked += 1
        return None

    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        for _ in range(3 * MAX_TRIES):
            holder.note_announcement(Message("topic", author.peer_id, sent.sealed))
            assert await holder.pull(author.peer_id, sent.header.body_hash) is None
        assert asked == MAX_TRIES


async def test_one_author_announces_no_more_than_its_part_and_nonsense_is_not_kept(composed_by) -> None:
    author = NodeKey(bytes([1]) * 32)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        return b"body"

    async with running(Holder(pull)) as holder:
        holder.set_connected({author.peer_id})
        sent = [composed_by(author, number) for number in range(MAX_ANNOUNCED_PER_AUTHOR + 1)]
        for one in sent:
            holder.note_announcement(Message("topic", author.peer_id, one.sealed))
        for nonsense in (b"", b"\xc1", bytes(2000), sent[0].sealed[:-1]):
            holder.note_announcement(Message("topic", author.peer_id, nonsense))
        assert await holder.pull(author.peer_id, sent[0].header.body_hash) is None
        assert await holder.pull(author.peer_id, sent[-1].header.body_hash) == b"body"


async def test_a_silent_author_does_not_keep_the_bodies_of_others_waiting(composed_by) -> None:
    silent, honest = NodeKey(bytes([1]) * 32), NodeKey(bytes([2]) * 32)

    async def pull(peer: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        if peer == silent.peer_id:
            await asyncio.Event().wait()
        return b"body"

    async with running(Holder(pull)) as holder, asyncio.TaskGroup() as tasks:
        holder.set_connected({silent.peer_id, honest.peer_id})
        waiting = []
        for number in range(64):
            sent = composed_by(silent, number)
            holder.note_announcement(Message("topic", silent.peer_id, sent.sealed))
            waiting.append(tasks.create_task(holder.pull(silent.peer_id, sent.header.body_hash)))
        await asyncio.sleep(0)
        sent = composed_by(honest)
        holder.note_announcement(Message("topic", honest.peer_id, sent.sealed))
        assert await holder.pull(honest.peer_id, sent.header.body_hash) == b"body"
        for one in waiting:
            one.cancel()


# ---- ways ----


def test_an_author_that_could_not_be_dialled_is_tried_again_after_a_while() -> None:
    routes = BodyRoutes()
    assert routes.may_dial("author", now=0.0)
    routes.note_undialable("author", now=0.0)
    assert not routes.may_dial("author", now=DIAL_AGAIN_S - 1)
    assert routes.may_dial("author", now=DIAL_AGAIN_S)


def test_an_author_is_dialled_again_when_the_clock_is_set_back_before_it_was_dialled_in_vain() -> None:
    routes = BodyRoutes()
    routes.note_undialable("author", now=7200.0)
    assert routes.may_dial("author", now=0.0)


def test_a_connected_author_is_always_asked_itself() -> None:
    routes = BodyRoutes()
    routes.note_undialable("author", now=0.0)
    routes.connected = frozenset({"author"})
    assert routes.may_dial("author", now=1.0) and routes.has_route("author")


def test_who_gave_the_last_body_of_an_author_is_asked_first_and_who_never_gives_last() -> None:
    routes, rng = BodyRoutes(), random.Random(0)
    routes.connected = frozenset({"a", "b", "c", "author"})
    routes.note_route("author", "c", rather_than=["a"])
    assert routes.holders("author", rng) == ["c", "b", "a"]
    assert routes.has_route("author")
    routes.note_route("author", "b")
    assert routes.holders("author", rng) == ["b", "c", "a"]


def test_who_only_takes_is_served_last() -> None:
    reputation = Reputation()
    assert not reputation.gives_enough("peer"), "an identity is free: a new one has given nothing"
    reputation.note_given("peer", 1000)
    reputation.note_taken("peer", int(1000 * TAKEN_PER_GIVEN) - 1)
    assert reputation.gives_enough("peer")
    reputation.note_taken("peer", 1)
    assert not reputation.gives_enough("peer")
