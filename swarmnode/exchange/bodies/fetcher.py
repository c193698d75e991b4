"""Keeps the buffer filled: selects headers, fetches their bodies, has them judged, accepts the groups.

pool -> choose -> [Fetcher]: BodyTransfer.fetch -> Judge -> buffer -> Exchange.collect

It fetches only as many groups as are wanted, and from each author one at a time (two from a proven one): a
silent peer delays itself, and new or slow authors delay only each other (selection.py). Groups of a policy of
this process are chosen in the same way, but need not be fetched.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import HostDown, Rejected
from swarmnode.exchange.bodies.body_transfer import BodyTransfer
from swarmnode.exchange.bodies.replay_buffer import Accepted, ReplayBuffer
from swarmnode.exchange.bodies.selection import (
    Candidate,
    author_share,
    choose,
    choose_header,
    drawable,
    is_fresh,
    newcomer_share,
    slots_of,
)
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.gossip.inbox import Inbox
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import (
    LOOK_S,
    MAX_ANSWERED,
    MAX_CLOCK_SKEW_S,
    MAX_SEEN,
    MAX_STUCK_JUDGEMENTS,
    NEWCOMER_PATIENCE_S,
    PLAY_S,
    SLOW_S,
    UNFIT_S,
    VAIN_BYTES_BURST,
    VAIN_BYTES_PER_S,
    VAIN_DIALS_BURST,
    VAIN_DIALS_PER_S,
)
from swarmnode.exchange.messages import Announcement, Given
from swarmnode.exchange.peers.recently_seen import RecentlySeen
from swarmnode.exchange.peers.reputation import Trust
from swarmnode.exchange.validation.body_check import BodyRules, CheckedBody, check_body, require_advantage
from swarmnode.exchange.validation.judge import Judge
from swarmnode.exchange.validation.judge_time import JudgeTime
from swarmnode.exchange.validation.unfit_tasks import UnfitTasks
from swarmnode.token_bucket import TokenBucket
from swarmnode.types import ExampleKey, RolloutGroup

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two checks for stale headers and for peers whose pause is over, if nothing else happens."""

FETCHES_OF_PROVEN = 2
"""Fetches from one proven author at the same time. Behind routers a body takes twice as many steps, and in a
swarm of two no other author can be asked meanwhile."""

RECENT_S = 300.0
"""Seconds for which an author that gave us a group counts among those that share a draw."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A group that is being fetched or judged."""

    announcement: Announcement
    trust: Trust
    """Trust in its author when the fetch began."""
    began: float
    """Start of the fetch, on a clock that nobody sets."""


class Fetcher:
    """Fetches and judges the groups of waiting headers until they are accepted or dropped."""

    def __init__(
        self,
        context: ExchangeContext,
        bodies: BodyTransfer,
        inbox: Inbox,
        buffer: ReplayBuffer,
        rules: BodyRules,
        shelf: Shelf | None,
    ) -> None:
        """`inbox`: the headers that wait; it refuses those of accepted groups from then on. `shelf`: that of
        the library, which is offered these groups; None: there is none."""
        self._context, self._settings, self._ledger = context, context.settings, context.ledger
        self._bodies, self._inbox, self._pool, self._shelf = bodies, inbox, inbox.pool, shelf
        self._buffer, self._rules = buffer, rules
        self._judge = Judge(self._settings.score_timeout_s)
        self._judge_time = JudgeTime(self._ledger.reputation)
        self._unfit = UnfitTasks()
        self.seen = RecentlySeen(max_keys=MAX_SEEN, ttl_s=self._settings.max_age_s + MAX_CLOCK_SKEW_S)
        self.needs: Mapping[str, float] = {}
        """Our need of each task, by its name (see selection.choose_header)."""
        self.answered = BoundedDict[ExampleKey, None](MAX_ANSWERED)
        """Examples that we have answered or are about to answer, the last MAX_ANSWERED of them."""
        self._target = min(self._settings.prefetch_groups, buffer.capacity)
        self._vain_bytes = TokenBucket(VAIN_BYTES_PER_S, VAIN_BYTES_BURST)
        """Bytes that newcomers may still give us in vain."""
        self._vain_dials = TokenBucket(VAIN_DIALS_PER_S, VAIN_DIALS_BURST)
        """Vain requests that we may still make of newcomers without a connection to us."""
        self.fetching: dict[Fetch, None] = {}
        """Groups that are being fetched or judged, the first begun first."""
        self._gave_at: dict[str, float] = {}
        """Time at which each author last gave us a group, if that was lately."""
        self._swept_at = 0.0
        self._progress = asyncio.Event()

    def wake(self) -> None:
        """Has the pool looked at again: it or the demand has changed."""
        self._pool.changed.set()

    def note_answered(self, examples: Iterable[ExampleKey]) -> None:
        """Notes examples that we have answered or are about to answer."""
        for key in examples:
            self.answered[key] = None

    def set_demand(self, groups: int) -> None:
        """Keeps this many groups in the buffer from now on, and a few ahead; none at all for 0."""
        ahead = groups + self._settings.prefetch_groups if groups else 0
        self._target = min(ahead, self._buffer.capacity)
        self.wake()

    async def wait_for(self, groups: int) -> None:
        """Returns once this many groups can be drawn, or as many as the shares of known authors allow, or
        once nothing more is on its way.

        Without the last condition, equally fast nodes would wait for each other's next round.
        """
        self._drop_stale_groups()
        while self.drawable(groups) < self._within_reach(groups):
            self._progress.clear()
            patience_s = None if self.fetching or self._candidates() else self._settings.patience_s
            try:
                async with asyncio.timeout(patience_s):
                    await self._progress.wait()
            except TimeoutError:
                return

    def drawable(self, groups: int) -> int:
        """Returns the number of groups that a draw of `groups` would give now."""
        return drawable(self._buffer.by_author, self._context.trust_of, groups, len(self._sharers()))

    def draw(self, groups: int) -> list[RolloutGroup]:
        """Takes up to this many groups out of the buffer, each author within its share."""
        self._drop_stale_groups()
        drawn = self._buffer.draw(
            groups, self._context.rng, trust_of=self._context.trust_of, known=len(self._sharers())
        )
        self._ledger.drawn += len(drawn)
        self.wake()
        return drawn

    def _within_reach(self, groups: int) -> int:
        known = self._sharers()
        if not known:
            return groups
        return drawable(dict.fromkeys(known, groups), self._context.trust_of, groups, len(known))

    def _sharers(self) -> set[str]:
        """Returns the authors with accepted groups that have headers or groups waiting, or gave us a group
        lately."""
        now, givers = self._context.clock(), self._ledger.reputation.givers
        self._gave_at = {author: at for author, at in self._gave_at.items() if now - at <= RECENT_S}
        heard = (author for author in self._pool.waiting if author in givers)
        return {*self._gave_at, *self._buffer.by_author, *heard}

    async def run(self) -> None:
        """Fetches until cancelled."""
        async with asyncio.TaskGroup() as fetches:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._pool.changed.wait()
                self._pool.changed.clear()
                self._drop_stale()
                if self._context.host.status().state == "up":
                    self._start_fetches(fetches)
                self._progress.set()

    def _start_fetches(self, fetches: asyncio.TaskGroup) -> None:
        slots = self._settings.fetch_concurrency
        while self._has_room():
            chosen = choose(self._candidates(), self._count_running(), slots, self._context.rng)
            if chosen is None:
                return
            headers = self._playable_headers(chosen.author)
            # Other answers to an example that we answered say the most about our own.
            headers = [one for one in headers if one.header.key in self.answered] or headers
            tasks = [waiting.header.task for waiting in headers]
            announcement = headers[choose_header(tasks, self.needs, self._context.rng)]
            self._pool.remove(announcement)
            known = self._context.is_known(chosen.author)
            self._unfit.note_try(announcement.header.task, self._context.clock(), known=known)
            if announcement.given is not None:
                self._accept_from_neighbour(announcement, announcement.given)
                continue
            fetch = Fetch(announcement, chosen.trust, monotonic())
            self.fetching[fetch] = None
            fetches.create_task(self._acquire(fetch), name=f"fetch from {announcement.author}")

    def _accept_from_neighbour(self, announcement: Announcement, given: Given) -> None:
        try:
            self._put_in_buffer(announcement, given.body, CheckedBody(given.group, given.fingerprint))
        except Rejected as rejected:
            self._ledger.count_unused(Reason(rejected.reason))

    def _count_running(self) -> "Counter[Trust]":
        """Counts the fetches under way by trust. A fetch from a proven author that takes long counts as one
        from a slow author, so that others need not wait until it is given up."""
        now = monotonic()
        return Counter(
            "slow" if fetch.trust == "proven" and now - fetch.began > SLOW_S else fetch.trust
            for fetch in self.fetching
        )

    def _has_room(self) -> bool:
        """Returns True if one more group may be fetched. Fetches from newcomers and slow authors may never
        succeed, so they do not count towards the target."""
        if self._judge.stuck >= MAX_STUCK_JUDGEMENTS or not self._bodies.may_fetch:
            return False
        running = self._count_running()
        if running.total() >= 2 * self._settings.fetch_concurrency:
            return False
        return self.drawable(self._target) + running["proven"] < self._target

    def _candidates(self) -> list[Candidate]:
        """Returns the authors with headers waiting that may be asked now."""
        slots, running = self._settings.fetch_concurrency, self._count_running()
        full = {trust for trust, count in running.items() if count >= slots_of(trust, slots)}
        full |= {trust for trust in ("slow", "newcomer", "proven") if not self._may_judge(trust)}
        if not self._hears_newcomers():
            full.add("newcomer")
        share = author_share(self._target, len(self._sharers()))
        reputation = self._ledger.reputation
        waiting = list(self._pool.waiting)
        # A crowd of newcomers is not examined one by one, hundreds of times a second.
        if "newcomer" in full:
            waiting = [
                one for one in waiting if one in reputation.givers or one in self._context.neighbourhood
            ]
        elif not self._vain_dials.has(now=self._context.clock()):
            waiting = [
                one
                for one in waiting
                if one in reputation.givers
                or self._bodies.routes.has_route(one)
                or one in self._context.neighbourhood
            ]
        return [
            Candidate(
                author,
                trust,
                standing.failures,
                standing.accepted,
                self._bodies.routes.has_route(author),
                standing.judge_s,
            )
            for author in waiting
            if (trust := self._context.trust_of(author)) not in full
            and self._may_ask(author, trust, share)
            and self._playable_headers(author)
            and (standing := reputation.standing_of(author))
        ]

    def _playable_headers(self, author: str) -> Sequence[Announcement]:
        """Returns an author's headers without those of tasks that are given up."""
        headers = self._pool.waiting[author]
        trust = self._context.trust_of(author)
        if trust == "neighbour":
            return headers
        unfit = self._unfit.tasks(self._context.clock(), known=trust != "newcomer")
        return [one for one in headers if one.header.task not in unfit] if unfit else headers

    def _may_judge(self, trust: Trust) -> bool:
        return self._judge_time.is_left(trust, monotonic())

    def _hears_newcomers(self) -> bool:
        """Returns True if there is room for a newcomer's group, and newcomers have not given us too much in
        vain."""
        waiting = self._buffer.by_author
        trusts = {author: self._context.trust_of(author) for author in waiting}
        held = sum(waiting[author] for author, trust in trusts.items() if trust == "newcomer")
        proven = any(trust != "newcomer" for trust in trusts.values())
        room = newcomer_share(self._target, anybody_proven=proven)
        return held < room and self._vain_bytes.has(now=self._context.clock())

    def _may_ask(self, author: str, trust: Trust, share: int) -> bool:
        under_way = sum(fetch.announcement.author == author for fetch in self.fetching)
        at_once = FETCHES_OF_PROVEN if trust == "proven" else 1
        if under_way >= at_once or not self._buffer.has_room_for(author, coming=under_way):
            return False
        if trust == "neighbour":
            return True
        now = self._context.clock()
        reputation = self._ledger.reputation
        return (
            self._buffer.by_author[author] + under_way < share
            and reputation.may_be_asked(author, now)
            and reputation.has_judge_time(author, monotonic())
            and not self._judge.is_stuck_on(author)
            and not reputation.is_banned(author, now)
        )

    async def judge_together(
        self, groups: Sequence[tuple[Announcement, bytes]], *, payer: str | None
    ) -> tuple[list[CheckedBody | Rejected], float]:
        """Judges the first of these headers and bodies, as many as fit into LOOK_S: each is drawn again, read
        and scored here. Returns their results, and the seconds spent, which come out of the judge's time for
        `payer`; None: the groups are our own. If the judge gives no result at all, all are rejected."""
        took_s = 0.0

        def charge(seconds: float) -> None:
            nonlocal took_s
            took_s = seconds
            if payer is not None:
                self._judge_time.charge(payer, self._context.trust_of(payer), seconds, monotonic())

        found: list[CheckedBody | Rejected]
        try:
            found = await self._judge.run(lambda: _check(groups, self._rules), charge, author=payer or "")
        except Rejected as rejected:
            found = [rejected] * len(groups)
        for (announcement, _), checked in zip(groups, found, strict=False):
            if isinstance(checked, CheckedBody):
                self._unfit.note_fit(announcement.header.task, self._context.clock())
        return found, took_s

    def may_be_judged(self, payer: str) -> bool:
        """Returns True if our judge has time left for this peer."""
        return (
            self._may_judge(self._context.trust_of(payer))
            and self._ledger.reputation.has_judge_time(payer, monotonic())
            and self._judge.stuck < MAX_STUCK_JUDGEMENTS
            and not self._judge.is_stuck_on(payer)
        )

    async def _acquire(self, fetch: Fetch) -> None:
        """Takes one group from its header to the buffer. The peer boundary: nothing that happens here affects
        others."""
        announcement, reputation = fetch.announcement, self._ledger.reputation
        author = announcement.author
        began, body = monotonic(), b""
        try:
            body = await self._bodies.fetch(announcement, timeout_s=self._patience_s(author))
            fetched_s = monotonic() - began
            (checked,), judged_s = await self.judge_together([(announcement, body)], payer=author)
            if isinstance(checked, Rejected):
                raise checked
            self._accept(announcement, body, checked)
            reputation.note_delivery(author, fetched_s + judged_s)
        except Rejected as rejected:
            if rejected.reason == str(Reason.PLAY_TIMEOUT):
                self._note_overrun(announcement)
            self._note_failure(author, rejected.reason, len(body))
            self._ledger.drop(rejected.reason, author, rejected.detail)
        except HostDown:
            # Nobody is at fault and nothing is lost: the header waits for the host to come back.
            await asyncio.sleep(TICK_S)
            self._pool.add(announcement)
        except Exception:
            logger.exception("failed to handle a group from %s", author)
            self._note_failure(author, Reason.INTERNAL, len(body))
            self._ledger.drop(Reason.INTERNAL, author)
        finally:
            del self.fetching[fetch]
            self._progress.set()
            self.wake()

    def _note_overrun(self, announcement: Announcement) -> None:
        task, author = announcement.header.task, announcement.author
        known = self._context.is_known(author)
        if self._unfit.note_overrun(task, author, self._context.clock(), known=known):
            logger.warning(
                "episodes of %s take longer here than the limit for strangers (%g s a group); fetching few"
                " groups of it from %s for %g s",
                task,
                PLAY_S,
                "anybody" if known else "newcomers",
                UNFIT_S,
            )

    def _patience_s(self, author: str) -> float:
        """Returns the seconds that a fetch from this author may take."""
        if self._context.is_known(author):
            return self._settings.fetch_timeout_s
        tried = min(self._ledger.reputation.standing_of(author).failures, 16)
        return min(self._settings.fetch_timeout_s, NEWCOMER_PATIENCE_S * 2.0**tried)

    def _note_failure(self, author: str, reason: str, size_bytes: int) -> None:
        """Handles a fetch that gave us nothing: pauses before the next, and counts its cost."""
        if reason in (Reason.JUDGE_STUCK, Reason.JUDGE_BUSY):
            return
        known = self._context.is_known(author)
        if reason == Reason.COPIED and known:  # A copier may have been heard before the author.
            return
        if not known:
            self._vain_bytes.owe(size_bytes)
            self._vain_dials.owe(not self._bodies.routes.has_route(author))
        # Our judge may have had no time for the answers whose rewards differ.
        mishap = reason in (Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.ZERO_ADVANTAGE)
        self._ledger.reputation.note_failure(author, self._context.clock(), mishap=mishap)

    def _accept(self, announcement: Announcement, body: bytes, checked: CheckedBody) -> None:
        author = announcement.author
        if checked.false_claim:
            self._ledger.drop(Reason.FALSE_CLAIM, author, checked.false_claim)
        # A header that claims no spread was let in for its right answers: we had asked for help.
        if announcement.header.reward_std or not checked.group.reward_mean:
            require_advantage(checked.group)
        self._put_in_buffer(announcement, body, checked)

    def _put_in_buffer(self, announcement: Announcement, body: bytes, checked: CheckedBody) -> None:
        now = self._context.clock()
        if not self.seen.add(checked.fingerprint, now):
            raise Rejected(Reason.COPIED, "the same answers came earlier")
        self._bodies.foreign.put(announcement.header.body_hash, body)
        displaced = self._buffer.add(Accepted(announcement, checked.group))
        if displaced is not None:
            self._ledger.count_unused(displaced)
        self._ledger.accept(announcement.author)
        self._inbox.remember(announcement)
        if self._shelf is not None:
            group = SignedGroup(announcement.author, announcement.header, announcement.sealed, body)
            self._shelf.offer(group)
        self._gave_at[announcement.author] = now

    def _drop_stale(self) -> None:
        """Drops stale headers and groups once a tick, because it examines the whole pool and the whole
        buffer."""
        now = self._context.arrive()
        if 0 <= now.at - self._swept_at < TICK_S:
            return
        self._swept_at = now.at
        stale = self._pool.keep_only(lambda waiting: is_fresh(waiting.arrival, now, self._settings))
        self._ledger.count_unused(Reason.STALE, stale)
        self._drop_stale_groups()

    def _drop_stale_groups(self) -> None:
        self._ledger.count_unused(Reason.STALE, self._buffer.drop_stale(self._context.arrive()))


def _check(groups: Sequence[tuple[Announcement, bytes]], rules: BodyRules) -> list[CheckedBody | Rejected]:
    """Returns the results for the first groups, as many as fit into LOOK_S. Blocks while the tasks work."""
    found: list[CheckedBody | Rejected] = []
    began = rules.clock()
    for announcement, body in groups:
        if found and rules.clock() - began > LOOK_S:
            break
        try:
            found.append(check_body(body, announcement, rules))
        except Rejected as rejected:
            found.append(rejected)
    return found
