"""What travels: a header that names a group and a body that holds its answers.

RolloutGroup -> [Header, Body] -> codec -> wire -> codec -> [Header, Body] -> validation -> RolloutGroup

A header is gossiped to everybody inside a signed envelope (identity/envelope.py), whose author is the group's
author. A body is fetched by the hash that its header names. Both are arrays on the wire: the topic and the
stream protocol carry the version, and any other shape is malformed. The bounds of a field stand in its type.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmnode.exchange.limits import (
    MAX_BODY_BYTES,
    MAX_COMPLETION_CHARS,
    MAX_GROUP_SIZE,
    MAX_NAME_CHARS,
    MIN_GROUP_SIZE,
)
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.tasks.task import MAX_ABS_REWARD, MAX_INDEX, MAX_SEED
from swarmnode.types import ExampleKey, RolloutGroup

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Index = Annotated[int, Meta(ge=0, lt=MAX_INDEX)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The announcement of one group. Everything in it is a claim of its author."""

    protocol: int
    swarm: Name
    body_hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of the body as it travels, compressed: a wrong body is found out before it is decompressed."""
    body_bytes: Annotated[int, Meta(ge=1, le=MAX_BODY_BYTES)]
    """Its length; no more than this is ever read from a peer."""
    task: Name
    version: Name
    seed: Seed
    index: Index
    group_size: Annotated[int, Meta(ge=MIN_GROUP_SIZE, le=MAX_GROUP_SIZE)]
    reward_mean: Annotated[float, Meta(ge=-MAX_ABS_REWARD, le=MAX_ABS_REWARD)] | None
    """Mean reward by the author's judge; None: not scored. It helps to choose what to fetch and is never
    trained on."""
    reward_std: Annotated[float, Meta(ge=0, le=MAX_ABS_REWARD)] | None
    model_family: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    model_size: Count | None
    """Parameters of the author's model, adapter included."""
    policy_version: Count
    """The author's; it cannot be compared with ours."""
    created_ms: Count
    """Milliseconds since the epoch by the author's clock."""

    @property
    def key(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)

    @property
    def created_s(self) -> float:
        return self.created_ms / 1000


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One completion. No token ids: the receiver has another tokenizer."""

    text: Annotated[str, Meta(max_length=MAX_COMPLETION_CHARS)]
    finish: Literal["stop", "length"]
    """Completions that were cut off ("abort") are no answers and do not travel. Nobody can verify the rest,
    so it is not believed (validation.py)."""


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The answers of one group. It names author and example, so that it fits under no other header."""

    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    task: Name
    version: Name
    seed: Seed
    index: Index
    answers: Annotated[tuple[Answer, ...], Meta(min_length=MIN_GROUP_SIZE, max_length=MAX_GROUP_SIZE)]

    @property
    def key(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When something came in, by our own clock and policy: those of authors are not comparable."""

    at: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class Given:
    """A group of another policy of this process: there is nothing to fetch and nobody to doubt."""

    body: bytes
    """The encoded body, for a checkpoint and for strangers who ask."""
    group: RolloutGroup
    """The group as one of another author is trained on."""
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Announcement:
    """A header whose signature and bounds have been checked."""

    author: str
    header: Header
    sealed: bytes
    """The envelope as it came, to be kept in a checkpoint and checked again."""
    arrival: Arrival
    given: Given | None = None
    """What it announces, from a policy of this process. None: to be fetched and judged."""
    restored: bool = False
    """It comes from our own checkpoint, where it waited for a draw."""
