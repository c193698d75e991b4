"""Detects members that are gone: pings them, checks reported losses, and notices silence.

membership.py, known_members.py -> [LivenessMonitor] -> Ping, Suspect -> KnownMembers.lost -> the next plan

A report of a loss is a reason to look, never a proof: a member that answers stays, and what another one says
about it is checked by asking it. Looking takes no turn behind pings that wait for the frozen.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import Ask, Ping, Request, Status, Suspect
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused
from swarmnode.extensions.pipeline.wire.waiting import ChangeSignal, loop_s

logger = logging.getLogger(__name__)

MAX_ASKED_AT_ONCE = 16
LOOKS_PER_PING = 4


class LivenessMonitor:
    """Keeps the liveness of `members` up to date while it runs."""

    def __init__(
        self,
        members: KnownMembers,
        ask: Ask,
        status: Callable[[], Status],
        turn: Callable[[], str],
        news: ChangeSignal,
    ) -> None:
        """`turn`: returns the peer id of the convener, which is told of losses first."""
        self._members = members
        self._ask = ask
        self._status = status
        self._turn = turn
        self._news = news
        self._suspects: dict[str, str] = {}
        self._reported = asyncio.Event()

    def suspect(self, peer_id: str, why: str) -> None:
        """Check at once if this member lives. Reports about strangers are ignored."""
        if peer_id in self._members.living():
            self._suspects[peer_id] = why
            self._reported.set()

    async def look(self, peers: Iterable[str]) -> None:
        """Exchange status with these members, all at once and with a short deadline."""
        within_s = self._members.settings.confirm_s
        await of_each(peers, lambda peer: self.tell(peer, Ping(self._status()), within_s))

    async def ping_forever(self) -> None:
        """Ping the members until cancelled."""
        settings = self._members.settings
        asking = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        while True:
            await of_each(self._members.due(loop_s()), lambda peer: self._ping(peer, asking))
            for peer in self._members.silent(loop_s()):
                self._gone(peer, f"silent for {settings.silence_s:.0f} s")
            await self._news.pause(settings.ping_s / LOOKS_PER_PING)

    async def confirm_forever(self) -> None:
        """Check suspected members until cancelled."""
        while True:
            await self._reported.wait()
            self._reported.clear()
            suspects, self._suspects = self._suspects, {}
            await of_each(suspects.items(), lambda suspect: self._confirm(*suspect))

    async def _ping(self, peer: str, asking: asyncio.Semaphore) -> None:
        async with asking:
            try:
                await self._ask(peer, Ping(self._status()), self._members.settings.answer_s)
            except PeerUnreachable as error:
                # Nobody listens there: no need to wait as long as for somebody who is slow.
                if self._members.unreachable(peer, loop_s()):
                    self.suspect(peer, str(error))
            except (NetworkError, MemberRefused) as error:
                logger.debug("no answer to a ping: %s", error)

    async def _confirm(self, peer: str, why: str) -> None:
        settings = self._members.settings
        try:
            await self._ask(peer, Ping(self._status()), settings.confirm_s)
        except MemberRefused as error:
            logger.debug("%s lives, though reported lost (%s): %s", peer, why, error)
        except NetworkError as error:
            if self._gone(peer, f"{why}; {error}") and self._turn() != self._members.own:
                await self.tell(self._turn(), Suspect(peer), settings.answer_s)

    async def tell(self, peer: str, request: Request, within_s: float) -> None:
        """Send a member a request, whether or not it answers."""
        try:
            await self._ask(peer, request, within_s)
        except (NetworkError, MemberRefused) as error:
            logger.debug("%s does not answer: %s", peer, error)

    def _gone(self, peer: str, why: str) -> bool:
        gone = self._members.lost(peer, why, loop_s())
        if gone:
            self._news.tell()
        return gone
