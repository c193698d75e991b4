"""The sending side of an exchange: announces our groups, repeats them for askers, and asks for help itself.

Exchange.publish -> [Publisher.publish] -> neighbours, library, BodyStore, Host.publish
Exchange.ask_for_help -> [Publisher.ask_for_help] -> topic of requests -> [hear_request] of others
                                                                       -> [run] announces again what helps
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from swarmnode.errors import NetworkError, Rejected
from swarmnode.exchange.bodies.body_store import BodyStore
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.gossip.announcing import ModelLabel, as_given, compose, require_readable, reseal
from swarmnode.exchange.gossip.header_gossip import topic_of
from swarmnode.exchange.gossip.helping import Helping, help_topic_of, never_right
from swarmnode.exchange.gossip.thanks import ReceiptKeeper
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import HEADERS_BURST, HEADERS_PER_S, PACE
from swarmnode.exchange.validation.body_check import Encode
from swarmnode.exchange.validation.header_check import require_exchanged
from swarmnode.network.host import Message
from swarmnode.tasks.task import may_be_exchanged
from swarmnode.token_bucket import TokenBucket
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)


class Publisher:
    """Announces our groups at a pace that others accept, and asks for help."""

    def __init__(
        self,
        context: ExchangeContext,
        bodies: BodyStore,
        helping: Helping,
        shelf: Shelf | None,
        model: ModelLabel,
        receipts: ReceiptKeeper | None,
        encode: Encode,
    ) -> None:
        """`bodies`: the store from which others fetch ours. `shelf`: that of the library; None: there is
        none. `receipts`: notes the groups that others may learn from. `encode`: returns the local policy's
        tokens of an answer."""
        self._encode = encode
        self._context, self._settings, self._ledger = context, context.settings, context.ledger
        self._bodies, self._helping = bodies, helping
        self._shelf, self._model, self._receipts = shelf, model, receipts
        self._topic, self._help_topic = topic_of(self._settings.swarm), help_topic_of(self._settings.swarm)
        self._pace = TokenBucket(PACE * HEADERS_PER_S, PACE * HEADERS_BURST)
        self._host_was_down = False
        self._asked_for_help = asyncio.Event()

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """Announces our groups, and hands them to the other policies of this process; if no other peer could
        hear us, only the latter. Groups that cannot be announced are counted."""
        outside = not groups or await self._is_heard_outside()
        for group in groups:
            try:
                composed = self._compose_and_hand(group)
                require_readable(group, self._encode, self._settings.max_tokens)
                self._shelve(composed)
                if outside:
                    await self._announce(composed)
                    self._helping.note_find(group, composed.header)
                self._ledger.published += 1
            except Rejected as rejected:
                self._ledger.unpublished[rejected.reason] += 1
                if rejected.reason == str(Reason.ZERO_ADVANTAGE):
                    self._keep_what_is_right(group, outside=outside)
            except NetworkError as error:
                self._ledger.unpublished[Reason.HOST_DOWN] += 1
                self._note_host(error)
            else:
                self._note_host(None)

    async def ask_for_help(self, groups: Sequence[RolloutGroup]) -> set[str]:
        """Asks the swarm for help with tasks, naming for each an example that no answer in these groups got
        right.

        Returns the tasks that it asked about; none if nobody would hear it."""
        asked = set[str]()
        if self._settings.private or not groups or not await self._context.is_anybody_there():
            return asked
        by_task: dict[str, list[RolloutGroup]] = {}
        for group in never_right(groups):
            by_task.setdefault(group.example.key.task, []).append(group)
        for task, stuck in by_task.items():
            answers = sum(len(group.completions) for group in stuck)
            example = self._context.rng.choice(stuck).example.key
            sealed = self._helping.ask(task, example.version, answers, example)
            if sealed is None:
                continue
            with suppress(NetworkError):  # Announcing groups reports that the network is down.
                await self._context.host.publish(self._help_topic, sealed)
                self._ledger.bytes_out += len(sealed)
                asked.add(task)
        return asked

    def hear_request(self, message: Message) -> None:
        """Takes in another node's request for help."""
        self._ledger.bytes_in += len(message.data)
        self._helping.hear(message)
        self._asked_for_help.set()

    async def run(self) -> None:
        """Signs and announces again the groups that askers could use, until cancelled."""
        while await self._asked_for_help.wait():
            self._asked_for_help.clear()
            for header in self._helping.take_replies():
                body = self._bodies.get(header.body_hash)
                if body is None:
                    continue
                with suppress(NetworkError, Rejected):
                    await self._announce(reseal(header, body, self._context.key, now=self._context.clock()))

    def _compose_and_hand(self, group: RolloutGroup) -> SignedGroup:
        """Returns a group ready to be announced, after handing it to the other policies of this process."""
        composed = self._compose(group)
        if self._context.has_neighbours():
            given = as_given(group, composed)
            own = self._context.key.peer_id
            self._context.neighbourhood.hand(own, composed.header, composed.sealed, given)
        return composed

    def _compose(self, group: RolloutGroup, *, for_library: bool = False) -> SignedGroup:
        composed = compose(
            group,
            self._context.key,
            swarm=self._settings.swarm,
            model=self._model,
            now=self._context.clock(),
            for_library=for_library,
        )
        if self._receipts is not None:
            self._receipts.note_given(composed.header.task, composed.header.group_size)
        return composed

    def _shelve(self, composed: SignedGroup) -> None:
        """Offers a group of ours to the library, if it may leave this node."""
        if self._shelf is not None and self._may_leave(composed.header.task):
            self._shelf.offer(composed)

    def _may_leave(self, task: str) -> bool:
        """Returns True if groups of this task may leave this node at all."""
        return not self._settings.private and may_be_exchanged(self._context.tasks[task])

    def _keep_what_is_right(self, group: RolloutGroup, *, outside: bool) -> None:
        """Keeps a group whose answers are all right. Without advantage it is not announced, but new nodes can
        still learn from it, through the library or when they ask for help."""
        if (group.reward_mean or 0.0) <= 0 or not self._may_leave(group.example.key.task):
            return
        with suppress(Rejected):
            composed = self._compose(group, for_library=True)
            self._shelve(composed)
            if outside:
                self._bodies.put(composed.header.body_hash, composed.body)
                self._helping.note_find(group, composed.header)

    async def _announce(self, composed: SignedGroup) -> None:
        require_exchanged(self._context.tasks[composed.header.task])
        if self._settings.private:
            raise Rejected(Reason.PRIVATE, "it stays at home")
        if not self._pace.take(now=self._context.clock()):
            raise Rejected(Reason.PACED, "others would not accept more from us in this time")
        self._bodies.put(composed.header.body_hash, composed.body)
        await self._context.host.publish(self._topic, composed.sealed)
        self._ledger.bytes_out += len(composed.sealed)

    async def _is_heard_outside(self) -> bool:
        if not self._context.has_neighbours():
            return True
        try:
            peers = await self._context.host.peers()
        except NetworkError:
            return True  # announcing will report the error
        return self._context.neighbourhood.is_heard_outside(self._context.key.peer_id, peers)

    def _note_host(self, error: NetworkError | None) -> None:
        """Logs once that the network went away, and once that it is back."""
        if error is not None and not self._host_was_down:
            logger.warning("not announcing rollouts until the network is back: %s", error)
        elif error is None and self._host_was_down:
            logger.info("the network is back: announcing rollouts again")
        self._host_was_down = error is not None
