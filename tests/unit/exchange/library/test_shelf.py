"""What a node keeps for others: as long as its book holds it, within bounds, over restarts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.shelf import Shelf, ShelvedGroup
from swarmnode.exchange.library.signed_group import SignedGroup, read_rows, signed_group
from swarmnode.identity.node_key import NodeKey

TASKS = [("addition", "1")]
Signed = Callable[..., SignedGroup]


@pytest.fixture
def signed(groups_of) -> Signed:
    key = NodeKey(b"\1" * 32)

    def make(number: int = 0, *, swarm: str = "test") -> SignedGroup:
        group = groups_of(key.peer_id, number=number)
        sent = compose(group, key, swarm=swarm, model=ModelLabel("tiny", 1000), now=1_700_000_000.0)
        return signed_group(sent.sealed, sent.body)

    return make


def taught(shelf: Shelf, *groups: SignedGroup) -> None:
    """All are offered, and the book takes them."""
    for group in groups:
        shelf.offer(group)
    shelf.note_book({group.origin for group in groups}, TASKS)


def page(shelf: Shelf, after: bytes = b"", limit: int = 99, swarm: str = "test") -> list[SignedGroup]:
    return shelf.page(swarm, *TASKS[0], after, limit)[0]


def test_what_waits_for_the_book_is_not_lent_and_leaves_when_it_is_not_taken(signed: Signed) -> None:
    shelf, group = Shelf(rounds_to_wait=3), signed()
    shelf.offer(group)
    assert page(shelf) == [] and len(shelf) == 0 and group.name in shelf
    for _ in range(3):
        shelf.note_book((), TASKS)
    assert group.name in shelf
    shelf.note_book((), TASKS)
    assert group.name not in shelf and shelf.size_bytes == 0 and shelf.body(group.header.body_hash) is None


def test_what_the_book_lets_go_of_leaves(signed: Signed) -> None:
    shelf, group = Shelf(rounds_to_wait=0), signed()
    taught(shelf, group)
    assert page(shelf) == [group]
    shelf.note_book((), TASKS)
    assert page(shelf) == [] and group.name not in shelf


def test_groups_of_other_tasks_stay(signed: Signed) -> None:
    shelf, group = Shelf(rounds_to_wait=0), signed()
    taught(shelf, group)
    shelf.note_book((), [("addition", "2")])
    assert page(shelf) == [group]


def test_pages_go_on_behind_a_hash_and_meet_every_group_once(signed: Signed) -> None:
    shelf, groups = Shelf(), [signed(number) for number in range(7)]
    taught(shelf, *groups)
    found, after, more = list[SignedGroup](), b"", True
    while more:
        part, more = shelf.page("test", *TASKS[0], after, 3)
        assert len(part) <= 3
        found += part
        after = part[-1].header.body_hash
    hashes = [group.header.body_hash for group in found]
    assert hashes == sorted(hashes) and set(hashes) == {group.header.body_hash for group in groups}


def test_groups_of_another_swarm_are_kept_and_not_lent(signed: Signed) -> None:
    shelf = Shelf()
    taught(shelf, signed(swarm="private"))
    assert len(shelf) == 1 and page(shelf) == [] and len(page(shelf, swarm="private")) == 1


def test_it_is_bounded_in_number_and_bytes_and_the_oldest_leave(signed: Signed) -> None:
    kept, waiting = signed(0), [signed(1), signed(2)]
    shelf = Shelf(max_groups=2)
    taught(shelf, kept)
    for group in waiting:
        shelf.offer(group)
    assert kept.name in shelf and waiting[0].name not in shelf, "who waits has a part, and no more"
    full = Shelf(max_groups=8)
    taught(full, *(signed(number) for number in range(8)))
    full.offer(signed(9))
    assert signed(0).name not in full and signed(9).name in full
    loaded = Shelf(max_groups=8)
    for number in range(24):
        loaded._add(ShelvedGroup(signed(number), in_book=number % 2 == 0))
    loaded._keep_within_bounds()
    assert [row.group for row in loaded._rows.values()] == [
        signed(number) for number in (12, 14, 16, 18, 20, 21, 22, 23)
    ]
    small = Shelf(max_bytes=6 * kept.size_bytes)
    for number in range(9):
        taught(small, *(signed(place) for place in range(number)))
    assert signed(0).name not in small and small.size_bytes <= 6 * kept.size_bytes


async def test_a_restart_finds_what_was_kept(signed: Signed, tmp_path: Path) -> None:
    path, groups = tmp_path / "library.jsonl", [signed(number) for number in range(3)]
    before = Shelf(path)
    taught(before, *groups)
    before.offer(signed(9))
    await before.write()
    after = Shelf(path)
    assert after.load() == 0
    after.note_book({group.origin for group in groups}, TASKS)
    assert {group.name for group in page(after)} == {group.name for group in groups}
    assert after.next_unread(TASKS) is None, "the book holds them all"


async def test_what_a_book_that_starts_over_does_not_hold_is_read_again(
    signed: Signed, tmp_path: Path
) -> None:
    path, groups = tmp_path / "library.jsonl", [signed(number) for number in range(2)]
    before = Shelf(path)
    taught(before, *groups)
    await before.write()
    after = Shelf(path, rounds_to_wait=1)
    after.load()
    for _ in range(9):
        after.note_book((), TASKS)
    assert page(after) == [], "nothing is lent that this book does not hold"
    read = [after.next_unread(TASKS), after.next_unread(TASKS)]
    assert read == groups and after.next_unread(TASKS) is None


async def test_rows_are_added_and_the_file_is_made_anew_when_most_of_it_is_gone(
    signed: Signed, tmp_path: Path
) -> None:
    path, shelf = tmp_path / "library.jsonl", Shelf(tmp_path / "library.jsonl", rounds_to_wait=0)
    for number in range(100):
        taught(shelf, signed(number))
        await shelf.write()
    assert 1 <= len(list(read_rows(path))) <= 67
    assert [found for _, found in read_rows(path)][-1] == signed(99)


async def test_what_the_book_let_go_of_is_not_read_again_after_a_stop(signed: Signed, tmp_path: Path) -> None:
    path, groups = tmp_path / "library.jsonl", [signed(number) for number in range(3)]
    before = Shelf(path)
    taught(before, *groups)
    await before.write()
    before.note_book({groups[0].origin}, TASKS)
    before.note_book({groups[0].origin, groups[1].origin}, TASKS)
    await before.write(last=True)
    assert {found.name for _, found in read_rows(path) if isinstance(found, SignedGroup)} == {
        groups[0].name,
        groups[1].name,
    }


async def test_what_was_never_looked_at_stays_in_the_file_at_a_stop(signed: Signed, tmp_path: Path) -> None:
    path, group = tmp_path / "library.jsonl", signed()
    before = Shelf(path)
    taught(before, group)
    await before.write()
    after = Shelf(path, rounds_to_wait=1)
    after.load()
    for _ in range(4):
        after.note_book((), TASKS)
    await after.write(last=True)
    assert [found for _, found in read_rows(path)] == [group]


async def test_a_damaged_row_costs_itself_and_is_gone_after_the_next_write(
    signed: Signed, tmp_path: Path
) -> None:
    path, groups = tmp_path / "library.jsonl", [signed(number) for number in range(3)]
    before = Shelf(path)
    taught(before, *groups)
    await before.write()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff" * 40 + b"\n" + lines[1] + lines[2][:100])
    after = Shelf(path)
    assert after.load() == 2
    after.note_book({group.origin for group in groups}, TASKS)
    assert len(page(after)) == 2
    taught(after, *groups)
    await after.write()
    assert [found for _, found in read_rows(path)] == groups


async def test_a_row_that_lost_its_end_costs_no_other(signed: Signed, tmp_path: Path) -> None:
    path, groups = tmp_path / "library.jsonl", [signed(number) for number in range(3)]
    before = Shelf(path)
    taught(before, *groups[:2])
    await before.write()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    after = Shelf(path)
    assert after.load() == 0
    taught(after, *groups)
    await after.write()
    assert [found for _, found in read_rows(path)] == groups


async def test_a_disk_that_is_full_costs_the_file_and_nothing_else(signed: Signed, tmp_path: Path) -> None:
    (tmp_path / "library.jsonl").mkdir()
    shelf = Shelf(tmp_path / "library.jsonl")
    assert shelf.load() == 0
    taught(shelf, signed())
    await shelf.write()
    assert len(page(shelf)) == 1


async def test_a_write_that_is_cancelled_is_waited_for_by_the_next_one(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, groups, go_on = tmp_path / "library.jsonl", [signed(number) for number in range(3)], Event()
    shelf = Shelf(path)
    taught(shelf, *groups)
    write = shelf._write

    def slowly(*what: Any) -> None:
        go_on.wait(60)
        write(*what)

    monkeypatch.setattr(shelf, "_write", slowly)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(shelf.write())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        tasks.create_task(shelf.write())
        await asyncio.sleep(0)
        go_on.set()
    assert [found for _, found in read_rows(path)] == groups
