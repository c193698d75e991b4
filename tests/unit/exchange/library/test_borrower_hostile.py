"""Lenders that lie, stall or flood: what each of them costs, and what comes of it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from swarmnode.exchange.bodies.body_transfer import BODY_PROTOCOL, HASH_BYTES, MAX_REQUEST_BYTES
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library import borrower
from swarmnode.exchange.library.library_pages import (
    LIBRARY_PROTOCOL,
    MAX_BODY_BESIDE,
    MAX_PAGE_BYTES,
    MAX_PAGE_HEADERS,
    MAX_PAGE_REQUEST_BYTES,
    LibraryPage,
    PageRequest,
    PageRow,
)
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import MAX_BODY_BYTES
from swarmnode.exchange.messages import Header, encode_header
from swarmnode.exchange.peers.reputation import FULL_SCORE
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT
from swarmnode.identity.envelope import Envelope, seal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from tests.unit.exchange.conftest import Addition, until
from tests.unit.exchange.library.conftest import borrowed, learns

LIAR = NodeKey(b"\7" * 32)


@dataclass
class Lender:
    """Serves any pages and any bodies, and counts what it is asked."""

    pages: Callable[[PageRequest], Awaitable[bytes]]
    bodies: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    asked: int = 0

    async def page(self, peer: str, request: bytes) -> bytes:
        self.asked += 1
        return await self.pages(msgspec.msgpack.decode(request, type=PageRequest))

    async def body(self, peer: str, request: bytes) -> bytes:
        return self.bodies.get(request[:HASH_BYTES], b"")


async def lend(stack: AsyncExitStack, network: MemoryNetwork, lender: Lender) -> MemoryHost:
    host = await stack.enter_async_context(network.host(LIAR.peer_id))
    await host.serve(LIBRARY_PROTOCOL, lender.page, max_request_bytes=MAX_PAGE_REQUEST_BYTES)
    await host.serve(BODY_PROTOCOL, lender.body, max_request_bytes=MAX_REQUEST_BYTES)
    return host


@pytest.fixture
def rows(groups_of, clock) -> Callable[..., list[SignedGroup]]:
    """Signed groups of the liar, by hash. `claims`: the rewards are the other way round."""

    def make(
        count: int, *, claims: bool = False, key: NodeKey = LIAR, swarm: str = "test"
    ) -> list[SignedGroup]:
        groups = [groups_of(key.peer_id, number=number, right=1, wrong=3) for number in range(count)]
        if claims:
            groups = [
                replace(group, scores=tuple({"correct": 1.0 - one["correct"]} for one in group.scores))
                for group in groups
            ]
        found = [
            compose(group, key, swarm=swarm, model=ModelLabel("tiny", 1), now=clock()) for group in groups
        ]
        return sorted(found, key=lambda row: row.header.body_hash)

    return make


def pages_of(rows: list[SignedGroup]) -> Callable[[PageRequest], Awaitable[bytes]]:
    async def page(request: PageRequest) -> bytes:
        found = [PageRow(row.sealed) for row in rows if row.header.body_hash > request.after]
        return msgspec.msgpack.encode(LibraryPage(tuple(found[:MAX_PAGE_HEADERS]), False))

    return page


def always(data: bytes) -> Callable[[PageRequest], Awaitable[bytes]]:
    async def page(request: PageRequest) -> bytes:
        return data

    return page


async def never(request: PageRequest) -> bytes:
    await asyncio.sleep(3600)
    return b""


def bodies(rows: list[SignedGroup]) -> dict[bytes, bytes]:
    return {row.header.body_hash: row.body for row in rows}


async def test_an_honest_lender_is_learnt_from_beside_a_silent_one(start, groups_of):
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        silent = await lend(stack, network, Lender(never))
        veteran = await stack.enter_async_context(start(network, 1))
        await learns(veteran, [groups_of(veteran.key.peer_id, number=number) for number in range(4)])
        newcomer = await stack.enter_async_context(start(network, 2, silent, veteran.host))
        assert len(await borrowed(newcomer, 4)) == 4


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"\x00" * (MAX_PAGE_BYTES + 1), "too_large"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode(LibraryPage((PageRow(b"no header"),), True)), "malformed"),
        (msgspec.msgpack.encode((((b"",),) * (MAX_PAGE_HEADERS + 1), False)), "malformed"),
        (msgspec.msgpack.encode((((b"\x00" * 5000,),), False)), "malformed"),
    ],
)
async def test_a_page_that_is_none_is_charged_to_who_gave_it(start, page, reason):
    network, lender = MemoryNetwork(), Lender(always(page))
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, lender)
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: newcomer.dropped(reason))
        assert newcomer.figures_of(LIAR.peer_id).score < FULL_SCORE
        await asyncio.sleep(0.1)
        assert lender.asked == 1, "the section is not asked for again"


async def test_a_forged_signature_and_another_swarm_are_charged_to_who_lends_them(start, rows):
    for sealed, reason in (
        (rows(1)[0].sealed[:-1] + b"\x00", "bad_signature"),
        (rows(1, swarm="another")[0].sealed, "other_swarm"),
    ):
        network = MemoryNetwork()
        page = msgspec.msgpack.encode(LibraryPage((PageRow(sealed),), False))
        async with AsyncExitStack() as stack:
            liar = await lend(stack, network, Lender(always(page)))
            newcomer = await stack.enter_async_context(start(network, 2, liar))
            await until(lambda: newcomer.dropped(reason))  # noqa: B023
            assert newcomer.library.draw(9) == []


def signed(header: Header, body: bytes = b"") -> PageRow:
    return PageRow(seal(LIAR, HEADER_CONTEXT, encode_header(header)), body)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("another version", "malformed"),
        ("another version in the body", "body_mismatch"),
        ("more answers than there are", "body_mismatch"),
        ("more bytes than there are", "wrong_body"),
        ("more bytes than we could use", "oversized"),
        ("no signature", "malformed"),
        ("an empty signature", "bad_signature"),
        ("a body too large to stand beside it", "malformed"),
    ],
)
async def test_a_row_that_lies_is_not_taken(start, rows, groups_of, clock, case, reason):
    (sent,) = rows(1)
    lies = {
        "another version": {"version": "2"},
        "more answers than there are": {"group_size": 9},
        "more bytes than there are": {"body_bytes": sent.header.body_bytes + 1},
        "more bytes than we could use": {"body_bytes": MAX_BODY_BYTES},
    }
    row = signed(msgspec.structs.replace(sent.header, **lies.get(case, {})), sent.body)
    match case:
        case "another version in the body":
            group = groups_of(LIAR.peer_id, task=Addition(version="2"))
            other = compose(group, LIAR, swarm="test", model=ModelLabel("tiny", 1), now=clock())
            row = signed(msgspec.structs.replace(other.header, version="1"), other.body)
        case "no signature":
            row = PageRow(encode_header(sent.header), sent.body)
        case "an empty signature":
            unsigned = Envelope(LIAR.peer_id, encode_header(sent.header), b"\x00" * 64)
            row = PageRow(msgspec.msgpack.encode(unsigned), sent.body)
        case "a body too large to stand beside it":
            row = PageRow(sent.sealed, b"\x00" * (MAX_BODY_BESIDE + 1))
        case _:
            pass
    network, page = MemoryNetwork(), msgspec.msgpack.encode(LibraryPage((row,), False))
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, Lender(always(page)))
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: newcomer.library.refused.get(reason))
        is_offence = reason != "oversized"  # An honest peer may keep what is too large for us.
        assert bool(newcomer.dropped(reason)) == is_offence
        assert newcomer.library.draw(9) == [] and newcomer.library.groups == 0


async def test_a_promise_of_more_behind_an_empty_page_is_believed_once_each_way(start):
    network, lender = MemoryNetwork(), Lender(always(msgspec.msgpack.encode(LibraryPage((), True))))
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, lender)
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: lender.asked == 2)
        await asyncio.sleep(0.1)
        assert lender.asked == 2 and newcomer.library.draw(9) == []


async def test_pages_without_end_are_asked_for_once_each_hash(start, rows):
    """A lender whose pages always promise more has to bring new hashes, and pays for each that is none."""
    some = rows(3)
    page = msgspec.msgpack.encode(LibraryPage(tuple(PageRow(row.sealed) for row in some), True))
    lender = Lender(always(page), bodies(some))
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, lender)
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: newcomer.dropped("malformed"))
        await asyncio.sleep(0.1)
        assert lender.asked <= 3


async def test_bodies_that_are_not_what_was_named_end_it_soon(start, rows):
    some = rows(64)
    lender = Lender(pages_of(some), {row.header.body_hash: b"rubbish" for row in some})
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, lender)
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: LIAR.peer_id in newcomer.exchange.stats().banned_peers)
        assert newcomer.dropped("wrong_body") <= 5


async def test_a_body_that_is_not_what_its_header_names_ends_it_soon_beside_it_too(start, rows):
    some = rows(30)

    async def page(request: PageRequest) -> bytes:
        behind = [row for row in some[1:] if row.header.body_hash > request.after]
        found = tuple(PageRow(row.sealed, some[0].body) for row in behind)
        return msgspec.msgpack.encode(LibraryPage(found, False))

    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, Lender(page))
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: LIAR.peer_id in newcomer.exchange.stats().banned_peers)
        assert newcomer.dropped("wrong_body") <= 5 and newcomer.library.draw(9) == []


async def test_false_claims_are_the_authors_fault_and_the_lender_is_not_asked_on(start, rows, clock):
    key = NodeKey(b"\x08" * 32)
    some = rows(60, claims=True, key=key)
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, Lender(pages_of(some), bodies(some)))
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: newcomer.exchange.stats().banned_peers == (key.peer_id,))
        assert newcomer.figures_of(LIAR.peer_id).score == FULL_SCORE
        await asyncio.sleep(0.1)
        assert newcomer.library.groups <= borrower.IN_VAIN


async def test_copies_under_another_name_are_not_taken(start, groups_of, clock):
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        veteran = await stack.enter_async_context(start(network, 1))
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(3)]
        await learns(veteran, groups)
        copies = [
            compose(
                replace(group, author=LIAR.peer_id), LIAR, swarm="test", model=ModelLabel("", 1), now=clock()
            )
            for group in groups
        ]
        copies.sort(key=lambda row: row.header.body_hash)
        liar = await lend(stack, network, Lender(pages_of(copies), bodies(copies)))
        newcomer = await stack.enter_async_context(start(network, 2, veteran.host, liar))
        await until(lambda: newcomer.library.refused.get("copied") == 3)
        assert len(newcomer.library.draw(9)) == 3


async def test_a_crowd_of_lenders_is_bounded(start):
    network, asked = MemoryNetwork(), set[str]()
    async with AsyncExitStack() as stack:
        hosts: list[MemoryHost] = []
        for number in range(20, 20 + 2 * borrower.MAX_LENDERS):
            host = await stack.enter_async_context(network.host(NodeKey(bytes([number]) * 32).peer_id))

            async def page(peer: str, request: bytes, name: str = host.peer_id) -> bytes:
                asked.add(name)
                return msgspec.msgpack.encode(LibraryPage())

            await host.serve(LIBRARY_PROTOCOL, page, max_request_bytes=MAX_PAGE_REQUEST_BYTES)
            hosts.append(host)
        newcomer = await stack.enter_async_context(start(network, 2, *hosts))
        await until(lambda: newcomer.library.is_done)
        assert len(asked) == borrower.MAX_LENDERS


async def test_who_asks_without_end_is_served_within_its_allowance(start, groups_of):
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        veteran = await stack.enter_async_context(start(network, 1))
        await learns(veteran, [groups_of(veteran.key.peer_id)])
        taker = await stack.enter_async_context(network.host(LIAR.peer_id))
        await taker.connect(veteran.host.address)
        request = msgspec.msgpack.encode(PageRequest("addition", "1"))
        answers = [
            await taker.request(
                veteran.key.peer_id, LIBRARY_PROTOCOL, request, max_response_bytes=MAX_PAGE_BYTES
            )
            for _ in range(100)
        ]
        assert 0 < sum(map(bool, answers)) <= 65 and veteran.dropped("too_many_requests") >= 35
        for damaged in (b"", b"\xc1", msgspec.msgpack.encode(PageRequest("addition", "1", b"\x00" * 33))):
            assert await veteran.library.pages.answer("12D3KooWother", damaged) == b""
        assert veteran.dropped("bad_request") == 3


async def test_what_a_lender_gave_before_its_time_was_up_may_come_from_another(start, rows, monkeypatch):
    """It promises more, and says no more: what it gave waits for further ones to be judged with."""
    monkeypatch.setattr(borrower, "LEND_FOR_S", 0.3)
    groups = rows(3)

    async def page(request: PageRequest) -> bytes:
        if request.after >= groups[-1].header.body_hash:
            return await never(request)
        return msgspec.msgpack.encode(LibraryPage(tuple(PageRow(one.sealed) for one in groups), True))

    monkeypatch.setattr(borrower, "HASH_BYTES", 0)  # It is read from its beginning.
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        liar = await lend(stack, network, Lender(page, bodies(groups)))
        newcomer = await stack.enter_async_context(start(network, 2, liar))
        await until(lambda: len(newcomer.library._known) == len(groups))
        await until(lambda: not newcomer.library._known)
