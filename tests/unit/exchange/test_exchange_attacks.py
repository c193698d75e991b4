"""What identities that cost nothing, slow bodies, replays and vain bodies can do to an exchange: little."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, MAX_REQUEST_BYTES
from swarmnode.exchange.bodies.fetcher import FETCHES_OF_PROVEN
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import (
    LATE_S,
    PROVEN_AFTER,
    UNFIT_S,
    UNFIT_TRIAL_S,
    VAIN_ASKS_BURST,
    VAIN_DIALS_BURST,
    VAIN_DIALS_PER_S,
)
from swarmnode.exchange.peers.reputation import GIVER_PAUSE_S
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.conftest import Node, StartNode, until


@pytest.fixture
def start(start_node: StartNode) -> StartNode:
    return partial(start_node, patience_s=0.05)


@pytest.fixture
def announcement_of(composed_by) -> Callable[..., SignedGroup]:
    return partial(composed_by, swarm="test")


def names(count: int) -> list[NodeKey]:
    return [NodeKey(number.to_bytes(4, "big") * 8) for number in range(1000, 1000 + count)]


async def make_proven(node: Node, author: Node, groups_of, *, first: int = 0) -> None:
    for number in range(PROVEN_AFTER):
        await author.exchange.publish([groups_of(author.key.peer_id, number=first + number)])
        await until(lambda number=number: node.accepted(author) == number + 1)
        await node.exchange.collect(2, 0, 1.0)


async def silence(peer: str, request: bytes) -> bytes:
    """A body that never comes."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_five_hundred_names_without_bodies_do_not_keep_us_from_those_we_know(
    start, announcement_of, groups_of
):
    network = MemoryNetwork()
    async with start(network, 1) as honest, start(network, 2, honest.host) as victim:
        await make_proven(victim, honest, groups_of)
        for name in names(500):
            victim.hear(name, announcement_of(name).sealed)
        await honest.exchange.publish([groups_of(honest.key.peer_id, number=20 + n) for n in range(4)])
        await until(lambda: victim.accepted(honest) >= PROVEN_AFTER + 2)
        assert len(await victim.exchange.collect(4, 0, 30.0)) == 2


async def test_who_used_up_its_time_of_our_judge_is_asked_later_and_nobody_else_waits(start, groups_of):
    network = MemoryNetwork()
    async with (
        start(network, 1) as costly,
        start(network, 2) as honest,
        start(network, 3, costly.host, honest.host) as victim,
    ):
        await make_proven(victim, costly, groups_of)
        reputation = victim.exchange._ledger.reputation
        reputation.charge_judge(costly.key.peer_id, 3600.0, asyncio.get_running_loop().time())
        await costly.exchange.publish([groups_of(costly.key.peer_id, number=20)])
        await until(lambda: victim.exchange.stats().headers_waiting == 1)
        await make_proven(victim, honest, groups_of, first=40)
        assert victim.accepted(costly) == PROVEN_AFTER
        assert victim.exchange.stats().headers_waiting == 1
        assert reputation.standing_of(costly.key.peer_id).failures == 0


def overran_for_newcomers(victim: Node, task: str, now: float) -> None:
    for name in "abc":
        victim.exchange._fetcher._unfit.note_overrun(task, name, now, known=False)


async def test_groups_of_a_task_that_does_not_fit_wait_until_it_is_tried_again(start, task, groups_of, clock):
    network = MemoryNetwork()
    async with start(network, 1) as honest, start(network, 2, honest.host) as victim:
        overran_for_newcomers(victim, task.name, clock())
        await honest.exchange.publish([groups_of(honest.key.peer_id, number=number) for number in range(2)])
        await until(lambda: victim.exchange.stats().headers_waiting == 2)
        clock.advance(UNFIT_TRIAL_S)
        await until(lambda: victim.accepted(honest) == 2)


async def test_newcomers_whose_episodes_overrun_do_not_shut_a_task_to_those_we_know(
    start, task, groups_of, clock
):
    network = MemoryNetwork()
    async with start(network, 1) as honest, start(network, 2, honest.host) as victim:
        await make_proven(victim, honest, groups_of)
        clock.advance(UNFIT_S)
        overran_for_newcomers(victim, task.name, clock())
        await honest.exchange.publish([groups_of(honest.key.peer_id, number=20)])
        await until(lambda: victim.accepted(honest) == PROVEN_AFTER + 1)


async def test_names_whose_bodies_never_come_hold_one_fetch_and_no_honest_author_up(
    start, announcement_of, groups_of
):
    """Each of them is connected to us and answers nothing: the clock stands still, nobody is given up on."""
    network = MemoryNetwork()
    async with start(network, 1) as honest, start(network, 2, honest.host) as victim:
        await make_proven(victim, honest, groups_of)
        async with asyncio.TaskGroup() as tasks:
            stop = asyncio.Event()

            async def attend(key: NodeKey) -> None:
                async with network.host(key.peer_id) as host:
                    await host.connect(victim.host.address)
                    await host.serve(BODY_PROTOCOL, silence, max_request_bytes=MAX_REQUEST_BYTES)
                    victim.hear(key, announcement_of(key).sealed)
                    await stop.wait()

            for name in names(12):
                tasks.create_task(attend(name))
            await until(lambda: victim.exchange.stats().headers_waiting >= 11)
            for number in range(3):
                await honest.exchange.publish([groups_of(honest.key.peer_id, number=20 + number)])
                await until(lambda number=number: victim.accepted(honest) == PROVEN_AFTER + number + 1)
                await victim.exchange.collect(2, 0, 0.5)
            assert victim.exchange.stats().headers_waiting >= 10
            stop.set()


async def test_a_newcomer_that_is_connected_gets_in_among_five_hundred_names_that_lie(
    start, announcement_of, groups_of
):
    network = MemoryNetwork()
    async with start(network, 2) as victim, start(network, 1, victim.host) as newcomer:
        for name in names(500):
            victim.hear(name, announcement_of(name).sealed)
        await newcomer.exchange.publish([groups_of(newcomer.key.peer_id, number=n) for n in range(4)])
        async with asyncio.timeout(120):
            while victim.accepted(newcomer) < 2:
                await victim.exchange.collect(4, 0, 0.5)
        assert victim.dropped("unavailable") < 500


async def test_a_newcomer_that_nobody_is_connected_to_is_tried_before_names_that_failed(
    start, announcement_of, groups_of, clock
):
    network = MemoryNetwork()
    async with start(network, 3) as relay, start(network, 2, relay.host) as victim:
        made_up = names(VAIN_DIALS_BURST + 4)
        for name in made_up:
            victim.hear(name, announcement_of(name).sealed)
            victim.hear(name, announcement_of(name, 1).sealed)
        for tried in range(VAIN_DIALS_BURST, len(made_up) + 1):
            await until(lambda tried=tried: victim.dropped("unavailable") >= tried)
            clock.advance(1 / VAIN_DIALS_PER_S)
        clock.advance(6.0)
        async with start(network, 1, relay.host) as newcomer:
            await newcomer.exchange.publish([groups_of(newcomer.key.peer_id, number=n) for n in range(2)])
            await until(lambda: victim.accepted(newcomer) == 2)


async def test_bodies_of_authors_whom_nobody_reaches_are_asked_of_others_seldom(
    start, announcement_of, clock
):
    network = MemoryNetwork()
    async with start(network, 1) as honest, start(network, 2, honest.host) as victim:
        asked = 0

        async def count(peer: str, request: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return b""

        await honest.host.serve(BODY_PROTOCOL, count, max_request_bytes=MAX_REQUEST_BYTES)
        for name in names(VAIN_DIALS_BURST):
            victim.hear(name, announcement_of(name).sealed)
        await until(lambda: victim.dropped("unavailable") == VAIN_DIALS_BURST)
        assert 0 < asked <= VAIN_ASKS_BURST < VAIN_DIALS_BURST
        assert honest.dropped("too_many_requests") == 0


async def test_names_that_nobody_reaches_are_dialled_seldom_however_many_they_are(
    start, announcement_of, clock
):
    network = MemoryNetwork()
    async with start(network, 1) as other, start(network, 2, other.host) as victim:
        for name in names(200):
            victim.hear(name, announcement_of(name).sealed)
        # Those that were under way when the last of the allowance was used up.
        most = VAIN_DIALS_BURST + ExchangeSettings().fetch_concurrency
        await until(lambda: victim.dropped("unavailable") >= VAIN_DIALS_BURST)
        await asyncio.sleep(0.1)
        assert victim.dropped("unavailable") <= most
        clock.advance(20 / VAIN_DIALS_PER_S)
        await until(lambda: victim.dropped("unavailable") >= most)
        await asyncio.sleep(0.1)
        assert victim.dropped("unavailable") < 2 * most


async def test_an_author_that_answers_with_nothing_is_paused(start, announcement_of, clock):
    network = MemoryNetwork()
    liar = names(1)[0]
    async with start(network, 2) as victim, network.host(liar.peer_id) as host:
        asked = 0

        async def nothing(peer: str, request: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return b""

        await host.connect(victim.host.address)
        await host.serve(BODY_PROTOCOL, nothing, max_request_bytes=MAX_REQUEST_BYTES)
        for number in range(20):
            victim.hear(liar, announcement_of(liar, number).sealed)
        await until(lambda: victim.dropped("unavailable") == 1)
        await asyncio.sleep(0.05)
        assert asked == 1
        clock.advance(5.0)
        await until(lambda: asked == 2)


async def test_a_proven_author_is_asked_for_two_groups_at_once_and_again_a_second_after_none_came(
    start, announcement_of, clock
):
    network, author = MemoryNetwork(), names(1)[0]
    async with start(network, 2) as victim, network.host(author.peer_id) as host:
        asked = 0

        async def nothing(peer: str, request: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return b""

        await host.connect(victim.host.address)
        await host.serve(BODY_PROTOCOL, nothing, max_request_bytes=MAX_REQUEST_BYTES)
        for _ in range(PROVEN_AFTER):
            victim.exchange._ledger.reputation.note_accepted(author.peer_id)
        for number in range(2 * FETCHES_OF_PROVEN):
            victim.hear(author, announcement_of(author, number).sealed)
        await until(lambda: victim.dropped("unavailable") == FETCHES_OF_PROVEN)
        await asyncio.sleep(0.05)
        assert asked == FETCHES_OF_PROVEN
        clock.advance(GIVER_PAUSE_S)
        await until(lambda: asked > FETCHES_OF_PROVEN)


async def test_bodies_that_newcomers_give_in_vain_are_bounded_for_all_of_them_together(
    start, announcement_of, monkeypatch
):
    monkeypatch.setattr("swarmnode.exchange.bodies.fetcher.VAIN_BYTES_BURST", 2000.0)
    network = MemoryNetwork()
    async with start(network, 1) as relay, start(network, 2, relay.host, max_tokens=2) as victim:
        fetched = 0
        for name in names(40):
            sent = announcement_of(name)
            victim.exchange._bodies.foreign.put(sent.header.body_hash, sent.body)
            victim.hear(name, sent.sealed)
            fetched += len(sent.body)
        assert fetched > 4000
        await until(lambda: victim.dropped("too_long") >= 10)
        await asyncio.sleep(0.1)
        assert victim.dropped("too_long") < 40
        assert victim.exchange.stats().headers_waiting > 0


async def test_a_stream_of_replayed_headers_takes_nothing_from_their_author(
    start, announcement_of, clock, groups_of
):
    """v's own signed messages, sent again by somebody else once gossip has forgotten them."""
    network = MemoryNetwork()
    v = NodeKey(b"\1" * 32)
    async with start(network, 2, prefetch_groups=0) as node:
        old = [announcement_of(v, number).sealed for number in range(60)]
        for sealed in old[:30]:
            node.hear(v, sealed)
        await until(lambda: node.exchange.stats().headers_accepted == 30)
        clock.advance(LATE_S + 1)
        for replay in range(20):
            for sealed in old:
                node.hear(v, sealed)
            await until(lambda replay=replay: node.exchange.stats().headers_seen == 30 + 60 * (replay + 1))
        fresh = [announcement_of(v, 100 + number).sealed for number in range(60)]
        before = node.exchange.stats().headers_accepted
        for sealed in fresh:
            node.hear(v, sealed)
        await until(lambda: node.exchange.stats().headers_seen == 30 + 1200 + 60)
        assert node.dropped("rate_limited") == 0
        assert node.exchange.stats().headers_accepted >= before + 60


async def test_who_passes_off_the_header_of_another_pays_for_it_itself(start, announcement_of):
    v, thief = NodeKey(b"\1" * 32), NodeKey(b"\7" * 32)
    async with start(MemoryNetwork(), 2) as node:
        node.hear(thief, announcement_of(v).sealed)
        await until(lambda: node.dropped("sender_mismatch") == 1)
        assert node.figures_of(thief.peer_id).score < node.figures_of(v.peer_id).score == 100.0


async def test_whoever_is_banned_is_disconnected_and_kept_away(start, announcement_of, clock):
    network = MemoryNetwork()
    async with start(network, 1) as offender, start(network, 2, offender.host) as node:
        assert offender.key.peer_id in await node.host.peers()
        for number in range(5):
            node.hear(offender.key, announcement_of(names(1)[0], number).sealed)
        await until(lambda: node.exchange.stats().banned_peers == (offender.key.peer_id,))
        for _ in range(200):
            if not await node.host.peers():
                break
            await asyncio.sleep(0.01)
        assert await node.host.peers() == ()
