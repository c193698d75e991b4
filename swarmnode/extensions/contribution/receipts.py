"""Receipts: whoever learnt from groups of an author says so, signed, now and then, and the author counts it.

node.py: groups learnt from -> [Receipts.learnt] -> [run] -> topic /swarmnode/4/<swarm>/receipts/0
that topic -> [Receipts.hear] -> thanks to us, kept by exchange_record.py -> status

A receipt names authors, and for each how much was learnt of it since the sender started. So one that is lost
is made up for by the next, and one that comes again says nothing new. All of a node's thanks travel in one
message, as gossip does: two homes that hear each other through a seed cannot dial each other.

Nothing is decided by receipts, and none costs its sender anything: identities are free, and so are thanks.
What they can cost us is bounded: the senders' pace, the nodes that are remembered, and what one of them can
thank for, which is no more than we gave.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode import __version__
from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError, Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_stats import ReceiptStats
from swarmnode.exchange.gossip.header_gossip import receipts_topic_of
from swarmnode.exchange.gossip.thanks import Taught
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.exchange.limits import MAX_CLOCK_SKEW_S, MAX_GROUP_SIZE, PROTOCOL
from swarmnode.exchange.messages import Count, Name
from swarmnode.identity.envelope import decoded, seal, unseal
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.network.host import Message
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

CONTEXT = f"swarmnode/{PROTOCOL}/receipt"

FIRST_EVERY_S = 10.0
"""Time between looks for somebody to thank until the first receipt of a start. Twice as long after each, up
to what is usual: a receipt that is lost is soon made up for."""

MAX_LEARNT_FROM = 16384
"""Groups that we know to have counted: one whose author had left the book and is back is not new."""

MAX_THANKS = 20
"""Authors and tasks of one receipt; what is left over is in the next one."""

MAX_RECEIPT_BYTES = 4096
"""A signed receipt, whole: more than MAX_THANKS with the longest names."""

MAX_AGE_S = 120.0
"""The oldest receipt that is heard: what it says is said again."""

RECEIPTS_PER_S, RECEIPTS_BURST = 1 / 30, 4.0
"""Receipts of one sender that are heard, ten times what is usual."""

ALL_RECEIPTS_PER_S, ALL_RECEIPTS_BURST = 16.0, 64.0
"""Receipts of all senders together: a third of a percent of a core, and the pace of 5000 nodes."""

MAX_SENDERS = 1024
"""Senders whose allowance is remembered."""

MAX_NODES = 512
"""Nodes whose thanks to us are kept, 7 MiB at most. Then newcomers leave for authors that we know."""

MAX_LEARNT = 1024
"""Authors and tasks that we count our thanks of."""

MAX_TASKS = 64
"""Tasks that we count what we gave of, and may be thanked for."""

WEEK_S = 7 * 86400.0

Much = tuple[int, int]
"""Groups, and answers in them."""


class Thanks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Groups of one author in one task that were learnt from."""

    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    task: Name
    groups: Annotated[int, Meta(ge=1, le=2**31)]
    answers: Annotated[int, Meta(ge=1, le=2**31 * MAX_GROUP_SIZE)]


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Whose groups its sender learnt from, since it started."""

    protocol: int
    swarm: Name
    software: Annotated[str, Meta(max_length=32)]
    """Version of swarmnode, by its own account."""
    since_ms: Count
    """Start of the sender's count, by its clock."""
    until_ms: Count
    thanks: Annotated[tuple[Thanks, ...], Meta(min_length=1, max_length=MAX_THANKS)]


class Thanked(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node's thanks to us."""

    since_ms: Count
    until_ms: Count
    heard_at: float
    total: dict[str, Much]
    """Groups of ours that it learnt from, by task, over all its starts."""
    counted: dict[str, Much]
    """Groups since its last start, as its receipts have it."""
    sealed: Annotated[bytes, Meta(max_length=MAX_RECEIPT_BYTES)]
    """Its newest receipt, as it signed it."""


class SavedReceipts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Receipts as they are kept over restarts."""

    given: dict[str, Much] = {}
    thanked: dict[str, Thanked] = {}


_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(Receipt)

NOTHING: Much = (0, 0)


class Receipts:
    """Thanks of ours to others, and of others to us."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._topic = receipts_topic_of(context.settings.swarm)
        self._since_ms = int(context.clock() * 1000)
        self._learnt = BoundedDict[tuple[str, str], Much](MAX_LEARNT)
        self._learnt_from = BoundedDict[Origin, None](MAX_LEARNT_FROM)
        self._unsaid = dict[tuple[str, str], None]()
        self._given = BoundedDict[str, Much](MAX_TASKS)
        self._thanked: dict[str, Thanked] = {}
        self._allowances = BoundedDict[str, TokenBucket](MAX_SENDERS)
        self._everybody = TokenBucket(ALL_RECEIPTS_PER_S, ALL_RECEIPTS_BURST)
        self.sent = self.dropped = 0

    # ---- ours to others ----

    def note_learnt(self, taught: Iterable[Taught]) -> None:
        """Take note of groups of others that were learnt from, of each the first time."""
        own = self._context.key.peer_id
        for author, example, answers in taught:
            is_new = (author, example) not in self._learnt_from
            self._learnt_from[author, example] = None
            if is_new and author != own and author not in self._context.neighbourhood:
                task = example.task
                known = self._learnt.get((author, task), NOTHING)
                self._learnt[author, task] = _sum(known, (1, answers))
                self._unsaid[author, task] = None
        self._unsaid = {one: None for one in self._unsaid if one in self._learnt}

    def to_say(self) -> bytes | None:
        """Returns the next receipt, sealed; None where there is nobody to thank."""
        whom = list(self._unsaid)[:MAX_THANKS]
        if not whom:
            return None
        for one in whom:
            del self._unsaid[one]
        receipt = Receipt(
            protocol=PROTOCOL,
            swarm=self._context.settings.swarm,
            software=__version__,
            since_ms=self._since_ms,
            until_ms=int(self._context.clock() * 1000),
            thanks=tuple(Thanks(*one, *self._learnt[one]) for one in whom),
        )
        return seal(self._context.key, CONTEXT, _encoder.encode(receipt))

    async def run(self) -> None:
        """Thank others now and then, until cancelled, and soon after a start; nothing waits."""
        settings = self._context.settings
        wait_s = min(FIRST_EVERY_S, settings.receipts_every_s)
        while not settings.private:
            await asyncio.sleep(wait_s)
            with suppress(NetworkError):
                if await self._context.host.peers() and (sealed := self.to_say()) is not None:
                    await self._context.host.publish(self._topic, sealed)
                    self._context.ledger.bytes_out += len(sealed)
                    self.sent += 1
                    wait_s = min(2 * wait_s, settings.receipts_every_s)

    # ---- of others to us ----

    def note_given(self, task: str, answers: int) -> None:
        """Take note of a group of ours that others may learn from."""
        self._given[task] = _sum(self._given.get(task, NOTHING), (1, answers))

    def hear(self, message: Message) -> None:
        """Take in a receipt, or count that it was dropped: none costs its sender anything."""
        self._context.ledger.bytes_in += len(message.data)
        try:
            receipt = self._checked(message)
            self._context.health.note_version(message.sender, receipt.software)
            thanks = [one for one in receipt.thanks if one.author == self._context.key.peer_id]
            if thanks:
                self._thanked[message.sender] = self._counted(message, receipt, thanks)
        except Rejected:
            self.dropped += 1

    def stats(self) -> ReceiptStats:
        lately = self._context.clock() - WEEK_S
        total = NOTHING
        for one in self._thanked.values():
            for much in one.total.values():
                total = _sum(total, much)
        lately_thanked = sum(one.heard_at >= lately for one in self._thanked.values())
        return ReceiptStats(*total, len(self._thanked), lately_thanked, self.sent, self.dropped)

    def saved(self) -> msgspec.Raw:
        return msgspec.Raw(_encoder.encode(SavedReceipts(dict(self._given), dict(self._thanked))))

    def restore(self, data: msgspec.Raw) -> None:
        """Take up what an earlier life knew; what cannot be read is forgotten."""
        try:
            saved = msgspec.msgpack.decode(data, type=SavedReceipts)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("cannot read the receipts of others, going on without them: %s", error)
            return
        self._given.update(list(saved.given.items())[-MAX_TASKS:])
        self._thanked = dict(list(saved.thanked.items())[-MAX_NODES:])

    def _checked(self, message: Message) -> Receipt:
        """Returns a receipt that its sender signed, for this swarm and in time. Raises Rejected."""
        sender, now = message.sender, self._context.clock()
        if sender == self._context.key.peer_id or self._context.is_banned(sender):
            raise Rejected(Reason.BANNED)
        if message.oversized or len(message.data) > MAX_RECEIPT_BYTES:
            raise Rejected(Reason.GOSSIP_TOO_LARGE)
        allowance = self._allowances.get(sender) or TokenBucket(RECEIPTS_PER_S, RECEIPTS_BURST)
        self._allowances[sender] = allowance
        if not (allowance.take(now=now) and self._everybody.take(now=now)):
            raise Rejected(Reason.RATE_LIMITED)
        envelope = unseal(message.data, CONTEXT, max_bytes=MAX_RECEIPT_BYTES)
        if envelope.author != sender:
            raise Rejected(Reason.SENDER_MISMATCH)
        receipt = decoded(_decoder, envelope.payload)
        if receipt.protocol != PROTOCOL or receipt.swarm != self._context.settings.swarm:
            raise Rejected(Reason.OTHER_SWARM)
        until_s = receipt.until_ms / 1000
        if receipt.since_ms > receipt.until_ms or not now - MAX_AGE_S <= until_s <= now + MAX_CLOCK_SKEW_S:
            raise Rejected(Reason.EXPIRED)
        return receipt

    def _counted(self, message: Message, receipt: Receipt, thanks: Sequence[Thanks]) -> Thanked:
        """Returns the thanks of a sender with this receipt of it. Raises Rejected: it is none that is newer
        than the last, there is no room, or it thanks for more than we gave."""
        known = self._thanked.get(message.sender)
        goes_on = known is not None and known.since_ms == receipt.since_ms
        if known is not None and (
            receipt.until_ms <= known.until_ms or (not goes_on and receipt.since_ms < known.until_ms)
        ):
            raise Rejected(Reason.DUPLICATE, "what it counts was counted")
        total = {} if known is None else dict(known.total)
        counted = dict(known.counted) if known is not None and goes_on else dict[str, Much]()
        for one in thanks:
            before = counted.get(one.task, NOTHING)
            counted[one.task] = now = (max(before[0], one.groups), max(before[1], one.answers))
            more = (now[0] - before[0], now[1] - before[1])
            total[one.task] = have = _sum(total.get(one.task, NOTHING), more)
            given = self._given.get(one.task, NOTHING)
            if not (have[0] <= given[0] and have[1] <= given[1] and one.groups <= one.answers):
                raise Rejected(Reason.FALSE_CLAIM, f"{have[0]} of {given[0]} groups")
        if known is None:
            self._make_room_for(message.sender)
        return Thanked(
            receipt.since_ms, receipt.until_ms, self._context.clock(), total, counted, message.data
        )

    def _make_room_for(self, sender: str) -> None:
        """Lets go of a newcomer's thanks for those of an author that we know. Raises Rejected."""
        if len(self._thanked) < MAX_NODES:
            return
        leaves = None if self._is_new(sender) else next(filter(self._is_new, self._thanked), None)
        if leaves is None:
            raise Rejected(Reason.OVER_CAPACITY)
        del self._thanked[leaves]

    def _is_new(self, peer: str) -> bool:
        return self._context.trust_of(peer) == "newcomer"


def _sum(one: Much, other: Much) -> Much:
    return one[0] + other[0], one[1] + other[1]
