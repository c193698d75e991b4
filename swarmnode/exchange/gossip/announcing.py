"""Packs and signs our groups for the swarm, and prepares them for the other policies of this process.

trainer's groups -> [compose] -> header, body -> gossip, unless nobody hears it but those policies; store
                 -> [as_given] -> Neighbourhood.hand

This is the sending half of validation/. Groups that no peer could use are not announced: those that are
unfinished, unscored or without advantage, and texts that exceed the wire's bounds. The reason is counted, as
it is for groups of strangers.
"""

from dataclasses import asdict, dataclass, replace

import msgspec

from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.library.signed_group import SignedGroup
from swarmnode.exchange.limits import (
    MAX_COMPLETION_CHARS,
    MAX_EPISODE_TURNS,
    MAX_GROUP_SIZE,
    MAX_HEADER_BYTES,
    MIN_GROUP_SIZE,
    PROTOCOL,
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
)
from swarmnode.exchange.validation.body_check import Encode, require_advantage
from swarmnode.exchange.validation.header_check import HEADER_CONTEXT
from swarmnode.identity.envelope import seal
from swarmnode.identity.node_key import NodeKey
from swarmnode.tasks.task import MAX_ABS_REWARD
from swarmnode.types import Completion, RolloutGroup, fully_scored, one_span


@dataclass(frozen=True, slots=True)
class ModelLabel:
    """The label of our policy, for information only: nothing is decided by it."""

    family: str
    size: int | None
    """Number of parameters. None: unknown."""


def compose(
    group: RolloutGroup,
    key: NodeKey,
    *,
    swarm: str,
    model: ModelLabel,
    now: float,
    for_library: bool = False,
) -> SignedGroup:
    """Packs and signs a group of ours. Raises Rejected with the reason if it cannot be shared. `for_library`:
    the group will not be announced, and needs no advantage."""
    if group.author != key.peer_id:
        raise Rejected(Reason.NOT_OURS)
    if group.reward_mean is None:
        raise Rejected(Reason.ZERO_ADVANTAGE, "no answer was scored")
    group = _shared_part(group)
    if not MIN_GROUP_SIZE <= len(group.completions) <= MAX_GROUP_SIZE:
        raise Rejected(Reason.GROUP_SIZE)
    if not for_library:
        require_advantage(group)
    body = encode_body(_body(group))
    header = _header(group, body, swarm=swarm, model=model, now=now)
    sealed = seal(key, HEADER_CONTEXT, encode_header(header))
    if len(sealed) > MAX_HEADER_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"a header of {len(sealed)} bytes")
    return SignedGroup(group.author, header, sealed, body)


def require_readable(group: RolloutGroup, encode: Encode, max_tokens: int) -> None:
    """Raises Rejected if a node with our tokenizer and limit would refuse the group. That happens if half of
    its answers or more exceed the limit when their text is tokenized again; only answers that were cut off
    can."""
    group = _shared_part(group)
    longer = sum(
        completion.finish == "length"
        and isinstance(completion.said, str)
        and len(encode(completion.said, "length")) > max_tokens
        for completion in group.completions
    )
    if 2 * longer >= len(group.completions):
        raise Rejected(Reason.TOO_LONG, f"{longer} answers, when tokenized again")


def reseal(header: Header, body: bytes, key: NodeKey, *, now: float) -> SignedGroup:
    """Returns a group of ours with its header signed anew, for nodes that missed it the first time."""
    header = msgspec.structs.replace(header, created_ms=int(now * 1000))
    sealed = seal(key, HEADER_CONTEXT, encode_header(header))
    return SignedGroup(key.peer_id, header, sealed, body)


def as_given(group: RolloutGroup, composed: SignedGroup) -> Given:
    """Returns a group of ours as the other policies of this process train on it. They share its tokenizer, so
    it keeps the sampled tokens; its log-probabilities are those of another policy, so they are left out."""
    completions = tuple(
        replace(
            completion,
            logprobs=None,
            spans=one_span(group.policy_version, len(completion.token_ids)),
            path=(),
        )
        for completion in group.completions
    )
    return Given(
        composed.body, replace(group, completions=completions), fingerprint(_body(_shared_part(group)))
    )


def _shared_part(group: RolloutGroup) -> RolloutGroup:
    """Returns the group without the answers that our judge could not score, or not fully: one that can would
    find another mean than we claim. Also leaves out episodes that were cut off: no receiver would play them
    to an end."""
    in_turns = not all(isinstance(completion.said, str) for completion in group.completions)
    scored = zip(group.completions, fully_scored(group.scores), strict=True)
    places = [
        place
        for place, (completion, is_scored) in enumerate(scored)
        if is_scored and not (in_turns and completion.finish == "length")
    ]
    return replace(
        group,
        completions=tuple(group.completions[place] for place in places),
        scores=tuple(group.scores[place] for place in places),
    )


def _body(group: RolloutGroup) -> Body:
    return Body(
        author=group.author,
        **asdict(group.example.key),
        answers=tuple(map(_answer, group.completions)),
    )


def _answer(completion: Completion) -> Answer:
    """Returns a completion as it travels: the policy's text, split into turns for an episode. Raises
    Rejected."""
    said = completion.said
    if completion.finish == "abort":
        raise Rejected(Reason.UNFINISHED)
    if len(completion.text) > MAX_COMPLETION_CHARS:
        raise Rejected(Reason.TOO_LONG)
    if isinstance(said, str):
        return Answer(said, completion.finish)
    if not 1 <= len(said) <= MAX_EPISODE_TURNS:
        raise Rejected(Reason.UNPLAYABLE, f"{len(said)} turns")
    return Answer(tuple(turn.said for turn in said), completion.finish)


def _header(group: RolloutGroup, body: bytes, *, swarm: str, model: ModelLabel, now: float) -> Header:
    return Header(
        protocol=PROTOCOL,
        swarm=swarm,
        body_hash=hash_body(body),
        body_bytes=len(body),
        **asdict(group.example.key),
        group_size=len(group.completions),
        reward_mean=_require_claimable(group.reward_mean),
        reward_std=_require_claimable(group.reward_std),
        model_family=model.family,
        model_size=model.size,
        policy_version=group.policy_version,
        created_ms=int(now * 1000),
    )


def _require_claimable(reward: float | None) -> float | None:
    if reward is not None and abs(reward) > MAX_ABS_REWARD:
        raise Rejected(Reason.TOO_LARGE, f"a reward of {reward}")
    return reward
