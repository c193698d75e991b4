"""A group on its way: one example, and its completions as far as they have come.

tasks -> Example -> [OpenGroup] <-> partial.py <-> engine
                        |
                        v  Answered -> scoring
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from swarmnode.rollout.engine import NOTHING, Output, Request, Sampled, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.types import Completion, Example, ExampleKey

Ended = Literal["stop", "length"]
"""Why a completion is whole: what is aborted goes on."""

RESUMED_FIRST = 1 << 30
"""Added to the precedence of a request that has tokens already: it goes before all that have none."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An example with all its completions, not scored yet."""

    example: Example
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class OpenCompletion:
    """One completion of a group: its tokens as far as we have them, and why it ended if it did.

    While a request is in the engine, its new tokens are there and not here.
    """

    sampled: Sampled = NOTHING
    finish: Ended | None = None


@dataclass(slots=True)
class OpenGroup:
    """An example that is being answered. `serial` tells groups apart and counts up: the lower, the older."""

    serial: int
    example: Example
    prompt_ids: tuple[int, ...]
    members: list[OpenCompletion]
    oldest_version: int | None = None
    """No token of the group, in the engine or here, is of an older policy. None: nothing was asked yet."""

    @property
    def complete(self) -> bool:
        return all(member.finish is not None for member in self.members)

    @property
    def unfinished(self) -> list[int]:
        """Places of the members that have not ended."""
        return [place for place, member in enumerate(self.members) if member.finish is None]

    @property
    def tokens(self) -> int:
        """Tokens of all completions together, without those still in the engine."""
        return sum(len(member.sampled) for member in self.members)

    @property
    def path(self) -> tuple[int, ...]:
        """The path through a pipeline that the group's first member with one took; () where none has."""
        return next((member.sampled.path for member in self.members if member.sampled.path), ())

    @property
    def name(self) -> str:
        """The group's name in log lines."""
        return f"example {self.example.key.index} of {self.example.key.task}"

    def request_id(self, place: int) -> str:
        return f"{self.serial}/{place}"

    def request(self, place: int, sampling: SamplingParams) -> Request:
        """What to ask the engine for one member. Resumed before new, then older groups before younger."""
        sampled = self.members[place].sampled
        if not sampled.path and self.path:
            sampled = replace(sampled, path=self.path)
        priority = self.serial - (RESUMED_FIRST if sampled else 0)
        return Request(self.request_id(place), self.prompt_ids, sampling, sampled, priority=priority)

    def asked_of(self, version: int) -> None:
        """A member goes to an engine whose newest policy is `version`."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)

    def record(self, place: int, output: Output) -> None:
        """Keep what the engine gave back, ended or aborted."""
        finish = None if output.finish == "abort" else output.finish
        self.members[place] = OpenCompletion(output.sampled, finish)

    def settle_age(self) -> None:
        """Takes the group's age from its spans, which say it exactly once nothing is in the engine."""
        self.oldest_version = oldest_of(member.sampled.oldest_version for member in self.members)

    def start_over(self) -> None:
        """Forget every token: the group starts from scratch."""
        self.members = [OpenCompletion()] * len(self.members)
        self.oldest_version = None

    def end_at(self, place: int, max_tokens: int) -> None:
        """End a member by length if it has so many tokens: the budget may be another after a restart."""
        member = self.members[place]
        if len(member.sampled) >= max_tokens:
            self.members[place] = replace(member, finish="length")

    def answered(self, renderer: Renderer) -> Answered:
        """The whole group, once it is complete."""
        return Answered(self.example, tuple(_completion(member, renderer) for member in self.members))


def as_open_group(answered: Answered) -> OpenGroup:
    """A group that was handed out, to be written down again. It is in no line, so it needs no serial."""
    return OpenGroup(-1, answered.example, (), [_member(completion) for completion in answered.completions])


def members_of(answered: Answered, members: int) -> list[OpenCompletion]:
    """Those of a group that was handed out, and new ones behind them up to so many in all."""
    begun = [_member(completion) for completion in answered.completions]
    return begun + [OpenCompletion()] * (members - len(begun))


def completion_seed(seed: int, key: ExampleKey, place: int) -> int:
    """The sampling seed of completion `place` of an example: the same in every run."""
    name = json.dumps([seed, key.task, key.version, key.seed, key.index, place])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def oldest_of(versions: Iterable[int | None]) -> int | None:
    """The oldest version that is known.

    >>> oldest_of([None, 7, 5]), oldest_of([None])
    (5, None)
    """
    return min((version for version in versions if version is not None), default=None)


def _member(completion: Completion) -> OpenCompletion:
    if completion.logprobs is None or completion.finish == "abort":
        raise ValueError("this completion is not one of a round's")
    sampled = Sampled(completion.token_ids, completion.logprobs, completion.spans, completion.path)
    return OpenCompletion(sampled, completion.finish)


def _completion(member: OpenCompletion, renderer: Renderer) -> Completion:
    if member.finish is None:
        raise ValueError("this completion has not ended")
    sampled = member.sampled
    return Completion(
        text=renderer.decode(sampled.token_ids),
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish=member.finish,
        path=sampled.path,
    )
