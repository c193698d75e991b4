"""A node's side to its swarm: what it gives to others, takes from them, and shows of both.

node.py -> [SwarmMember] -> Exchange (groups, help, receipts), its library (catching_up.py), Host, Discovery
        -> [Alone], where nothing is shared
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from swarmnode.exchange.bodies.selection import longest_wait_s
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.host import Host
from swarmnode.node.catching_up import CatchingUp, library_round, phase_change
from swarmnode.node.drought import Droughts
from swarmnode.node.learner import Learner
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.workers import Workers
from swarmnode.settings.config import Config
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.rules import groups_wanted
from swarmnode.training.rules.task_marks import needs_of
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

COLLECT_DEADLINE_S = 5.0
"""Longest wait for other nodes' groups in a round, however long our own work took (longest_wait_s). Our own
groups replace any that have not arrived by then."""


@dataclass(frozen=True, slots=True)
class NetworkParts:
    """The parts of a node that exchanges rollouts, besides its learner."""

    host: Host
    exchange: Exchange
    discovery: Discovery | None
    """None: the caller starts the host and keeps it attached."""


@dataclass
class Alone:
    """The swarm of a node that shares nothing; `SwarmMember` says what else each method is for."""

    config: Config
    learner: Learner
    workers: Workers
    catching_up: CatchingUp = field(default_factory=CatchingUp, kw_only=True)
    """How far the node has caught up with the swarm, through its library."""

    async def join(self, stack: AsyncExitStack, *, rate: float) -> None:
        """Train at this factor on the learning rate, which an earlier start had reached."""
        self.catching_up = CatchingUp(rate=min(1.0, rate))
        if mix := self.catching_up.mix(self.config):
            await self.workers.learn(self.learner.catch_up, mix)

    async def find_peers(self) -> None: ...

    async def trade(self, own: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        return ()

    async def settle_round(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], report: TrainReport
    ) -> None:
        """Let the learning rate come back."""
        await self._go_on(self.catching_up.after_usual_round())

    async def _go_on(self, now: CatchingUp) -> None:
        """Continue with this state: the mix of the rounds may change."""
        before, self.catching_up = self.catching_up, now
        if (mix := now.mix(self.config)) != before.mix(self.config):
            await self.workers.learn(self.learner.catch_up, mix)

    async def show(self) -> None: ...


@dataclass
class SwarmMember(Alone):
    """The swarm of a node that exchanges rollouts."""

    network: NetworkParts
    board: StatusBoard
    droughts: Droughts
    _origins: Mapping[Origin, int] = field(default_factory=dict[Origin, int])
    """Groups that the book holds answers of, and how many of each, as of the previous round."""
    _collected_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._exchange, self._library = self.network.exchange, self.network.exchange.library

    async def join(self, stack: AsyncExitStack, *, rate: float) -> None:
        """Start host and exchange until the stack is closed. Nothing is borrowed before the library knows
        what the book holds."""
        await super().join(stack, rate=rate)
        self._exchange.resume(self.learner.policy_version)
        if self.network.discovery is not None:
            await stack.enter_async_context(self.network.host)
        await stack.enter_async_context(self._exchange)
        if self._library is not None:
            await self._settle(self._library)

    async def find_peers(self) -> None:
        """Keep the node attached to its swarm."""
        if self.network.discovery is not None:
            await self.network.discovery.run()

    async def trade(self, own: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Publish a round's own groups, and return groups of others. Then ask for help where no answer was
        ever right, and let the next round try what others asked for."""
        await self._exchange.publish(own)
        external = list[RolloutGroup]()
        if wanted := groups_wanted(self.config):
            # Most were scored during generation; this waits for the rest.
            self.board.enter("collecting", "groups of others")
            deadline_s = longest_wait_s(time.monotonic() - self._collected_at, COLLECT_DEADLINE_S)
            external = await self._exchange.collect(wanted, self.learner.policy_version, deadline_s)
            self._collected_at = time.monotonic()
        if self._library is not None:
            external += self._library.draw(self.catching_up.groups_to_borrow(self.config))
        if not self.config.pipeline.name:
            await self._help(own, external)
        return external

    async def _help(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        share = self.config.exchange.help
        asks = share and groups_wanted(self.config)
        stuck = self.droughts.never_right() if asks else set[str]()
        asked = await self._exchange.ask_for_help([group for group in own if group.example.key.task in stuck])
        self.droughts.add_help(asked, external)
        if self._library is not None and any(not self.droughts.by_task[task].given for task in stuck):
            self._library.ask_again()
        count = max(1, round(share * self.config.rollout.groups))
        if share and (wanted := self._exchange.take_examples(count)):
            await self.workers.learn(self.learner.answer_too, wanted)

    async def settle_round(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], report: TrainReport
    ) -> None:
        """Adjust exchange and library to a round that was trained on, and thank the authors of groups that we
        learnt from: with a library, those whose answers entered the book, otherwise all of the round's."""
        taught = [(group.author, group.example.key, len(group.completions)) for group in external]
        if self._library is not None:
            before = self._origins.keys()
            await self._settle(self._library)
            taught = [(*origin, self._origins[origin]) for origin in self._origins.keys() - before]
            await self._catch_up(self._library, own, report)
        else:
            await self._go_on(self.catching_up.after_usual_round())
        if self._exchange.receipts is not None:
            self._exchange.receipts.note_learnt(taught)
        if report.pass_rates:
            self._exchange.prefer(needs_of(report.pass_rates))
            self._exchange.doubt(report.doubted)
        self.board.show_sharing(self._exchange.stats())

    async def _settle(self, library: Borrower) -> None:
        """Tell the library what the book holds."""
        self._origins = await self.workers.learn(self.learner.origins)
        library.note_book(self._origins.keys())

    async def _catch_up(self, library: Borrower, own: Sequence[RolloutGroup], report: TrainReport) -> None:
        """Decide whether the mix of the rounds changes from now on."""
        before = self.catching_up
        now = before.after_round(library_round(own, library.count_drawn(self._origins), report, self.config))
        if line := phase_change(before, now, len(library.lenders), len(library.of_author)):
            logger.info("%s", line)
        await self._go_on(now)
        self.board.show_library(library, now)

    async def show(self) -> None:
        """Bring what the board shows of the swarm up to date."""
        discovery = self.network.discovery
        await self.board.look_at(self.network.host, None if discovery is None else discovery.reach)
        self.board.show_sharing(self._exchange.stats())
