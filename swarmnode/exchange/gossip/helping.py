"""Asking for help: a node that is never right says so; others repeat what they found or try it themselves.

node (0 of 16 on an example, 0 of 4096 on a task) -> [Helping.ask] -> topic /swarmnode/4/<swarm>/help/0
that topic -> [Helping.hear] -> own finds of it -> [Helping.take_replies] -> announced again
                            `-> others' examples -> [Helping.take_examples] -> Node -> the learner tries them

A request is a signed header of its own kind on a topic of its own. Nodes that do not know this kind are not
on that topic, so they hear nothing and punish nobody. A request promises nothing and earns nothing. Its cost
to us is bounded:

- Each author has one example with us at a time and a limited rate of requests; the rate at which we repeat
  headers is limited for all requests together.
- Examples to try are drawn from our own copy of the task, are never held out, and are at most `exchange.help`
  of a round's examples; lots among authors decide which.
- The asker receives a header like any other: fetched, drawn again and judged as always, within the shares of
  authors and newcomers (selection.py).

A repeated header is signed anew for the same body, so a node that has the body recognizes it.
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
"""Oldest request that is heard: by then its author has asked again."""

AGAIN_S = 20.0
"""Seconds before we repeat a request, and before we repeat a header."""

MAX_ASKED = 4096
"""Most of our own requests, and of headers that we repeated, that are remembered."""

ASKS_PER_S, ASKS_BURST = 1.0, 8.0
"""Rate of the requests that we hear from one author, and that we send."""

NEW_ASKS_PER_S, NEW_ASKS_BURST = 64.0, 512.0
"""Rate of the requests that we hear from all newcomers together: identities are free, and checking a
signature takes 0.2 ms. Authors whose groups were good are limited only by their own allowance."""

ANSWERS_PER_S, ANSWERS_BURST = 4.0, 16.0
"""Rate of the headers that we repeat, for all authors together: well below what we may announce."""

ANSWERED_WITHIN_S = 60.0
"""Seconds after a request during which groups with nothing but right answers count as replies to it."""

ANSWERS_A_REQUEST = 16

FINDS_PER_TASK = 64
"""Number of our newest groups with a right answer that are remembered for each task."""

MAX_ASKERS = 256
"""Most authors whose requests wait; the oldest is dropped first."""


class HelpWanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A request by a node that answered a task, or one example of it, `answers` times and was never right."""

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
        """The example that help is asked for. None: any example of the task."""
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
    """Our own requests for help and those of others. Pure: messages go in and out as values."""

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

    def is_awaited(self, header: Header) -> bool:
        """Returns True if the group may answer our recent request about its task. Its author must claim right
        answers; the group is then of use to us even if all of its answers are right."""
        asked_at = self._awaited.get(header.task, -ANSWERED_WITHIN_S)
        return (header.reward_mean or 0.0) > 0 and self._context.clock() - asked_at < ANSWERED_WITHIN_S

    def note_find(self, group: RolloutGroup, header: Header) -> None:
        """Remembers a group of ours if it contains a right answer."""
        if any(reward is not None and reward > 0 for reward in group.rewards):
            self._finds.setdefault(header.task, deque(maxlen=FINDS_PER_TASK)).append(header)

    def ask(self, task: str, version: str, answers: int, example: ExampleKey | None = None) -> bytes | None:
        """Returns a sealed request. None if the same one was made a moment ago, if our pace is used up, or if
        the task is not exchanged."""
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
        """Takes in a request, or counts that it was dropped; no request costs its author anything."""
        try:
            wanted = self._open_request(message)
        except Rejected:
            self.dropped += 1
            return
        self.heard += 1
        self._to_answer[message.sender] = wanted
        if (example := wanted.example) is not None:
            self._wanted[message.sender] = example

    def take_replies(self) -> list[Header]:
        """Takes out those of our headers that the askers could use, to be signed anew."""
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

    def take_examples(self, count: int, taken: Container[ExampleKey]) -> list[ExampleKey]:
        """Takes out at most `count` examples that others could not answer, one for each author and none that
        we have answered."""
        for author in [author for author, key in self._wanted.items() if key in taken]:
            del self._wanted[author]
        authors = self._context.rng.sample(sorted(self._wanted), min(count, len(self._wanted)))
        found = list(dict.fromkeys(self._wanted.pop(author) for author in authors))
        self.tried += len(found)
        return found

    def stats(self) -> HelpStats:
        return HelpStats(self.asked, self.heard, self.answered, self.tried, self.dropped)

    def _open_request(self, message: Message) -> HelpWanted:
        """Returns the request in a message. Raises Rejected."""
        author, now = message.sender, self._context.clock()
        if author == self._context.key.peer_id or self._context.is_banned(author):
            raise Rejected(Reason.BANNED)
        if message.oversized or len(message.data) > MAX_REQUEST_BYTES:
            raise Rejected(Reason.GOSSIP_TOO_LARGE)
        allowance = self._allowances.get(author) or TokenBucket(ASKS_PER_S, ASKS_BURST)
        self._allowances[author] = allowance
        known = self._context.is_known(author)
        if not allowance.take(now=now) or not (known or self._newcomers.take(now=now)):
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


def never_right(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups of a round whose rewards are known and in which no answer was right."""
    return [
        group
        for group in groups
        if (rewards := [one for one in group.rewards if one is not None]) and max(rewards) <= 0
    ]
