"""The groups whose right answers are in this node's book, as their authors signed them, in memory and on
disk.

publish, accept -> [Shelf.offer] -> [Shelf.note_book] (what the book holds stays) -> library_pages.py, a file
start -> [Shelf.load] -> [Shelf.next_unread] -> borrower.py

The book belongs to the learner and knows nothing of signatures. So every group that may enter it is put here
first, and after each round `note_book` is told whose answers to which examples the book holds. Those groups
stay, and others can ask for them. Groups that the book did not take within some rounds, or dropped, leave.

The file is a library that anyone can read (signed_group.py). Rows are appended now and then, beside the event
loop. The file is rewritten when half of its rows have left the shelf, and at the end. After a kill, the rows
of the last seconds are missing. Rows of tasks that this node does not have now stay, within the bound of all.

At a start the book may hold less than the file: rows were imported, the node starts over, or the checkpoint
is older. Groups that the book does not hold are then read again, like a peer's library (borrower.py).
"""

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import Rejected
from swarmnode.exchange.library.signed_group import (
    GroupName,
    Origin,
    SignedGroup,
    line_of,
    read_rows,
)
from swarmnode.machine.storage import make_folder, replace_file

logger = logging.getLogger(__name__)

MAX_SHELF_GROUPS = 8192
"""Most groups kept: four times those of a book of 2000 answers, including those that wait for it."""

MAX_SHELF_BYTES = 64 * 1024 * 1024
"""Most bytes that they take, headers and bodies: usual groups have 1 to 30 KiB."""

ROUNDS_TO_WAIT = 16
"""Rounds that a group may take to enter the book: twice the age that groups of others may have."""

WAITING_SHARE = 0.25
"""Share of the bounds for groups that the book does not hold, or not yet."""

WRITE_ROWS_EVERY_S = 10.0


@dataclass(slots=True)
class ShelvedGroup:
    """A group and its place in the book."""

    group: SignedGroup
    in_book: bool = False
    """True if the book holds an answer of it."""
    rounds_absent: int = 0
    """Rounds in a row in which the book held none."""
    written: bool = False
    """True if the file has a line for it that belongs there: the book has not dropped it."""
    unread: bool = False
    """True if it came from the file and has not been checked for the book yet."""
    origin: Origin = field(init=False)
    task: tuple[str, str] = field(init=False)
    """Name and version of its task."""

    def __post_init__(self) -> None:
        self.origin = self.group.origin
        self.task = self.group.header.task, self.group.header.version


class Shelf:
    """Keeps groups within bounds and across restarts. All calls are made on one event loop, except `load`."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_groups: int = MAX_SHELF_GROUPS,
        max_bytes: int = MAX_SHELF_BYTES,
        rounds_to_wait: int = ROUNDS_TO_WAIT,
    ) -> None:
        """`path`: the file. None: nothing is kept across restarts."""
        self._path = path
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._rounds_to_wait = rounds_to_wait
        self._rows: dict[GroupName, ShelvedGroup] = {}
        self._bodies: dict[bytes, bytes] = {}
        self._size_bytes = 0
        self._pages: dict[tuple[str, str, str], list[tuple[bytes, str]]] | None = None
        """Names by swarm, task and version, of groups that the book holds answers of. None: to be built
        again."""
        self._lines = 0
        """Lines of the file."""
        self._torn = False
        """True if the file contains something other than rows."""
        self._write_failed = False
        self._writing: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return sum(row.in_book for row in self._rows.values())

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    @property
    def size_bytes(self) -> int:
        """Bytes of all groups here, including those that wait."""
        return self._size_bytes

    def groups(self) -> list[SignedGroup]:
        """Returns the groups that the book holds an answer of, oldest first."""
        return [row.group for row in self._rows.values() if row.in_book]

    def offer(self, group: SignedGroup) -> None:
        """Keeps a group until it is known whether the book takes an answer of it."""
        row = self._rows.get(group.name)
        if row is None:
            self._add(ShelvedGroup(group))
            self._keep_within_bounds()
        else:
            row.rounds_absent = 0

    def note_book(self, taught: Collection[Origin], tasks: Collection[tuple[str, str]]) -> None:
        """Notes whose answers to which examples the book holds after a round. That says nothing about groups
        of tasks other than `tasks` (names and versions)."""
        for name, row in tuple(self._rows.items()):
            if row.task not in tasks:
                continue
            known, row.in_book = row.in_book, row.origin in taught
            if row.in_book:
                row.rounds_absent, row.unread = 0, False
            elif not row.unread:
                row.rounds_absent += 1
            if row.in_book != known:
                self._pages = None
                row.written = row.written and not known
            if row.rounds_absent > self._rounds_to_wait:
                self._remove(name)

    def body(self, body_hash: bytes) -> bytes | None:
        """Returns a body that others may have."""
        return self._bodies.get(body_hash)

    def page(
        self, swarm: str, task: str, version: str, after: bytes, limit: int
    ) -> tuple[list[SignedGroup], bool]:
        """Returns at most `limit` groups of a task in the order of their hashes, beginning with the first
        above `after`, and True if there are more. Groups of other swarms stay at home."""
        names = self._sorted_names().get((swarm, task, version), [])
        start = bisect_right(names, after, key=lambda one: one[0])
        found = [self._rows[author, body_hash].group for body_hash, author in names[start : start + limit]]
        return found, start + limit < len(names)

    def skip_unread(self, author: str, tasks: Collection[str]) -> None:
        """Excludes this author's groups of these tasks from being read again."""
        for row in self._rows.values():
            if row.group.author == author and row.task[0] in tasks:
                row.unread = False

    def unread(self, tasks: Collection[tuple[str, str]]) -> int:
        """Returns the number of groups in the file that have not been examined since the start."""
        return sum(row.unread and row.task in tasks for row in self._rows.values())

    def next_unread(self, tasks: Collection[tuple[str, str]]) -> SignedGroup | None:
        """Returns a group of the file that has not been examined since the start, each only once."""
        for row in self._rows.values():
            if row.unread and row.task in tasks:
                row.unread = False
                return row.group
        return None

    # ---- the file ----

    def load(self) -> int:
        """Reads the file; blocks. Returns how many damaged rows were left out."""
        damaged = 0
        try:
            for number, found in self._lines_of_file():
                self._lines += 1
                if isinstance(found, Rejected):
                    damaged += 1
                    logger.debug("row %d of %s: %s", number, self._path, found)
                elif found.name not in self._rows:
                    self._add(ShelvedGroup(found, written=True, unread=True))
        except OSError as error:
            logger.warning("cannot read the library: %s; starting with an empty one", error)
        self._torn = self._torn or damaged > 0
        self._keep_within_bounds()
        if damaged:
            logger.warning("skipping %d damaged rows of the library (%s)", damaged, self._path)
        return damaged

    async def run(self) -> None:
        """Keeps the file up to date until cancelled."""
        while True:
            await asyncio.sleep(WRITE_ROWS_EVERY_S)
            await self.write()

    async def write(self, *, last: bool = False) -> None:
        """Brings the file up to date. The `last` time it leaves out the groups that the book dropped, which a
        start would read again. An error of the disk is logged once."""
        if self._path is None:
            return
        if self._writing is not None:
            await asyncio.wait([self._writing])
        kept = [row for row in self._rows.values() if row.in_book or row.written]
        new = [row for row in kept if not row.written]
        lines = self._lines + len(new)
        anew = self._torn or lines > 2 * len(kept) + 64 or (last and lines > len(kept))
        rows = kept if anew else new
        if not rows and not anew:
            return
        # Must not be cancelled: a half-written row would be lost together with the next one, and a thread
        # left alone would write to the same file as the next.
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, rows, anew)
        await asyncio.shield(self._writing)

    def _write(self, rows: list[ShelvedGroup], anew: bool) -> None:
        assert self._path is not None
        data = b"".join(line_of(row.group) for row in rows)
        try:
            if anew:
                replace_file(self._path, data)
            else:
                make_folder(self._path.parent)
                with self._path.open("ab") as file:
                    file.write(data)
        except OSError as error:
            if not self._write_failed:
                logger.warning("cannot write the library to disk: %s; the node continues", error)
            self._write_failed = self._torn = True
            return
        self._lines = len(rows) + (0 if anew else self._lines)
        self._torn = False
        for row in rows:
            row.written = True

    def _lines_of_file(self) -> Iterator[tuple[int, SignedGroup | Rejected]]:
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                self._torn = file.read(1) != b"\n"
        yield from read_rows(self._path)

    # ---- bounds ----

    def _add(self, row: ShelvedGroup) -> None:
        self._rows[row.group.name] = row
        self._bodies[row.group.header.body_hash] = row.group.body
        self._size_bytes += row.group.size_bytes

    def _remove(self, name: GroupName) -> None:
        row = self._rows.pop(name)
        self._bodies.pop(row.group.header.body_hash, None)
        self._size_bytes -= row.group.size_bytes
        if row.in_book:
            self._pages = None

    def _keep_within_bounds(self) -> None:
        """Drops the oldest groups until the others fit: waiting ones if they have more than their share,
        otherwise ones that the book holds."""
        if not self._is_over():
            return
        taught = deque(self.groups())
        waiting = deque(row.group for row in self._rows.values() if not row.in_book)
        waiting_bytes = sum(group.size_bytes for group in waiting)
        while self._is_over():
            too_many = len(waiting) > WAITING_SHARE * self._max_groups
            too_large = waiting_bytes > WAITING_SHARE * self._max_bytes
            if too_many or too_large or not taught:
                waiting_bytes -= waiting[0].size_bytes
                self._remove(waiting.popleft().name)
            else:
                self._remove(taught.popleft().name)

    def _is_over(self) -> bool:
        return len(self._rows) > self._max_groups or self._size_bytes > self._max_bytes

    def _sorted_names(self) -> dict[tuple[str, str, str], list[tuple[bytes, str]]]:
        if self._pages is None:
            found: dict[tuple[str, str, str], list[tuple[bytes, str]]] = {}
            for group in self.groups():
                header = group.header
                names = found.setdefault((header.swarm, header.task, header.version), [])
                names.append((header.body_hash, group.author))
            self._pages = {task: sorted(names) for task, names in found.items()}
        return self._pages
