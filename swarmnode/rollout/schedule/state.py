"""Unfinished groups as bytes: what a checkpoint keeps of a round that was under way.

partial.py -> [encode] -> checkpoint ... restart ... [decode] -> partial.py, perhaps with another engine

An example is stored by its key and drawn again; tokens, log-probabilities and spans are stored as they are.
The checkpoint is ours, but a disk is not to be trusted: everything is checked before anything is used.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from swarmnode.errors import CheckpointError
from swarmnode.rollout.engine import Sampled
from swarmnode.rollout.schedule.group import Ended, OpenCompletion, OpenGroup
from swarmnode.rollout.schedule.lengths import MAX_PROMPTS, MAX_TASKS, LengthEstimates
from swarmnode.types import ExampleKey, Span

FORMAT: Literal[1] = 1
"""Raised with every change of what follows: there is no reading of other formats."""

MAX_GROUP_SIZE = 4096
"""More members than any group has: a damaged file must not ask for memory without end."""

MAX_STAGES = 64
"""The most stages on a token's path, as many as a micro-batch visits at most (pipeline/wire/messages.py)."""

Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class _Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    start: int
    end: int
    kv: Literal["fresh", "stale"]


class _Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    spans: tuple[_Span, ...]
    finish: Literal["stop", "length"] | None
    path: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    """States of before it was recorded have none: they are those of whole models."""


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
    """States of before it was recorded have none: what was under way then was so without a bound."""


class Kept(msgspec.Struct, frozen=True):
    """What a state holds, checked."""

    groups: Sequence[tuple[ExampleKey, list[OpenCompletion]]]
    lengths: LengthEstimates
    may_stay_behind: float | None
    """Groups that may stay behind younger ones (turns.py); None: not recorded."""


def encode(
    groups: Iterable[OpenGroup],
    in_engine: Mapping[str, Sampled],
    lengths: LengthEstimates,
    may_stay_behind: float,
) -> bytes:
    """`in_engine`: the tokens so far of what is being sampled, by request id. `may_stay_behind`: groups."""
    begun = tuple(_group(group, in_engine) for group in groups)
    state = _State(FORMAT, begun, dict(lengths.prompts), dict(lengths.tasks), may_stay_behind)
    return msgspec.msgpack.encode(state)


def decode(state: bytes) -> Kept:
    """Raises CheckpointError for what is damaged, of another format, or not a state at all."""
    try:
        found = msgspec.msgpack.decode(state, type=_State)
        groups = [_checked(group) for group in found.groups]
    # Sampled and its spans check themselves with ValueErrors, and so does UTF-8.
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(
            f"the unfinished rollouts in this checkpoint cannot be read: {error}",
            hint="start over with --fresh (nothing is deleted)",
        ) from error
    lengths = LengthEstimates(found.prompt_lengths, found.task_lengths)
    return Kept(groups, lengths, found.may_stay_behind)


def _group(group: OpenGroup, in_engine: Mapping[str, Sampled]) -> _Group:
    key = group.example.key
    members = tuple(
        _member(in_engine.get(group.request_id(place), member.sampled), member.finish)
        for place, member in enumerate(group.members)
    )
    return _Group(key.task, key.version, key.seed, key.index, members)


def _member(sampled: Sampled, finish: Ended | None) -> _Member:
    spans = tuple(_Span(span.version, span.start, span.end, span.kv) for span in sampled.spans)
    return _Member(sampled.token_ids, sampled.logprobs, spans, finish, sampled.path)


def _checked(group: _Group) -> tuple[ExampleKey, list[OpenCompletion]]:
    key = ExampleKey(group.task, group.version, group.seed, group.index)
    return key, [_checked_member(member) for member in group.members]


def _checked_member(member: _Member) -> OpenCompletion:
    if not all(map(math.isfinite, member.logprobs)):
        raise ValueError("a log-probability is not a finite number")
    if member.finish is not None and not member.token_ids:
        raise ValueError("a completion ended before its first token")
    spans = tuple(Span(span.version, span.start, span.end, span.kv) for span in member.spans)
    return OpenCompletion(Sampled(member.token_ids, member.logprobs, spans, member.path), member.finish)
