"""Asking for help: who is never right says so, and who knows better announces it again or tries.

node (0 of 16 on an example, 0 of 4096 on a task) -> [Helping.ask] -> topic /swarmnode/4/<swarm>/help/0
that topic -> [Helping.hear] -> own finds of that example or task -> [Helping.answers] -> announced again
                            `-> examples of others -> [Helping.to_try] -> Node -> the learner tries them

A request is a signed header of its own kind on a topic of its own: nodes that do not know it are not on that
topic, hear nothing and punish nobody. It promises nothing and earns nothing. What it can cost us is bounded:

- An author has one example with us at a time, and so many requests a second; all together have so many
  repeated headers of ours a second.
- What is tried is drawn from our own copy of the task, is never held out, and is at most `exchange.help` of a
  round's examples; which, is decided by lot among authors.
- What comes back to the asker is a header as any other: fetched, drawn again and judged as always, under the
  shares of authors and newcomers (selection.py).

A header that is repeated is signed anew for the same body, so whoever has it knows it already.
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_context import ExchangeContext
from swarmnode.exchange.exchange_stats import HelpStats
from swarmnode.exchange.limits import MAX_CLOCK_SKEW_S, PROTOCOL
from swarmnode.exchange.messages import Count, Header, Index, Name, Seed
from swarmnode.identity.envelope import decoded, seal, unseal
from swarmnode.network.host import Message
from swarmnode.tasks.task import may_be_exchanged
from swarmnode.token_bucket import TokenBucket
from swarmnode.types import ExampleKey, RolloutGroup

CONTEXT = f"swarmnode/{PROTOCOL}/help-wanted"

MAX_REQUEST_BYTES = 512
"""A signed request, whole."""

MAX_AGE_S = 120.0
"""The oldest request that is heard: by then its author has asked again."""

AGAIN_S = 20.0
"""Seconds before we ask for the same again, and before we repeat the same header."""

MAX_ASKED = 4096
"""Our own requests, and headers that we repeated, that are remembered."""

ASKS_PER_S, ASKS_BURST = 1.0, 8.0
"""Requests of one author that are heard, and that we send."""

NEW_ASKS_PER_S, NEW_ASKS_BURST = 64.0, 512.0
"""Requests of all newcomers together that are heard: identities are free, and to check a signature takes 0.2
ms. Authors whose groups were good have their own allowance alone."""

ANSWERS_PER_S, ANSWERS_BURST = 4.0, 16.0
"""Headers that we repeat, for all authors together: well under what we may announce."""

ANSWERED_WITHIN_S = 60.0
"""Seconds after a request in which groups with right answers alone are answers to it."""

ANSWERS_A_REQUEST = 16

FINDS_PER_TASK = 64
"""Our newest groups with a right answer that are remembered, by task."""

MAX_ASKERS = 256
"""Authors whose requests wait, the oldest out."""


class HelpWanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Somebody has answered a task, or one example of it, so many times and was never right."""

    protocol: int
    swarm: Name
    task: Name
    version: Name
    answers: Annotated[int, Meta(ge=1, le=2**53)]
    seed: Seed | None
    """With `index`, the example. None: the whole task."""
    index: Index | None
    created_ms: Count

    @property
    def example(self) -> ExampleKey | None:
        """The example that is asked for; None: any of the task."""
        if self.seed is None or self.index is None:
            return None
        return ExampleKey(self.task, self.version, self.seed, self.index)


_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(HelpWanted)


def help_topic_of(swarm: str) -> str:
    """Returns the topic on which help is asked for in a swarm.

    >>> help_topic_of("commons")
    '/swarmnode/4/commons/help/0'
    """
    return f"/swarmnode/{PROTOCOL}/{swarm}/help/0"


class Helping:
    """Requests for help, of others and our own. Pure: messages go in and out as values."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._repeated = BoundedDict[bytes, float](MAX_ASKED)
        self._finds: dict[str, deque[Header]] = {}
        self._asked = BoundedDict[object, float](MAX_ASKED)
        self._awaited = BoundedDict[str, float](MAX_ASKED)
        self._own_pace = TokenBucket(ASKS_PER_S, ASKS_BURST)
        self._answers_pace = TokenBucket(ANSWERS_PER_S, ANSWERS_BURST)
        self._newcomers = TokenBucket(NEW_ASKS_PER_S, NEW_ASKS_BURST)
        self._allowances = BoundedDict[str, TokenBucket](MAX_ASKERS)
        self._wanted = BoundedDict[str, ExampleKey](MAX_ASKERS)
        self._to_answer = BoundedDict[str, HelpWanted](MAX_ASKERS)
        self.asked = self.heard = self.answered = self.tried = self.dropped = 0

    def awaits(self, header: Header) -> bool:
        """Returns True if a group of this task answers what we asked for lately, and its author says that it
        has right answers: it is of use to us where all of them are right, too."""
        asked_at = self._awaited.get(header.task, -ANSWERED_WITHIN_S)
        return (header.reward_mean or 0.0) > 0 and self._context.clock() - asked_at < ANSWERED_WITHIN_S

    def found(self, group: RolloutGroup, header: Header) -> None:
        """Remember a group of ours that has a right answer in it."""
        if any(reward is not None and reward > 0 for reward in group.rewards):
            self._finds.setdefault(header.task, deque(maxlen=FINDS_PER_TASK)).append(header)

    def ask(self, task: str, version: str, answers: int, example: ExampleKey | None = None) -> bytes | None:
        """A sealed request; None: it was made a moment ago, too many were, or the task is not exchanged."""
        now, what = self._context.clock(), example or (task, version)
        known = self._context.tasks.get(task)
        if (
            known is None
            or not may_be_exchanged(known)
            or 0 <= now - self._asked.get(what, -AGAIN_S) < AGAIN_S
        ):
            return None
        if not self._own_pace.take(now=now):
            return None
        self._asked[what] = self._awaited[task] = now
        self.asked += 1
        wanted = HelpWanted(
            protocol=PROTOCOL,
            swarm=self._context.settings.swarm,
            task=task,
            version=version,
            answers=answers,
            seed=None if example is None else example.seed,
            index=None if example is None else example.index,
            created_ms=int(now * 1000),
        )
        return seal(self._context.key, CONTEXT, _encoder.encode(wanted))

    def hear(self, message: Message) -> None:
        """Take in a request, or count that it was dropped: none costs its author anything."""
        try:
            wanted = self._checked(message)
        except Rejected:
            self.dropped += 1
            return
        self.heard += 1
        self._to_answer[message.sender] = wanted
        if (example := wanted.example) is not None:
            self._wanted[message.sender] = example

    def answers(self) -> list[Header]:
        """Takes out the headers of ours that those who asked could use, to be signed anew."""
        found: list[Header] = []
        while self._to_answer:
            _, wanted = self._to_answer.popitem(last=False)
            finds = [one for one in self._finds.get(wanted.task, ()) if one.version == wanted.version]
            if (example := wanted.example) is not None:
                finds = [one for one in finds if one.key == example] or finds
            now = self._context.clock()
            finds = [
                one for one in finds if not 0 <= now - self._repeated.get(one.body_hash, -AGAIN_S) < AGAIN_S
            ]
            for header in self._context.rng.sample(finds, min(len(finds), ANSWERS_A_REQUEST)):
                if self._answers_pace.take(now=now):
                    self._repeated[header.body_hash] = now
                    found.append(header)
        self.answered += len(found)
        return found

    def to_try(self, count: int, taken: Container[ExampleKey]) -> list[ExampleKey]:
        """Takes out at most `count` examples that others could not answer, one of an author; none that we
        have answered."""
        for author in [author for author, key in self._wanted.items() if key in taken]:
            del self._wanted[author]
        authors = self._context.rng.sample(sorted(self._wanted), min(count, len(self._wanted)))
        found = list(dict.fromkeys(self._wanted.pop(author) for author in authors))
        self.tried += len(found)
        return found

    def stats(self) -> HelpStats:
        return HelpStats(self.asked, self.heard, self.answered, self.tried, self.dropped)

    def _checked(self, message: Message) -> HelpWanted:
        """Raises Rejected."""
        author, now = message.sender, self._context.clock()
        if author == self._context.key.peer_id or self._context.is_banned(author):
            raise Rejected(Reason.BANNED)
        if message.oversized or len(message.data) > MAX_REQUEST_BYTES:
            raise Rejected(Reason.GOSSIP_TOO_LARGE)
        allowance = self._allowances.get(author) or TokenBucket(ASKS_PER_S, ASKS_BURST)
        self._allowances[author] = allowance
        is_new = self._context.trust_of(author) == "newcomer"
        if not allowance.take(now=now) or (is_new and not self._newcomers.take(now=now)):
            raise Rejected(Reason.RATE_LIMITED)
        envelope = unseal(message.data, CONTEXT, max_bytes=MAX_REQUEST_BYTES)
        if envelope.author != author:
            raise Rejected(Reason.SENDER_MISMATCH)
        publishers = self._context.settings.publishers
        if publishers is not None and author not in publishers:
            raise Rejected(Reason.NOT_A_PUBLISHER)
        wanted = decoded(_decoder, envelope.payload)
        task = self._context.tasks.get(wanted.task)
        if wanted.protocol != PROTOCOL or wanted.swarm != self._context.settings.swarm:
            raise Rejected(Reason.OTHER_SWARM)
        if task is None or not may_be_exchanged(task):
            raise Rejected(Reason.OTHER_TASK)
        if task.version != wanted.version:
            raise Rejected(Reason.OTHER_VERSION)
        created_s = wanted.created_ms / 1000
        if not now - MAX_AGE_S <= created_s <= now + MAX_CLOCK_SKEW_S:
            raise Rejected(Reason.EXPIRED)
        return wanted


def rarely_right(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups of a round in which no answer was right, though rewards are known."""
    return [
        group
        for group in groups
        if (rewards := [one for one in group.rewards if one is not None]) and max(rewards) <= 0
    ]
