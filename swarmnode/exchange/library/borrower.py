"""Asks several peers for their libraries, and has every group judged here.

shelf.py (what the home has), library_pages.py (what peers have) -> [Borrower] -> check_header, check_body as
        for groups that were announced -> [Borrower.draw] -> a round's external groups -> mending -> the book

A group of a library is treated like any other, except for its age, which does not matter for a right answer.
No group is taken twice, since groups are known by author and hash. The new part is the peer that gives it. It
is asked for one thing at a time and for a bounded number of groups, and pays for the time of our judge.
Several peers are asked at once, each starting at a different place and going from task to task, so a silent,
slow or lying one costs its own part and no more. Faults that an honest peer would have found itself are
charged to the peer that served the group, and a false claim to the author that signed it. A peer most of
whose groups were of no use is not asked further.

Peers are asked at a start, and again for only three reasons, at most every AGAIN_S: nobody has lent us
anything yet, the node is never right at something (`ask_again`), or it was cut off from everybody for
CUT_OFF_S and is back.

Nothing waits for any of this: rounds take the groups that are ready.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from swarmnode.errors import HostDown, NetworkError, Rejected
from swarmnode.exchange.bodies.body_transfer import HASH_BYTES, BodyTransfer
from swarmnode.exchange.bodies.fetcher import Fetcher
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.library_pages import LibraryPage, LibraryPages, PageRequest, PageRow
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import GroupName, Origin, SignedGroup, glance
from swarmnode.exchange.limits import LEAST_NEED
from swarmnode.exchange.messages import Announcement, Header, hash_body
from swarmnode.exchange.validation.body_check import CheckedBody
from swarmnode.exchange.validation.header_check import check_header
from swarmnode.tasks.task import may_be_exchanged
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

MAX_LENDERS = 8
"""Peers that are asked in one search: most of them have whatever a ninth would have."""

LENDERS_AT_ONCE = 4

MAX_BORROWED = 1536
"""Groups that one search takes from all libraries together: they fill the usual book of 2000 answers."""

MAX_LOOKED_AT = 16 * MAX_BORROWED
"""Most groups examined since the start, in all searches; after that, nobody is asked any more."""

MAX_PER_LENDER = 512
"""Groups of one peer that are examined, so that we learn from several peers."""

MAX_PER_AUTHOR = 384
"""Groups of one author, from all peers together."""

MAX_BORROWED_BYTES = 64 * 1024 * 1024
"""Bytes of the groups that one search takes."""

JUDGED_TOGETHER = 16
"""Groups that one thread judges, as long as that is quick: starting a thread costs as much as judging a
group."""

MAX_READY = 256
"""Most judged groups that wait for a round; beyond it nothing is fetched. As many as the last round took are
enough: a group that no round takes was judged for nothing."""

IN_VAIN = 16
"""Surplus of useless over useful groups and pages at which a peer is not asked further."""

LOOK_FOR_S = 300.0
"""Seconds that a search looks for peers. If nobody has lent anything by then, it goes on looking, less
often."""

AGAIN_S = 600.0
"""Least seconds from the beginning of a search to that of the next, and until a peer is asked again."""

LEND_FOR_S = 900.0
"""Most seconds that one peer is asked: our judge's time for it may be short, or its upload."""

LOOK_EVERY_S = 0.25
"""Seconds between two checks for a new peer, for room, or for time of the judge."""

LOOK_LATE_S = 5.0
"""Seconds between two checks for a new peer after LOOK_FOR_S, and for any peer between two searches."""

CUT_OFF_S = 1800.0
"""Seconds without any peer after which others may have found answers that gossip no longer brings."""

ASK_S = 10.0
"""Deadline of one request."""

_KNOWN_TO_LENDER = frozenset(one for one in Reason if one.points >= 10) - {Reason.FALSE_CLAIM}
"""Reasons that an honest peer would have found out when it judged the group itself."""


class Borrower:
    """Borrows right answers. Once `note_book` has been called, `run` fetches in the background, and `draw`
    returns judged groups. The exchange loads, writes and serves what is kept and lent."""

    def __init__(
        self, context: ExchangeContext, shelf: Shelf, bodies: BodyTransfer, fetcher: Fetcher
    ) -> None:
        self._context, self._settings, self._ledger = context, context.settings, context.ledger
        self.shelf, self.pages = shelf, LibraryPages(context, shelf, bodies)
        self._bodies, self._fetcher = bodies, fetcher
        self._settled = asyncio.Event()
        self._versions = [(task.name, task.version) for task in context.tasks.values()]
        self._tasks = {name: task for name, task in context.tasks.items() if may_be_exchanged(task)}
        self._ready: deque[RolloutGroup] = deque()
        self._ahead = MAX_READY
        """Number of waiting judged groups at which nothing more is fetched."""
        self._drawn: set[Origin] = set()
        self._known: set[GroupName] = set()
        """Groups that were examined, or are about to be."""
        self._contents: set[bytes] = set()
        """Fingerprints of the groups that were taken."""
        self.of_author: Counter[str] = Counter()
        """Number of groups that passed all checks since the start, by author."""
        self.at_home = 0
        """Groups among these that this home had on disk."""
        self.lenders: set[str] = set()
        """Peers that gave the others."""
        self.refused: Counter[str] = Counter()
        """Number of groups that were not taken, by reason."""
        self._taken = self._taken_bytes = 0
        """Groups taken in this search, and their bytes."""
        self._done = self._wants_more = False
        self._asked_at: dict[str, float] = {}
        """Time at which each peer was asked, for those of the last AGAIN_S."""

    @property
    def waiting(self) -> int:
        """Groups that wait to be drawn."""
        return len(self._ready)

    def note_book(self, taught: Collection[Origin]) -> None:
        """Notes whose answers to which examples the book holds. Nothing is borrowed before that."""
        self.shelf.note_book(taught, self._versions)
        if not self._settled.is_set():
            # If the book has finds of ours in a task, it dropped our others: they would come back as a
            # stranger's.
            ours = self._context.key.peer_id
            self.shelf.skip_unread(ours, {key.task for author, key in taught if author == ours})
            self._settled.set()

    def draw(self, limit: int) -> list[RolloutGroup]:
        """Takes out at most `limit` judged groups, in the order in which they came. As many will be made
        ready again."""
        self._ahead = min(limit or self._ahead, MAX_READY)
        drawn = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        self._drawn.update((group.author, group.example.key) for group in drawn)
        return drawn

    def count_drawn(self, answers: Mapping[Origin, int]) -> int:
        """Returns how many of these answers come from groups that were drawn."""
        return sum(count for origin, count in answers.items() if origin in self._drawn)

    def ask_again(self) -> None:
        """Has peers asked again, AGAIN_S after the last search began: something here is never right."""
        self._wants_more = True

    @property
    def groups(self) -> int:
        """Number of groups that passed all checks since the start."""
        return self.of_author.total()

    @property
    def is_done(self) -> bool:
        """True if nobody is being asked and no group waits."""
        return self._done and not self._ready

    async def run(self) -> None:
        """Reads the groups that the home has, then asks peers: at once, and again whenever there is a reason
        to."""
        await self._settled.wait()
        await self._read_own()
        while len(self._known) < MAX_LOOKED_AT:
            begun, self._wants_more, self._done = monotonic(), False, False
            await self._ask_around(until=begun + LOOK_FOR_S)
            self._taken = self._taken_bytes = 0
            self._done = True
            await self._until_there_is_a_reason(begun)
        self._done = True

    async def _until_there_is_a_reason(self, begun: float) -> None:
        """Waits for a reason to ask again, and at least AGAIN_S from the beginning of the last search."""
        there_at = monotonic()
        while monotonic() < begun + AGAIN_S or not (self._wants_more or not self.lenders):
            await asyncio.sleep(LOOK_LATE_S)
            if await self._context.is_anybody_there():
                self._wants_more |= monotonic() >= there_at + CUT_OFF_S
                there_at = monotonic()

    async def _ask_around(self, *, until: float) -> None:
        """Runs one search, which asks at most MAX_LENDERS peers."""
        asked = 0
        asking: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as lenders:
            while not self._is_enough() and asked < MAX_LENDERS:
                room = min(LENDERS_AT_ONCE - len(asking), MAX_LENDERS - asked)
                for peer in (await self._peers())[:room]:
                    self._asked_at[peer] = monotonic()
                    asking.add(lenders.create_task(self._borrow_from(peer), name=f"library of {peer}"))
                    asked += 1
                if (late := monotonic() >= until) and self.lenders:
                    return
                await asyncio.sleep(LOOK_LATE_S if late else LOOK_EVERY_S)
                asking = {task for task in asking if not task.done()}

    # ---- what the home has ----

    async def _read_own(self) -> None:
        """Judges groups of our own file that the book may lack, taking at most half of the judge's time."""
        tasks = [(task.name, task.version) for task in self._tasks.values()]
        if unread := self.shelf.unread(tasks):
            logger.info("judging the %d groups in this home's library that have not been learnt from", unread)
        waiting: list[tuple[Announcement, bytes]] = []
        while not self._is_enough():
            while len(waiting) < JUDGED_TOGETHER and (group := self.shelf.next_unread(tasks)) is not None:
                try:
                    announcement = self._check(group.sealed, self._settings_of(group))
                except Rejected as rejected:
                    self.refused[rejected.reason] += 1
                else:
                    waiting.append((announcement, group.body))
            if not waiting:
                break
            try:
                judged = await self._judge(waiting, payer=None)
            except Exception:
                # Our task's code may raise anything; the other groups of the home are still read.
                logger.exception("failed to judge %d groups of our own library", len(waiting))
                self.refused[Reason.INTERNAL] += len(waiting)
                waiting.clear()
                continue
            for one, found in judged:
                if isinstance(found, Rejected):
                    self.refused[found.reason] += 1
                else:
                    self._take(*one, found)
                    self.at_home += 1
            await self._until_there_is_room()
        if unread:
            refused = sum(self.refused.values())
            logger.info("judged this home's library: %d groups accepted, %d refused", self.at_home, refused)

    def _settings_of(self, group: SignedGroup) -> ExchangeSettings:
        """Returns settings for the swarm of a group. A file may be of another swarm: the user who put it here
        trusts it."""
        return replace(self._settings, swarm=group.header.swarm)

    # ---- what peers have ----

    async def _peers(self) -> list[str]:
        """Returns the connected peers that may be asked and were not asked lately, in random order."""
        since = monotonic() - AGAIN_S
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if at > since}
        try:
            peers = sorted(set(await self._context.host.peers()) - self._asked_at.keys())
        except NetworkError:
            return []
        self._context.rng.shuffle(peers)
        # Policies of this process share one home, and hand each other their finds.
        strangers = [peer for peer in peers if self._context.trust_of(peer) != "neighbour"]
        return [peer for peer in strangers if not self._context.is_banned(peer)]

    async def _borrow_from(self, peer: str) -> None:
        """Takes everything that one peer may give us. The peer boundary: it ends without an exception."""
        lender = _Lender(peer)
        try:
            async with asyncio.timeout(LEND_FOR_S):
                for section in self._sections_in_turn(lender):
                    await self._take_one(lender, section)
                await self._judge_waiting(lender)
        except TimeoutError:
            logger.debug("reading the library of %s took too long", peer)
        except Exception:
            logger.exception("failed to read the library of %s", peer)
            self._ledger.drop(Reason.INTERNAL, peer)
        finally:
            # Groups that were fetched but not judged may still be taken from another peer.
            self._known.difference_update((one.author, one.header.body_hash) for one, _ in lender.waiting)

    def _sections_in_turn(self, lender: "_Lender") -> Iterator["_Section"]:
        """Yields sections of the peer's library that have more groups, in turns, until the peer is not asked
        any more. Sections that we need more come more often."""
        start = self._context.rng.randbytes(HASH_BYTES)
        sections = [_Section(task.name, task.version, start, after=start) for task in self._tasks.values()]
        self._context.rng.shuffle(sections)
        while sections:
            for section in tuple(sections):
                if self._is_enough() or lender.is_done or self._context.is_banned(lender.peer):
                    return
                if section.is_over:
                    sections.remove(section)
                elif self._context.rng.random() < max(LEAST_NEED, self._fetcher.needs.get(section.task, 1.0)):
                    yield section

    async def _take_one(self, lender: "_Lender", section: "_Section") -> None:
        """Takes one group of a section, after fetching a page if none is left."""
        await self._until_it_may_be_asked(lender)
        try:
            if not section.waiting:
                section.add_page(await self._fetch_page(lender, section))
            while section.waiting and not await self._borrow(lender, section, section.waiting.popleft()):
                pass
            if not section.waiting:
                section.end_page()
        except HostDown:
            await asyncio.sleep(LOOK_EVERY_S)
        except Rejected as rejected:
            section.end()
            self._refuse(lender, rejected)

    async def _fetch_page(self, lender: "_Lender", section: "_Section") -> LibraryPage:
        if not self._ledger.reputation.take_ask(lender.peer, self._context.clock()):
            raise Rejected(Reason.UNAVAILABLE)
        request = PageRequest(section.task, section.version, section.after)
        return await self.pages.ask(lender.peer, request, timeout_s=ASK_S)

    async def _borrow(self, lender: "_Lender", section: "_Section", row: PageRow) -> bool:
        """Takes one group of a page. Returns False if it is known or cannot be taken."""
        author, header = glance(row.sealed)
        name = author, header.body_hash
        if not section.pass_header(header) or name in self._known or name in self.shelf:
            return False
        # Our home has our own finds already, or dropped them.
        if author == self._context.key.peer_id or self.of_author[author] >= MAX_PER_AUTHOR:
            return False
        if self._context.is_banned(author):
            return False
        announcement = self._check(row.sealed, self._settings)
        self._known.add(name)
        try:
            body = await self._get_body(lender, announcement, row.body)
        except BaseException as error:
            self._known.discard(name)  # Another peer may have it.
            if isinstance(error, Rejected):
                self._refuse(lender, error)
                return True
            raise
        lender.waiting.append((announcement, body))
        if len(lender.waiting) >= JUDGED_TOGETHER:
            await self._judge_waiting(lender)
        return True

    async def _get_body(self, lender: "_Lender", announcement: Announcement, beside: bytes) -> bytes:
        """Returns the body of a group: the one beside its header, or what the peer gives for its hash."""
        if not beside:
            await self._until_it_may_be_asked(lender)
            return await self._bodies.fetch_from(lender.peer, announcement, timeout_s=ASK_S)
        header = announcement.header
        if len(beside) != header.body_bytes or hash_body(beside) != header.body_hash:
            raise Rejected(Reason.WRONG_BODY, "next to a header that names another")
        return beside

    async def _judge_waiting(self, lender: "_Lender") -> None:
        """Judges everything that was fetched from a peer, in one thread as long as that is quick."""
        while lender.waiting and not self._context.is_banned(lender.peer):
            await _until(lambda: self._fetcher.may_be_judged(lender.peer))
            for (announcement, body), found in await self._judge(lender.waiting, payer=lender.peer):
                if not isinstance(found, Rejected) and found.fingerprint in self._contents:
                    found = Rejected(Reason.COPIED, "the same answers came from another author")
                if isinstance(found, Rejected):
                    self._refuse(lender, found)
                    continue
                if found.false_claim:
                    self._ledger.drop(Reason.FALSE_CLAIM, announcement.author, found.false_claim)
                teaches = _teaches(found.group)
                lender.count(is_of_use=teaches and not found.false_claim)
                if teaches:
                    self.lenders.add(lender.peer)
                    self._take(announcement, body, found)
            await self._until_there_is_room()

    def _refuse(self, lender: "_Lender", rejected: Rejected) -> None:
        """Counts a group or page of no use, and blames the peer for faults that it must have known."""
        lender.count(is_of_use=False)
        self.refused[rejected.reason] += 1
        if rejected.reason in _KNOWN_TO_LENDER:
            # The author is at fault for what it signed, and the peer that served it is no better.
            self._ledger.drop(rejected.reason, lender.peer, f"in its library: {rejected.detail}")

    # ---- what both are ----

    def _check(self, sealed: bytes, settings: ExchangeSettings) -> Announcement:
        return check_header(sealed, self._context.arrive(), settings=settings, tasks=self._tasks)

    async def _judge(
        self, waiting: list[tuple[Announcement, bytes]], *, payer: str | None
    ) -> list[tuple[tuple[Announcement, bytes], CheckedBody | Rejected]]:
        """Takes out the groups that the judge had time for, with their results; if it gave none, takes out
        all. If nobody pays, the judge then rests for as long as it worked."""
        found, took_s = await self._fetcher.judge_together(tuple(waiting), payer=payer)
        judged = list(zip(waiting, found, strict=False))
        del waiting[: len(judged)]
        if payer is None:
            await asyncio.sleep(took_s)
        return judged

    def _take(self, announcement: Announcement, body: bytes, checked: CheckedBody) -> None:
        group = SignedGroup(announcement.author, announcement.header, announcement.sealed, body)
        self._known.add(group.name)
        self._contents.add(checked.fingerprint)
        self.of_author[group.author] += 1
        self._taken += 1
        self._taken_bytes += group.size_bytes
        self.shelf.offer(group)
        self._ready.append(checked.group)

    def _is_enough(self) -> bool:
        looked_at = len(self._known) >= MAX_LOOKED_AT
        return looked_at or self._taken >= MAX_BORROWED or self._taken_bytes >= MAX_BORROWED_BYTES

    async def _until_there_is_room(self) -> None:
        await _until(lambda: len(self._ready) < self._ahead)

    async def _until_it_may_be_asked(self, lender: "_Lender") -> None:
        """Waits until the peer need not refuse a request, and until our download allows one."""
        reputation = self._ledger.reputation
        await _until(
            lambda: self._bodies.may_fetch and reputation.may_be_asked(lender.peer, self._context.clock())
        )


@dataclass(slots=True)
class _Lender:
    """A peer that is being asked."""

    peer: str
    given: int = 0
    in_vain: int = 0
    waiting: list[tuple[Announcement, bytes]] = field(default_factory=list[tuple[Announcement, bytes]])
    """Groups that were fetched and are not judged yet."""

    @property
    def is_done(self) -> bool:
        looked_at = self.given + self.in_vain + len(self.waiting)
        return looked_at >= MAX_PER_LENDER or self.in_vain - self.given >= IN_VAIN

    def count(self, *, is_of_use: bool) -> None:
        self.given += is_of_use
        self.in_vain += not is_of_use


@dataclass(slots=True)
class _Section:
    """The groups of one task that a peer has. They are read from a place of our choice to the end, then from
    the beginning to that place."""

    task: str
    version: str
    start: bytes
    after: bytes
    waiting: deque[PageRow] = field(default_factory=deque[PageRow])
    more: bool = True
    """True if this part has further pages."""
    wrapped: bool = False
    """True while the second part is read."""
    is_over: bool = False

    def add_page(self, page: LibraryPage) -> None:
        """Continues with a page."""
        self.waiting.extend(page.rows)
        self.more = page.more and bool(page.rows)

    def pass_header(self, header: Header) -> bool:
        """Goes past a header. Returns False if all that follow were seen before. Raises Rejected if the
        header has no place on this page; otherwise a peer could go on for ever."""
        if (header.task, header.version) != (self.task, self.version):
            raise Rejected(Reason.MALFORMED, "a page of another task")
        if header.body_hash <= self.after:
            raise Rejected(Reason.MALFORMED, "a page out of order")
        self.after = header.body_hash
        if self.wrapped and self.after > self.start:
            self.end()
        return not self.is_over

    def end_page(self) -> None:
        """Notes that the last header of a page was passed."""
        if self.more or self.is_over:
            return
        if self.wrapped:
            self.end()
        else:
            self.wrapped, self.more, self.after = True, True, b""

    def end(self) -> None:
        """Ends the section: nothing more of it is asked for."""
        self.waiting.clear()
        self.is_over = True


def _teaches(group: RolloutGroup) -> bool:
    """Returns True if an answer in the group was worth more than nothing, or more than another."""
    rewards = [reward for reward in group.rewards if reward is not None]
    return bool(rewards) and (max(rewards) > 0 or max(rewards) > min(rewards))


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  time passes by itself, and rounds have no event to wait for
        await asyncio.sleep(LOOK_EVERY_S)
