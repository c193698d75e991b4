"""Rule `rescue`: a stranger's right answer takes the place of a failure of ours on the same example.

external groups -> successes that wait -> our own group on that example -> [Rescue] -> Lessons: a mixed group
                          |
                          v  wanted_examples -> tasks/wanted.py -> what we answer next

A stranger's group says little about us: its mean would be our baseline, and one success among 64 would be
worth 7.9. So the example is answered by ourselves, and where at most one of our G answers has full marks, a
failure is swapped for it. Advantages are those of the mixed group, at most those of a lone
success of our own. No other foreign text is learned from.

Our failures in that group end with our end of text, so the success does too: without, our end of text would
be what tells wrong from right (exchange/validation.py). Our own judge gave full marks to the text as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from swarmnode.training import marks as marking
from swarmnode.training.lessons import GroupLesson, Lessons
from swarmnode.training.marks import TaskMarks, needs_of
from swarmnode.training.rule_state import pack, unpack
from swarmnode.training.sharing import SharingRule
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, Scores

MAX_OFFERS = 256
"""Successes that wait for our own answers, the oldest out: some rounds of the demonstration policy."""

RARE_PASSES = 1
"""Own answers with full marks that a group may have and still be rescued: a pass rate of 1 / G."""


class RescueState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Successes that wait are not part of it: the next groups of others bring new ones."""

    marks: marking.Saved


@dataclass(frozen=True, slots=True)
class Offer:
    """A stranger's success."""

    example: Example
    completion: Completion
    scores: Scores


class Rescue:
    """Keeps successes of others until we have answered their examples."""

    keeps_own = True

    def __init__(self, settings: SharingRule) -> None:
        self._settings = settings
        self.marks = TaskMarks()
        self._offers: dict[ExampleKey, Offer] = {}

    def lessons(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], *, version: int
    ) -> Lessons:
        self.marks.see(own, external)
        for group in external:
            self._take_offer(group)
        return Lessons(
            tuple(self._lesson(group) for group in own),
            external=(),
            shaped=self._settings.shaped,
            pass_rates=self.marks.pass_rates,
        )

    def needs(self) -> Mapping[str, float]:
        return needs_of(self.marks.pass_rates)

    def wanted_examples(self) -> Sequence[Example]:
        return tuple(offer.example for offer in self._offers.values())

    def state(self) -> bytes:
        return pack("rescue", RescueState(self.marks.by_task))

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> None:
        saved = unpack(data, "rescue", RescueState)
        if saved is None:
            return
        self.marks.by_task = dict(saved.marks)
        if tasks is not None:
            self.marks.keep_only(tasks)

    def _take_offer(self, group: RolloutGroup) -> None:
        key, offer = group.example.key, self._success(group)
        if offer is None or key in self._offers:
            return
        self._offers[key] = offer
        if len(self._offers) > MAX_OFFERS:
            del self._offers[next(iter(self._offers))]

    def _success(self, group: RolloutGroup) -> Offer | None:
        """The first answer of a group that has full marks."""
        task = group.example.key.task
        for completion, scores, reward in zip(group.completions, group.scores, group.rewards, strict=True):
            whole = completion.token_ids and completion.finish != "abort"
            if whole and self.marks.has_full(task, reward):
                return Offer(group.example, completion, scores)
        return None

    def _lesson(self, group: RolloutGroup) -> GroupLesson:
        offer = self._offers.pop(group.example.key, None)
        place = None if offer is None else self._failure(group)
        if offer is None or place is None:
            return GroupLesson(group)
        mixed = replace(
            group,
            completions=_with(group.completions, place, offer.completion),
            scores=_with(group.scores, place, offer.scores),
        )
        return GroupLesson(mixed, end_foreign=self._settings.teach_ends)

    def _failure(self, group: RolloutGroup) -> int | None:
        """The place of the worst answer of a group that needs rescue; None: it does not."""
        task, rewards = group.example.key.task, group.rewards
        if sum(self.marks.has_full(task, reward) for reward in rewards) > RARE_PASSES:
            return None
        failures = [
            (reward, place)
            for place, reward in enumerate(rewards)
            if reward is not None and not self.marks.has_full(task, reward)
        ]
        return min(failures)[1] if failures else None


T = TypeVar("T")


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
