"""How an own group leaves: packed and signed for the swarm, handed as it is to policies of this process.

trainer's groups -> [compose] -> header, body -> gossip, unless nobody but those policies hears it; store
                 -> [give] -> [Neighbourhood.hand] -> Inbox.take of each other policy of this process -> pool

This is the sending half of validation.py. What no peer could use is not announced: groups that are
unfinished, unscored or without advantage, and texts that exceed the wire's bounds. The reason is counted like
those of strangers.

The exchanges of one process have one owner, one model and one tokenizer, so a group is passed on as it is:
nothing is fetched, decoded, tokenized or scored again. It is chosen among those of other authors, and ages,
as any group does. Towards everybody else each policy is a member like any other.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import msgspec

from swarmnode.errors import Rejected
from swarmnode.exchange.limits import (
    MAX_COMPLETION_CHARS,
    MAX_EPISODE_TURNS,
    MAX_GROUP_SIZE,
    MAX_HEADER_BYTES,
    MIN_GROUP_SIZE,
    PROTOCOL,
    Reason,
)
from swarmnode.exchange.messages import (
    Answer,
    Body,
    Given,
    Header,
    encode_body,
    encode_header,
    fingerprint,
    hash_body,
    narrowed,
)
from swarmnode.exchange.validation import HEADER_CONTEXT, require_advantage
from swarmnode.identity.keys import NodeKey, seal
from swarmnode.tasks.task import MAX_ABS_REWARD
from swarmnode.types import Completion, RolloutGroup, one_span


@dataclass(frozen=True, slots=True)
class ModelLabel:
    """What others are told of our policy; for their curiosity, nothing is decided by it."""

    family: str
    size: int | None
    """Parameters; None: unknown."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A group ready to be announced."""

    header: Header
    sealed: bytes
    body: bytes


def compose(
    group: RolloutGroup,
    key: NodeKey,
    *,
    swarm: str,
    model: ModelLabel,
    now: float,
    in_turns: bool = False,
    for_library: bool = False,
) -> Composed:
    """Pack and sign a group of ours. Raises Rejected with the reason why it cannot be shared. `in_turns`: its
    task is an environment, and its texts are transcripts. `for_library`: it is not announced, and needs no
    advantage."""
    if group.author != key.peer_id:
        raise Rejected(Reason.NOT_OURS)
    if in_turns:
        group = _that_ended(group)
    if not MIN_GROUP_SIZE <= len(group.completions) <= MAX_GROUP_SIZE:
        raise Rejected(Reason.GROUP_SIZE)
    if not for_library:
        require_advantage(group)
    group, body = _packed(group, in_turns)
    header = _header(group, body, swarm=swarm, model=model, now=now)
    sealed = seal(key, HEADER_CONTEXT, encode_header(header))
    if len(sealed) > MAX_HEADER_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"a header of {len(sealed)} bytes")
    return Composed(header, sealed, body)


def resealed(header: Header, body: bytes, key: NodeKey, *, now: float) -> Composed:
    """A header of ours signed anew, for whoever did not hear it when it was."""
    header = msgspec.structs.replace(header, created_ms=int(now * 1000))
    return Composed(header, seal(key, HEADER_CONTEXT, encode_header(header)), body)


def give(group: RolloutGroup, composed: Composed, *, in_turns: bool = False) -> Given:
    """A group of ours as the other policies of this process train on it: with the tokens that were sampled,
    their tokenizer being ours, but as of another policy, whose log-probabilities are not theirs."""
    completions = tuple(
        replace(
            completion,
            logprobs=None,
            spans=one_span(group.policy_version, len(completion.token_ids)),
            path=(),
        )
        for completion in group.completions
    )
    return Given(composed.body, replace(group, completions=completions), fingerprint(_body(group, in_turns)))


def _that_ended(group: RolloutGroup) -> RolloutGroup:
    """An environment's group without the episodes that were cut or could not be judged: no receiver would
    play them to an end."""
    ended = [
        place
        for place, completion in enumerate(group.completions)
        if completion.finish != "length" and group.scores[place]
    ]
    return replace(
        group,
        completions=tuple(group.completions[place] for place in ended),
        scores=tuple(group.scores[place] for place in ended),
    )


def _packed(group: RolloutGroup, in_turns: bool) -> tuple[RolloutGroup, bytes]:
    """A group and its body. Of one that fits into no body those answers that tell most: half of them, or half
    of these. Raises Rejected."""
    while True:
        try:
            return group, encode_body(_body(group, in_turns))
        except Rejected as rejected:
            half = len(group.completions) // 2
            if rejected.reason != Reason.TOO_LARGE or half < MIN_GROUP_SIZE:
                raise
            group = narrowed(group, half, random.Random(0))


def _body(group: RolloutGroup, in_turns: bool) -> Body:
    key = group.example.key
    return Body(
        author=group.author,
        task=key.task,
        version=key.version,
        seed=key.seed,
        index=key.index,
        answers=tuple(_answer(completion, in_turns) for completion in group.completions),
    )


def _answer(completion: Completion, in_turns: bool) -> Answer:
    if completion.finish == "abort":
        raise Rejected(Reason.UNFINISHED)
    text = _said(completion.text) if in_turns else completion.text
    if (sum(map(len, text)) if in_turns else len(text)) > MAX_COMPLETION_CHARS:
        raise Rejected(Reason.TOO_LONG)
    return Answer(text, completion.finish)


def _said(text: str) -> tuple[str, ...]:
    """What the policy said in a transcript, turn by turn. Raises Rejected."""
    from swarmnode.chat import turns_of

    try:
        saids = tuple(turn.said for turn in turns_of(text))
    except ValueError as error:
        raise Rejected(Reason.UNFINISHED, str(error)) from error
    if not 1 <= len(saids) <= MAX_EPISODE_TURNS:
        raise Rejected(Reason.UNPLAYABLE, f"{len(saids)} turns")
    return saids


def _header(group: RolloutGroup, body: bytes, *, swarm: str, model: ModelLabel, now: float) -> Header:
    key = group.example.key
    return Header(
        protocol=PROTOCOL,
        swarm=swarm,
        body_hash=hash_body(body),
        body_bytes=len(body),
        task=key.task,
        version=key.version,
        seed=key.seed,
        index=key.index,
        group_size=len(group.completions),
        reward_mean=_claimable(group.reward_mean),
        reward_std=_claimable(group.reward_std),
        model_family=model.family,
        model_size=model.size,
        policy_version=group.policy_version,
        created_ms=int(now * 1000),
    )


def _claimable(reward: float | None) -> float | None:
    if reward is not None and abs(reward) > MAX_ABS_REWARD:
        raise Rejected(Reason.TOO_LARGE, f"a reward of {reward}")
    return reward


# ---- the exchanges of one process ----

Take = Callable[[str, Header, bytes, Given], None]
"""Called with (author, header, the header as it is sealed for others, the group)."""


class Neighbourhood:
    """Whose exchange runs in this process, by peer id. All of them live on one event loop."""

    def __init__(self) -> None:
        self._takers: dict[str, Take] = {}
        self._meets_others: dict[str, bool] = {}

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._takers

    def enter(self, peer_id: str, take: Take) -> None:
        """Adds a member: `take` is given what the others publish from now on."""
        self._takers[peer_id] = take

    def leave(self, peer_id: str) -> None:
        self._takers.pop(peer_id, None)
        self._meets_others.pop(peer_id, None)

    def has_others(self, peer_id: str) -> bool:
        return bool(self._takers.keys() - {peer_id})

    def hand(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Give a group of `author` to all others."""
        for peer_id, take in self._takers.items():
            if peer_id != author:
                take(author, header, sealed, given)

    def is_heard_outside(self, peer_id: str, connected: Collection[str]) -> bool:
        """Whether anybody else could hear us, when `peer_id` is connected to these. What one of us gossips
        reaches whoever another of us is connected to, so the others' last answers count too.

        >>> neighbourhood = Neighbourhood()
        >>> neighbourhood.enter("a", print), neighbourhood.enter("b", print)
        (None, None)
        >>> neighbourhood.is_heard_outside("a", ["b"]), neighbourhood.is_heard_outside("b", ["a", "stranger"])
        (False, True)
        >>> neighbourhood.is_heard_outside("a", ["b"])
        True
        """
        self._meets_others[peer_id] = not all(other in self for other in connected)
        return any(self._meets_others.values())
