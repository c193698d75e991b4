"""Keeps the buffer filled: selects headers, fetches their bodies, has them judged, accepts the groups.

pool -> choose -> [Fetcher]: BodyPlane.fetch -> Judge -> buffer -> Exchange.collect

It fetches as many groups as somebody waits for and no more, and at most one at a time from each author: a
silent peer delays itself. What comes from a policy of this process is chosen likewise, and is there already.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress

from swarmnode.errors import HostDown, Rejected
from swarmnode.exchange.bodies import BodyPlane
from swarmnode.exchange.buffer import Accepted, ReplayBuffer
from swarmnode.exchange.judge import Judge
from swarmnode.exchange.ledger import Ledger
from swarmnode.exchange.limits import MAX_CLOCK_SKEW_S, MAX_SEEN
from swarmnode.exchange.messages import Announcement, Arrival, Given
from swarmnode.exchange.pool import HeaderPool
from swarmnode.exchange.reasons import Reason
from swarmnode.exchange.seen import RecentlySeen
from swarmnode.exchange.selection import choose, is_fresh
from swarmnode.exchange.settings import ExchangeSettings
from swarmnode.exchange.validation import (
    BodyRules,
    CheckedBody,
    check_body,
    is_false_claim,
    require_advantage,
)
from swarmnode.network.host import Host

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often we look for stale headers and for peers whose pause is over, when nothing else happens."""


class Fetcher:
    """From waiting headers to accepted groups."""

    def __init__(
        self,
        host: Host,
        bodies: BodyPlane,
        pool: HeaderPool,
        buffer: ReplayBuffer,
        ledger: Ledger,
        *,
        settings: ExchangeSettings,
        rules: BodyRules,
        arrive: Callable[[], Arrival],
        rng: random.Random,
    ) -> None:
        """`arrive` tells our clock and policy version."""
        self._host = host
        self._bodies = bodies
        self._pool = pool
        self._buffer = buffer
        self._ledger = ledger
        self._settings = settings
        self._rules = rules
        self._arrive = arrive
        self._rng = rng
        self._judge = Judge(settings.score_timeout_s)
        self._seen = RecentlySeen(max_keys=MAX_SEEN, ttl_s=settings.max_age_s + MAX_CLOCK_SKEW_S)
        self._target = min(settings.prefetch_groups, buffer.capacity)
        self._fetching: set[str] = set()
        self._swept_at = 0.0
        self._woken = asyncio.Event()
        self._progress = asyncio.Event()

    @property
    def judgements_stuck(self) -> int:
        return self._judge.stuck

    def wake(self) -> None:
        """Look at the pool again: it or the demand has changed."""
        self._woken.set()

    def want(self, groups: int) -> None:
        """Keep this many groups in the buffer from now on, and a few ahead; none at all for 0."""
        ahead = groups + self._settings.prefetch_groups if groups else 0
        self._target = min(ahead, self._buffer.capacity)
        self.wake()

    async def wait_for(self, groups: int) -> None:
        """Return once the buffer holds this many fresh groups, or nothing more is on its way.

        Without the second half, nodes that are equally fast would wait for each other's next round.
        """
        while self.fresh_groups() < groups:
            self._progress.clear()
            patience_s = None if self._something_is_coming() else self._settings.patience_s
            try:
                async with asyncio.timeout(patience_s):
                    await self._progress.wait()
            except TimeoutError:
                return

    def fresh_groups(self) -> int:
        """Groups that could be drawn now; those too old are let go."""
        now = self._arrive()
        self._ledger.let_go(Reason.STALE, self._buffer.drop_stale(now.at, now.policy_version))
        return len(self._buffer)

    def _something_is_coming(self) -> bool:
        waiting = self._pool.waiting.items()
        return bool(self._fetching) or any(headers and self._may_ask(author) for author, headers in waiting)

    async def run(self) -> None:
        """Fetch until cancelled."""
        async with asyncio.TaskGroup() as fetches:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._woken.wait()
                self._woken.clear()
                self._drop_stale_headers()
                if self._host.status().state == "up":
                    self._start_fetches(fetches)
                self._progress.set()

    def _start_fetches(self, fetches: asyncio.TaskGroup) -> None:
        while self._has_room():
            announcement = choose(self._pool.waiting, self._may_ask, self._rng)
            if announcement is None:
                return
            self._pool.remove(announcement)
            if announcement.given is not None:
                self._take_over(announcement, announcement.given)
                continue
            self._fetching.add(announcement.author)
            fetches.create_task(self._acquire(announcement), name=f"fetch from {announcement.author}")

    def _take_over(self, announcement: Announcement, given: Given) -> None:
        try:
            self._keep(announcement, given.body, CheckedBody(given.group, given.fingerprint))
        except Rejected as rejected:
            self._ledger.let_go(Reason(rejected.reason))

    def _has_room(self) -> bool:
        running = len(self._fetching)
        return running < self._settings.fetch_concurrency and running + self.fresh_groups() < self._target

    def _may_ask(self, author: str) -> bool:
        now = self._arrive().at
        reputation = self._ledger.reputation
        return (
            author not in self._fetching
            and self._buffer.has_room_for(author)
            and reputation.may_be_asked(author, now)
            and not reputation.is_banned(author, now)
        )

    async def _acquire(self, announcement: Announcement) -> None:
        """The whole way of one group. The peer boundary: nothing that happens here reaches anything else."""
        author = announcement.author
        try:
            body = await self._bodies.fetch(announcement)
            checked = await self._judge.run(lambda: check_body(body, announcement, self._rules))
            self._accept(announcement, body, checked)
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, author, str(rejected))
        except HostDown:
            # Nobody's fault and nothing lost: the header waits for the host to come back.
            await asyncio.sleep(TICK_S)
            self._pool.add(announcement)
        except Exception:
            log.exception("a group of %s could not be handled", author)
            self._ledger.drop(Reason.INTERNAL, author)
        finally:
            self._fetching.discard(author)
            self._progress.set()
            self.wake()

    def _accept(self, announcement: Announcement, body: bytes, checked: CheckedBody) -> None:
        author = announcement.author
        if is_false_claim(announcement.header, checked.group):
            self._ledger.drop(Reason.FALSE_CLAIM, author, "its rewards are not ours")
        require_advantage(checked.group)
        self._keep(announcement, body, checked)

    def _keep(self, announcement: Announcement, body: bytes, checked: CheckedBody) -> None:
        if not self._seen.add(checked.fingerprint, self._arrive().at):
            raise Rejected(Reason.COPIED, "the same answers came before")
        self._bodies.foreign.put(announcement.header.body_hash, body)
        displaced = self._buffer.add(Accepted(announcement, body, checked.group))
        if displaced is not None:
            self._ledger.let_go(displaced)
        self._ledger.accept(announcement.author)

    def _drop_stale_headers(self) -> None:
        """Once a tick, because it looks at every header in the pool."""
        now = self._arrive()
        if now.at < self._swept_at + TICK_S:
            return
        self._swept_at = now.at
        stale = self._pool.keep_only(lambda waiting: self._is_fresh(waiting.arrival, now))
        self._ledger.let_go(Reason.STALE, stale)

    def _is_fresh(self, arrival: Arrival, now: Arrival) -> bool:
        return is_fresh(
            arrival,
            now.at,
            now.policy_version,
            max_age_s=self._settings.max_age_s,
            max_age_versions=self._settings.max_age_versions,
        )
