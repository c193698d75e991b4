"""The state of the partial-rollout scheduler in a checkpoint: unfinished groups as bytes.

PartialRollouts.state -> [encode] -> checkpoint -> [decode], everything checked -> PartialRollouts.restore
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from swarmnode.errors import CheckpointError
from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.length_estimates import MAX_PROMPTS, MAX_TASKS, LengthEstimates
from swarmnode.rollout.schedule.open_group import OpenCompletion, OpenGroup
from swarmnode.types import ExampleKey, Span

# ---- unfinished groups as bytes ----

FORMAT: Literal[1] = 1
"""Version of the state's format, raised with every change of the records below. Other formats are refused."""

MAX_GROUP_SIZE = 4096
"""The most members of a group, more than any has: a damaged file must not request endless memory."""

MAX_STAGES = 64
"""The most stages on a token's path: as many as a micro-batch visits (the pipeline's hop_messages.py)."""

Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
_Message = tuple[str, str]


_Span = tuple[int, int, int, Literal["fresh", "stale"]]
"""Version, start, end, and the kind of keys and values."""


class _Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    spans: tuple[_Span, ...]
    finish: Literal["stop", "length"] | None
    path: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    """Path through a pipeline. Missing from older states, which used whole models."""
    given: tuple[tuple[TokenId, TokenId], ...] = ()
    """Ranges of inserted tokens. States from before environments existed end before this field."""
    observed: tuple[tuple[_Message, ...], ...] = ()
    stands: Literal["", "asking", "broken off"] = ""


class _Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    task: str
    version: str
    seed: int
    index: int
    members: Annotated[tuple[_Member, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUP_SIZE)]


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    groups: tuple[_Group, ...]
    prompt_lengths: Annotated[dict[str, Length], msgspec.Meta(max_length=MAX_PROMPTS)]
    task_lengths: Annotated[dict[str, Length], msgspec.Meta(max_length=MAX_TASKS)]
    may_stay_behind: Length | None = None
    """Number of groups that may stay behind. Missing from older states, whose groups had no such bound."""


class SavedState(msgspec.Struct, frozen=True):
    """The checked contents of a state."""

    groups: Sequence[tuple[ExampleKey, list[OpenCompletion]]]
    lengths: LengthEstimates
    may_stay_behind: float | None
    """Number of groups that may stay behind younger ones (departure_order.py). None: not recorded."""


def encode(
    groups: Iterable[OpenGroup],
    in_engine: Mapping[str, Sampled],
    lengths: LengthEstimates,
    may_stay_behind: float,
) -> bytes:
    """Returns the state as bytes. `in_engine`: the tokens so far of requests in the engine, by request id.
    `may_stay_behind`: a number of groups."""
    begun = tuple(_group(group, in_engine) for group in groups)
    state = _State(FORMAT, begun, dict(lengths.prompts), dict(lengths.tasks), may_stay_behind)
    return msgspec.msgpack.encode(state)


def decode(state: bytes) -> SavedState:
    """Returns the contents of a state. Raises CheckpointError if it is damaged, has another format, or is not
    a state at all."""
    try:
        found = msgspec.msgpack.decode(state, type=_State)
        groups = [
            (
                ExampleKey(group.task, group.version, group.seed, group.index),
                [_checked_member(member) for member in group.members],
            )
            for group in found.groups
        ]
    # Sampled and its spans validate themselves with ValueErrors, and so does UTF-8.
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the unfinished rollouts in this checkpoint: {error}",
            hint="start over with --fresh (nothing is deleted)",
        ) from error
    lengths = LengthEstimates(found.prompt_lengths, found.task_lengths)
    return SavedState(groups, lengths, found.may_stay_behind)


def _group(group: OpenGroup, in_engine: Mapping[str, Sampled]) -> _Group:
    key = group.example.key
    members = tuple(
        _member(in_engine.get(group.request_id(place), member.sampled), member)
        for place, member in enumerate(group.members)
    )
    return _Group(key.task, key.version, key.seed, key.index, members)


def _member(sampled: Sampled, member: OpenCompletion) -> _Member:
    spans: tuple[_Span, ...] = tuple((span.version, span.start, span.end, span.kv) for span in sampled.spans)
    observed = tuple(
        tuple((message["role"], message["content"]) for message in messages) for messages in member.observed
    )
    stands = "asking" if member.asking else "broken off" if member.broken_off else ""
    return _Member(
        sampled.token_ids,
        sampled.logprobs,
        spans,
        member.finish,
        sampled.path,
        sampled.given,
        observed,
        stands,
    )


def _checked_member(member: _Member) -> OpenCompletion:
    if not all(map(math.isfinite, member.logprobs)):
        raise ValueError("a log-probability is not a finite number")
    if member.finish is not None and not member.token_ids:
        raise ValueError("a completion ended before its first token")
    if len(member.observed) != len(member.given) or not all(member.observed):
        raise ValueError("an environment's messages do not match their tokens")
    spans = tuple(Span(*span) for span in member.spans)
    observed = tuple(
        tuple({"role": role, "content": content} for role, content in messages)
        for messages in member.observed
    )
    return OpenCompletion(
        Sampled(member.token_ids, member.logprobs, spans, member.path, member.given),
        member.finish,
        observed,
        asking=member.stands == "asking",
        broken_off=member.stands == "broken off",
    )
