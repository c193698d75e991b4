"""Libraries over a network in memory: what one node's book holds, another has at its start."""

import asyncio
from dataclasses import replace

import pytest

from swarmnode.exchange.library import borrower
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import line_of
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from tests.unit.exchange.conftest import Addition, until
from tests.unit.exchange.library.conftest import borrowed, learns

LONG_AGO_S = 30 * 86400.0


async def test_a_newcomer_has_what_a_veterans_book_holds_however_old_it_is(
    start, groups_of, clock, as_learnt
):
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(5)]
        await learns(veteran, groups)
        clock.advance(LONG_AGO_S)
        async with start(network, 2, veteran.host) as newcomer:
            found = await borrowed(newcomer, 5)
            assert {group.example.key for group in found} == {group.example.key for group in groups}
            assert all(as_learnt(group) in found for group in groups)
            assert newcomer.exchange.stats().accepted == 0, "nothing of it came by gossip"
            assert len(newcomer.library.lenders) == len(newcomer.library.of_author) == 1


async def test_what_the_book_does_not_hold_is_not_lent(start, groups_of):
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(4)]
        await veteran.exchange.publish(groups)
        veteran.library.note_book({(groups[0].author, groups[0].example.key)})
        async with start(network, 2, veteran.host) as newcomer:
            (found,) = await borrowed(newcomer, 1)
            assert found.example.key == groups[0].example.key
            await asyncio.sleep(0.1)
            assert newcomer.library.draw(9) == []


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Searches whose first part is over at once."""
    monkeypatch.setattr(borrower, "LOOK_FOR_S", 0.0)
    monkeypatch.setattr(borrower, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(borrower, "LOOK_LATE_S", 0.01)
    return monkeypatch


class AtHome(Addition):
    exchangeable = False


@pytest.mark.parametrize(
    ("task", "private", "held"), [(Addition(), False, 2), (AtHome(), False, 0), (Addition(), True, 0)]
)
async def test_what_may_not_leave_a_node_is_not_in_its_library(start, groups_of, private: bool, held: int):
    async with start(MemoryNetwork(), 1, private=private) as node:
        sampled = [groups_of(node.key.peer_id), groups_of(node.key.peer_id, number=1, right=4, wrong=0)]
        unscored = replace(sampled[0], scores=({"correct": None},) * 4)
        await learns(node, [*sampled, unscored])
        assert len(node.library.shelf) == held


async def test_who_meets_its_first_lender_late_has_its_library_then(start, groups_of, hurried):
    network = MemoryNetwork()
    async with start(network, 1) as veteran, start(network, 3) as nobody:
        await learns(veteran, [groups_of(veteran.key.peer_id, number=number) for number in range(3)])
        async with start(network, 2, nobody.host) as late:
            await until(lambda: nobody.library.pages.served == 2)
            await asyncio.sleep(0.1)
            assert nobody.library.pages.served == 2, "it has nothing, and is not asked again"
            await late.host.connect(veteran.host.address)
            await borrowed(late, 3)
            assert len(late.library.lenders) == 1


async def test_who_is_never_right_asks_again_and_not_too_often(start, groups_of, hurried):
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        groups = [groups_of(veteran.key.peer_id, number=number) for number in range(4)]
        await learns(veteran, groups)
        veteran.library.note_book({(groups[0].author, groups[0].example.key)})
        async with start(network, 2, veteran.host) as node:
            await borrowed(node, 1)
            await until(lambda: node.library.is_done)
            veteran.library.note_book({(group.author, group.example.key) for group in groups})
            hurried.setattr(borrower, "AGAIN_S", 0.0)
            pages = veteran.library.pages.served
            await asyncio.sleep(0.1)
            assert veteran.library.pages.served == pages, "what it has is enough"
            hurried.setattr(borrower, "AGAIN_S", 3600.0)
            node.library.ask_again()
            await asyncio.sleep(0.1)
            assert veteran.library.pages.served == pages, "it has just asked"
            hurried.setattr(borrower, "AGAIN_S", 0.0)
            assert len(await borrowed(node, 3)) == 3
            await until(lambda: node.library.is_done)
            pages = veteran.library.pages.served
            await asyncio.sleep(0.1)
            assert veteran.library.pages.served == pages, "once each time that it is wanted"


async def test_who_was_cut_off_for_long_asks_again_when_it_is_back(start, groups_of, hurried):
    network = MemoryNetwork()
    hurried.setattr(borrower, "AGAIN_S", 0.0)
    hurried.setattr(borrower, "CUT_OFF_S", 0.2)
    async with start(network, 1) as veteran:
        await learns(veteran, [groups_of(veteran.key.peer_id, number=0)])
        async with start(network, 2, veteran.host) as node:
            await borrowed(node, 1)
            await until(lambda: node.library.is_done)
            pages = veteran.library.pages.served
            await node.host.disconnect(veteran.key.peer_id)
            await asyncio.sleep(0.3)
            await learns(veteran, [groups_of(veteran.key.peer_id, number=number) for number in range(3)])
            await node.host.connect(veteran.host.address)
            assert len(await borrowed(node, 2)) == 2
            await until(lambda: node.library.is_done)
            after = veteran.library.pages.served
            assert after > pages
            await node.host.disconnect(veteran.key.peer_id)
            await asyncio.sleep(0.05)
            await node.host.connect(veteran.host.address)
            await asyncio.sleep(0.1)
            assert veteran.library.pages.served == after, "a short cut is none"


async def test_no_more_is_judged_than_rounds_take(start, groups_of, hurried):
    hurried.setattr(borrower, "JUDGED_TOGETHER", 1)
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        await learns(veteran, [groups_of(veteran.key.peer_id, number=number) for number in range(20)])
        async with start(network, 2) as newcomer:
            newcomer.library.draw(3)
            await newcomer.host.connect((await veteran.host.addresses())[0])
            await until(lambda: newcomer.library.waiting == 3)
            await asyncio.sleep(0.1)
            assert newcomer.library.groups == 3
            assert newcomer.library.draw(0) == []
            assert len(await borrowed(newcomer, 20)) == 20, "the next rounds take the rest"


async def test_what_was_ours_does_not_come_back_from_others(start, groups_of):
    network = MemoryNetwork()
    async with start(network, 2) as other, start(network, 1) as veteran:
        ours = groups_of(other.key.peer_id, number=0)
        theirs = groups_of(veteran.key.peer_id, number=1)
        await other.host.connect(veteran.host.address)
        await other.exchange.publish([ours])
        await until(lambda: veteran.exchange.stats().headers_seen)
        assert await veteran.exchange.collect(1, 0, 5.0)
        await veteran.exchange.publish([theirs])
        veteran.library.note_book({(one.author, one.example.key) for one in (ours, theirs)})
        assert len(veteran.library.shelf) == 2
    async with start(network, 1, shelf=veteran.library.shelf) as lender:
        lender.library.note_book({(one.author, one.example.key) for one in (ours, theirs)})
        async with start(network, 2, lender.host) as fresh:
            (found,) = await borrowed(fresh, 1)
            assert found.author == veteran.key.peer_id
            await until(lambda: lender.library.pages.served)
            await asyncio.sleep(0.1)
            assert fresh.library.draw(9) == []


@pytest.mark.parametrize("book", ["has other finds of ours", "is empty"])
async def test_what_our_own_book_let_go_of_does_not_come_back_from_our_file(
    start_node, composed_by, groups_of, tmp_path, book
):
    us, another = NodeKey(bytes([1]) * 32), NodeKey(b"\x09" * 32)
    path = tmp_path / "library.jsonl"
    path.write_bytes(line_of(composed_by(us, 0)) + line_of(composed_by(another, 1)))
    find = groups_of(us.peer_id, number=5)
    has = {(find.author, find.example.key)} if book == "has other finds of ours" else set()
    async with start_node(MemoryNetwork(), 1, shelf=Shelf(path)) as node:
        assert node.key.peer_id == us.peer_id
        node.library.note_book(has)
        authors = {group.author for group in await borrowed(node, 1 if has else 2)}
        assert authors == ({another.peer_id} if has else {us.peer_id, another.peer_id})
        await until(lambda: not node.library.shelf.unread([("addition", "1")]))
        assert node.library.draw(9) == []


async def test_who_was_made_to_look_at_too_much_asks_nobody_any_more(start, groups_of, hurried):
    hurried.setattr(borrower, "AGAIN_S", 0.0)
    hurried.setattr(borrower, "MAX_LOOKED_AT", 3)
    network = MemoryNetwork()
    async with start(network, 1) as veteran:
        await learns(veteran, [groups_of(veteran.key.peer_id, number=number) for number in range(9)])
        async with start(network, 2, veteran.host) as node:
            assert len(await borrowed(node, 3)) == 3
            node.library.ask_again()
            await until(lambda: node.library.is_done)
            await asyncio.sleep(0.1)
            assert node.library.groups == 3


async def test_a_group_at_home_on_which_our_task_stumbles_costs_no_other(
    start, composed_by, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    author = NodeKey(b"\x09" * 32)
    path, (odd, sound) = tmp_path / "library.jsonl", [composed_by(author, number) for number in range(2)]
    path.write_bytes(line_of(odd) + line_of(sound))
    score = Addition.score

    def stumbles(task, example, completions):
        if example.key == odd.header.key:
            raise ValueError("nobody thought of this")
        return score(task, example, completions)

    monkeypatch.setattr(Addition, "score", stumbles)
    monkeypatch.setattr(borrower, "JUDGED_TOGETHER", 1)
    async with start(MemoryNetwork(), 1, shelf=Shelf(path)) as node:
        (group,) = await borrowed(node, 1)
        assert group.example.key == sound.header.key
        assert node.library.refused == {"internal": 1} and node.library.at_home == 1
        await until(lambda: "judged this home's library: 1 groups accepted, 1 refused" in caplog.text)
        assert "judging the 2 groups in this home's library" in caplog.text
