"""Rule `rescue`: a stranger's right answer takes the place of a failure of ours on the same example.

external groups -> successes that wait -> our own group on that example -> [Rescue] -> Lessons: a mixed group
                          |
                          v  wanted_examples -> tasks/judged.py -> what we answer next

A stranger's group says little about us: its mean would be our baseline, and one success among 64 would be
worth 7.9. So the example is answered by ourselves, and where at most one of our G answers has full marks, a
failure is swapped for it. Advantages are those of the mixed group, at most those of a lone
success of our own. No other foreign text is learned from.

Our failures in that group end with our end of text, so the success does too: without, our end of text would
be what tells wrong from right (exchange/validation.py). Our own judge gave full marks to the text as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from swarmnode.training.foreign import sharing_gauge as marking
from swarmnode.training.foreign.book import BookCandidate, Mend
from swarmnode.training.foreign.book_rule import full_answers
from swarmnode.training.foreign.lessons import GroupLesson, Lessons, Rule, SharingRule, pack, unpack
from swarmnode.training.foreign.sharing_gauge import TaskMarks, needs_of
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span

MAX_OFFERS = 256
"""Successes that wait for our own answers, the oldest out: some rounds of the demonstration policy."""

RARE_PASSES = 1
"""Own answers with full marks that a group may have and still be rescued: a pass rate of 1 / G."""


class RescueState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Successes that wait are not part of it: the next groups of others bring new ones."""

    marks: marking.Saved


class Rescue(Rule):
    """Keeps successes of others until we have answered their examples."""

    keeps_own = True
    adapts = True

    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(settings, seed, mend)
        self.marks = TaskMarks()
        self._offers: dict[ExampleKey, BookCandidate] = {}

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        self.marks.see(own, external)
        self._take_offers(external)
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

    def _take_offers(self, external: Sequence[RolloutGroup]) -> None:
        """One success of each example that has none waiting, as it may be learned from."""
        found = (full_answers(group, self.marks, own=False)[:1] for group in external)
        new = [answer for answers in found for answer in answers if answer.example.key not in self._offers]
        for answer in new if self._mend is None or not new else self._mend(new):
            if answer.token_ids:
                self._offers.setdefault(answer.example.key, answer)
        while len(self._offers) > MAX_OFFERS:
            del self._offers[next(iter(self._offers))]

    def _lesson(self, group: RolloutGroup) -> GroupLesson:
        offer = self._offers.pop(group.example.key, None)
        place = None if offer is None else self._failure(group)
        if offer is None or place is None:
            return GroupLesson(group)
        mixed = replace(
            group,
            completions=_with(group.completions, place, _completion(offer, group.policy_version)),
            scores=_with(group.scores, place, {"rescued": offer.reward}),
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


def _completion(answer: BookCandidate, version: int) -> Completion:
    """A stranger's answer without its end, which GroupLesson.end_foreign adds."""
    spans = one_span(version, len(answer.token_ids))
    return Completion(answer.text, answer.token_ids, None, spans, "length", given=answer.given)


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
