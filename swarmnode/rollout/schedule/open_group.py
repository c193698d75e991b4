"""A group under way: one example and its completions, as far as they have come.

tasks -> Example -> [OpenGroup] <-> partial_rollouts.py <-> engine
                        |
                        v  Answered -> scoring
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from swarmnode.chat import Message, Turn, turns_of
from swarmnode.rollout.engine import NOTHING, Output, Request, Sampled, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.types import Completion, Example, ExampleKey

EndReason = Literal["stop", "length"]
"""Reasons for which a completion is finished; an aborted one continues."""

RESUMED_FIRST = 1 << 30
"""Subtracted from the priority of a request that already has tokens, so that it goes before all others."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An example with all its completions, not scored yet."""

    example: Example
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class OpenCompletion:
    """One completion of a group: its tokens so far, and the reason for its end if it has ended. While a
    request is in the engine, its new tokens are there and not here."""

    sampled: Sampled = NOTHING
    finish: EndReason | None = None
    observed: tuple[tuple[Message, ...], ...] = ()
    """The environment's messages for each inserted range of tokens."""
    asking: bool = False
    """True if a turn is over and its environment has not answered yet."""
    broken_off: bool = False
    """True if it ended because its environment was lost."""

    @property
    def turns(self) -> int:
        """Number of the policy's turns, including the current one."""
        return len(self.observed) + 1


@dataclass(slots=True)
class OpenGroup:
    """An example that is being answered. `serial` identifies groups and counts up: the lower, the older."""

    serial: int
    example: Example
    prompt_ids: tuple[int, ...]
    members: list[OpenCompletion]
    oldest_version: int | None = None
    """Lower bound of the policy versions of all tokens, in the engine or here. None: no request has been made
    yet."""

    @property
    def complete(self) -> bool:
        return all(member.finish is not None for member in self.members)

    @property
    def unfinished(self) -> list[int]:
        """Places of the members that have not ended."""
        return [place for place, member in enumerate(self.members) if member.finish is None]

    @property
    def asking(self) -> list[int]:
        """Places of the members that wait for their environment."""
        return [place for place, member in enumerate(self.members) if member.asking]

    @property
    def for_the_engine(self) -> list[int]:
        """Places of the members that can be sampled further right away."""
        return [place for place in self.unfinished if not self.members[place].asking]

    @property
    def tokens(self) -> int:
        """Number of tokens of all completions, without those still in the engine."""
        return sum(len(member.sampled) for member in self.members)

    @property
    def path(self) -> tuple[int, ...]:
        """Path through a pipeline of the first member that has one. (): none has."""
        return next((member.sampled.path for member in self.members if member.sampled.path), ())

    @property
    def name(self) -> str:
        """The group's name in log lines."""
        return f"example {self.example.key.index} of {self.example.key.task}"

    def request_id(self, place: int) -> str:
        return f"{self.serial}/{place}"

    def request(self, place: int, sampling: SamplingParams) -> Request:
        """Returns the engine's request for one member. Resumed requests go before new ones, then older groups
        before younger."""
        sampled = self.members[place].sampled
        if not sampled.path and self.path:
            sampled = replace(sampled, path=self.path)
        priority = self.serial - (RESUMED_FIRST if sampled else 0)
        return Request(self.request_id(place), self.prompt_ids, sampling, sampled, priority=priority)

    def asked_of(self, version: int) -> None:
        """Records that a member goes to an engine whose newest policy is `version`."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)

    def record(self, place: int, output: Output) -> None:
        """Records an output of the engine, ended or aborted."""
        finish = None if output.finish == "abort" else output.finish
        self.members[place] = replace(self.members[place], sampled=output.sampled, finish=finish)

    def settle_age(self) -> None:
        """Sets the group's age from its spans, which are exact once nothing is in the engine."""
        self.oldest_version = oldest_of(member.sampled.oldest_version for member in self.members)

    def start_over(self) -> None:
        """Forgets every token: the group starts from scratch."""
        self.members = [OpenCompletion()] * len(self.members)
        self.oldest_version = None

    def end_at(self, place: int, max_tokens: int) -> None:
        """Ends a member by length if it has `max_tokens` tokens: the budget may have changed with a
        restart."""
        member = self.members[place]
        if len(member.sampled) >= max_tokens:
            self.members[place] = replace(member, finish="length", asking=False)

    def answered(self, renderer: Renderer, *, in_turns: bool = False) -> Answered:
        """Returns the whole group, once it is complete. `in_turns`: its task is an environment."""
        return Answered(self.example, tuple(_completion(one, renderer, in_turns) for one in self.members))


def as_open_group(answered: Answered) -> OpenGroup:
    """Returns a group that was handed out as an open one, to be saved again. It is in no queue, so it needs
    no serial."""
    return OpenGroup(-1, answered.example, (), [_member(completion) for completion in answered.completions])


def completion_seed(seed: int, key: ExampleKey, place: int) -> int:
    """Returns the sampling seed of completion `place` of an example: the same in every run."""
    name = json.dumps([seed, key.task, key.version, key.seed, key.index, place])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def oldest_of(versions: Iterable[int | None]) -> int | None:
    """Returns the oldest known version.

    >>> oldest_of([None, 7, 5]), oldest_of([None])
    (5, None)
    """
    return min((version for version in versions if version is not None), default=None)


def _member(completion: Completion) -> OpenCompletion:
    if completion.logprobs is None or completion.finish == "abort":
        raise ValueError("this completion does not belong to a round")
    sampled = Sampled(
        completion.token_ids, completion.logprobs, completion.spans, completion.path, completion.given
    )
    observed = tuple(turn.observed for turn in turns_of(completion.said) if turn.observed)
    return OpenCompletion(sampled, completion.finish, observed, broken_off=completion.broken_off)


def turns_so_far(member: OpenCompletion, renderer: Renderer) -> list[Turn]:
    """Returns the turns of a policy and its environment, each decoded from its own tokens."""
    sampled, start, turns = member.sampled, 0, list[Turn]()
    for (end, after), observed in zip(sampled.given, member.observed, strict=True):
        turns.append(Turn(renderer.decode(sampled.token_ids[start:end]), observed))
        start = after
    if start < len(sampled):
        turns.append(Turn(renderer.decode(sampled.token_ids[start:])))
    return turns


def _completion(member: OpenCompletion, renderer: Renderer, in_turns: bool) -> Completion:
    if member.finish is None:
        raise ValueError("this completion has not ended")
    sampled = member.sampled
    return Completion(
        said=tuple(turns_so_far(member, renderer)) if in_turns else renderer.decode(sampled.token_ids),
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish=member.finish,
        path=sampled.path,
        given=sampled.given,
        broken_off=member.broken_off,
    )
