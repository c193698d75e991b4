"""The exchange as one object: publish own groups, collect those of others.

own groups -> [Exchange.publish] -> Publisher -> the swarm -> HeaderGossip -> Inbox -> HeaderPool
                                        `-> BodyStore                                    |
trainer <- [Exchange.collect] <- ReplayBuffer <- Fetcher <- BodyTransfer <---------------+

Three actors share one ExchangeContext: the publisher announces our groups, the inbox hears what others
announce, and the fetcher fetches and judges the groups that the trainer can use. Beside them, a gate keeps
banned peers out, a recorder saves what must survive a restart, and the library lends and borrows right
answers.

Each part is given the parts that it calls, and knows no others:

Borrower -> Fetcher -> Inbox, BodyTransfer, ReplayBuffer;   Inbox, Publisher -> Helping
all of them -> ExchangeContext -> Ledger -> Reputation

Only events come back: a ban (Ledger.on_ban), a message (HeaderGossip), a neighbour's group (Neighbourhood).

Headers from everybody are heard and pooled. Bodies are fetched only as far as the trainer can use them (J a
round and a small reserve), so the cost of taking part grows with J and not with the swarm. A peer can cost us
one fetch deadline and one judgement at a time, and nothing it sends reaches the caller as an exception.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from swarmnode.errors import ConfigError, IdentityError, NetworkError
from swarmnode.exchange.bodies.body_transfer import BodyTransfer
from swarmnode.exchange.bodies.fetcher import Fetcher
from swarmnode.exchange.bodies.replay_buffer import ReplayBuffer
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.exchange_stats import ExchangeStats, ReceiptStats
from swarmnode.exchange.gossip.announcing import ModelLabel
from swarmnode.exchange.gossip.header_gossip import HeaderGossip, receipts_topic_of, topic_of
from swarmnode.exchange.gossip.helping import Helping, help_topic_of
from swarmnode.exchange.gossip.inbox import Inbox
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.gossip.publisher import Publisher
from swarmnode.exchange.gossip.thanks import NOTHING_SAVED, find_receipts
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.limits import MAX_NAME_CHARS
from swarmnode.exchange.peers.connection_gate import ConnectionGate
from swarmnode.exchange.peers.exchange_record import (
    Record,
    Recorder,
    load,
    restore_standings,
    saved_standings,
)
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.exchange.validation.body_check import BodyRules, Encode, PromptIds
from swarmnode.exchange.validation.episode_reader import EncodeTurns
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.host import Host, Message
from swarmnode.tasks.task import Task
from swarmnode.types import ExampleKey, RolloutGroup

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before subscribing and serving are retried on a host that was down when we started."""


class Exchange:
    """One node's part in the swarm's exchange of rollouts.

    async with Exchange(host, key, tasks, encode=..., prompt_ids=..., settings=..., ...) as exchange:
        await exchange.publish(own_groups)
        external = await exchange.collect(4, policy_version, deadline_s=5.0)
    """

    def __init__(
        self,
        host: Host,
        key: NodeKey,
        tasks: Mapping[str, Task],
        *,
        encode: Encode,
        prompt_ids: PromptIds,
        settings: ExchangeSettings,
        model_family: str,
        model_size: int | None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        neighbourhood: Neighbourhood | None = None,
        record: Path | None = None,
        encode_turns: EncodeTurns | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """`encode` and `prompt_ids` return the local policy's tokens of an answer and of a prompt,
        `encode_turns` those of an episode (None: other nodes' episodes are not used). `model_size`: the
        policy's number of parameters. `neighbourhood`: the exchanges of the other policies in this process,
        with the same base model and settings; None: there are none. `record`: the file that keeps what was
        seen and who is banned across restarts; None: both are forgotten. `shelf`: keeps the groups whose
        answers are in our book; None: there is no library."""
        _check_names(tasks)
        swarm, rng = settings.swarm, rng or random.Random()
        self._gate = ConnectionGate(host)
        self._recorder = None if record is None else Recorder(record)
        self._ledger = ledger = Ledger(Reputation(), clock, on_ban=self._shut_out)
        self._neighbourhood = neighbourhood or Neighbourhood()
        self._context = context = ExchangeContext(
            host, key, tasks, settings, ledger, clock, rng, self._neighbourhood
        )
        self._bodies = bodies = BodyTransfer(host, settings, ledger, clock=clock, rng=rng, shelf=shelf)
        self.receipts = find_receipts(context)
        """Receipts to authors that we learnt from, and from nodes that learnt from us. None: no extension
        sends or counts them."""
        self._helping = Helping(context)
        model = ModelLabel(model_family[:MAX_NAME_CHARS], model_size)
        self._publisher = Publisher(context, bodies.own, self._helping, shelf, model, self.receipts, encode)
        self._inbox = Inbox(context, self._helping)
        hearers = {topic_of(swarm): self._hear, help_topic_of(swarm): self._publisher.hear_request}
        if self.receipts is not None:
            hearers[receipts_topic_of(swarm)] = self.receipts.hear
        self._gossip = HeaderGossip(host, hearers)
        self._buffer = ReplayBuffer(settings)
        rules = BodyRules(
            tasks,
            encode,
            prompt_ids,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_tokens=settings.max_tokens,
            encode_turns=encode_turns,
        )
        self._fetcher = Fetcher(context, bodies, self._inbox, self._buffer, rules, shelf)
        self.library = None if shelf is None else Borrower(context, shelf, bodies, self._fetcher)
        """Right answers kept for later. None: this node takes no part in the library."""
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        host, key = self._context.host, self._context.key
        if host.peer_id != key.peer_id:
            raise IdentityError(
                f"the host runs as {host.peer_id}, but the key is {key.peer_id}",
                hint="headers are accepted only from their author: the host of network.transport must use the"
                " key file that it was given",
            )
        await self._remember()
        if self.library is not None:
            await asyncio.to_thread(self.library.shelf.load)
        self._is_reached = await self._reach_host()
        await self._group.__aenter__()
        self._running = self._group.create_task(self._run(), name="exchange")
        self._neighbourhood.enter(key.peer_id, self._inbox.take_from_neighbour)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._neighbourhood.leave(self._context.key.peer_id)
        self._running.cancel()
        if isinstance(exc, asyncio.CancelledError):
            await self._group.__aexit__(exc_type, exc, tb)
        else:
            # A TaskGroup wraps the exception of its block in a group; the caller should see its own
            # exception.
            await self._group.__aexit__(None, None, None)
            if self._recorder is not None:
                await self._recorder.write(self._record())
            if self.library is not None:
                await self.library.shelf.write(last=True)

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """Announces our groups and keeps their bodies for peers that ask. Groups that cannot be announced are
        counted.

        The other policies of this process receive them directly; if no other peer could hear us, only they
        do.
        """
        self._fetcher.note_answered(group.example.key for group in groups)
        await self._publisher.publish(groups)

    async def collect(self, j: int, policy_version: int, deadline_s: float) -> list[RolloutGroup]:
        """Returns up to `j` accepted groups of others, drawn uniformly within the shares of their authors.

        Waits at most `deadline_s`, and only for groups that are announced or on their way, not for groups
        that may be announced later. Faults of peers and of the network raise nothing here.
        """
        self._context.policy_version = policy_version
        self._fetcher.set_demand(j)
        if self._fetcher.drawable(j) < j and await self._context.is_anybody_there():
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._fetcher.wait_for(j)
        return self._fetcher.draw(j)

    async def ask_for_help(self, groups: Sequence[RolloutGroup]) -> set[str]:
        """Asks the swarm for help with tasks, naming for each an example that no answer in these groups got
        right.

        Returns the tasks that it asked about; none if nobody would hear it."""
        return await self._publisher.ask_for_help(groups)

    def take_examples(self, count: int) -> list[ExampleKey]:
        """Returns at most `count` examples that others asked for help with and that we should try, too. None
        is returned twice, and none that we have answered."""
        wanted = self._helping.take_examples(count, self._fetcher.answered)
        self._fetcher.note_answered(wanted)
        return wanted

    def prefer(self, needs: Mapping[str, float]) -> None:
        """Makes the fetcher prefer, within each author's headers, the tasks that we need. `needs`: our own
        measure by task name, from 0 to 1; unknown tasks count 1."""
        self._fetcher.needs = needs

    def doubt(self, authors: Collection[str]) -> None:
        """Treats these authors, from now on, as newcomers, because what they teach does not go our way. It is
        not an offence, and authors from an earlier call are no longer doubted."""
        self._ledger.reputation.doubted = frozenset(authors)

    def resume(self, policy_version: int) -> None:
        """Sets our policy's version at a start, so that groups heard before the first round are dated by
        it."""
        self._context.policy_version = policy_version

    def stats(self) -> ExchangeStats:
        reputation = self._ledger.reputation
        return ExchangeStats(
            **self._ledger.counts(),
            headers_waiting=len(self._inbox.pool),
            fetching=len(self._fetcher.fetching),
            buffered=len(self._buffer),
            banned_peers=reputation.banned_peers(self._context.clock()),
            peers=reputation.figures(self._context.clock()),
            pulled=self._bodies.holder.pulled,
            upload_bytes_per_s=self._context.settings.upload_bytes_per_s,
            help=self._helping.stats(),
            receipts=ReceiptStats() if self.receipts is None else self.receipts.stats(),
            health=self._context.health.figures(reputation.givers, self._reaches),
        )

    async def _run(self) -> None:
        while not self._is_reached and not await self._reach_host():  # noqa: ASYNC110  a Host has no event
            await asyncio.sleep(RETRY_S)
        reputation, now = self._ledger.reputation, self._context.clock()
        for peer in reputation.banned_peers(now):
            self._gate.bar(peer, reputation.banned_for_s(peer, now))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._gossip.run(), name="listen")
            tasks.create_task(self._publisher.run(), name="answer requests")
            tasks.create_task(self._fetcher.run(), name="fetch rollouts")
            tasks.create_task(self._bodies.run(), name="fetch rollouts for others")
            tasks.create_task(self._gate.run(), name="keep banned peers out")
            if self.receipts is not None:
                tasks.create_task(self.receipts.run(), name="thank others")
            if self._recorder is not None:
                tasks.create_task(self._recorder.run(self._record), name="remember peers")
            if self.library is not None:
                tasks.create_task(self.library.shelf.run(), name="keep the library")
                tasks.create_task(self.library.run(), name="borrow from libraries")

    async def _reach_host(self) -> bool:
        """Serves and subscribes. Returns False if the host is down; afterwards both survive its restarts."""
        try:
            await self._bodies.serve()
            if self.library is not None:
                await self.library.pages.serve()
            await self._gossip.subscribe()
        except NetworkError as error:
            logger.info("not sharing rollouts yet: %s", error)
            return False
        return True

    def _hear(self, message: Message) -> None:
        self._bodies.holder.note_announcement(message)
        self._inbox.hear(message)

    async def _remember(self) -> None:
        """Restores the record of an earlier run, and from then on refuses headers that it may have heard."""
        if self._recorder is None:
            return
        record = await asyncio.to_thread(load, self._recorder.path)
        if record is None:
            return
        self._inbox.born_at = self._context.clock()
        self._inbox.seen[True].restore(record.headers_of_proven)
        self._inbox.seen[False].restore(record.headers_of_others)
        self._fetcher.seen.restore(record.groups)
        restore_standings(self._ledger.reputation, record.standings)
        if self.receipts is not None:
            self.receipts.restore(record.receipts)

    def _record(self) -> Record:
        return Record(
            headers_of_proven=tuple(self._inbox.seen[True].items()),
            headers_of_others=tuple(self._inbox.seen[False].items()),
            groups=tuple(self._fetcher.seen.items()),
            standings=saved_standings(self._ledger.reputation),
            receipts=NOTHING_SAVED if self.receipts is None else self.receipts.saved(),
        )

    def _shut_out(self, peer: str, banned_for_s: float) -> None:
        """Disconnects a banned peer, and has the ban saved."""
        self._gate.bar(peer, banned_for_s)
        if self._recorder is not None:
            self._recorder.hurry()

    def _reaches(self, author: str) -> bool | None:
        return self._bodies.routes.reaches(author, self._context.clock())


def _check_names(tasks: Mapping[str, Task]) -> None:
    for name, task in tasks.items():
        if name != task.name:
            raise ConfigError(f"task {task.name} is listed as {name}")
        if not (0 < len(name) <= MAX_NAME_CHARS and 0 < len(task.version) <= MAX_NAME_CHARS):
            raise ConfigError(
                f"task {name} {task.version} cannot be exchanged: its name or version is empty or too long",
                hint=f"use 1 to {MAX_NAME_CHARS} characters for each",
            )
