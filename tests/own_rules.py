"""A module of a user's with a rule of its own, named in `exchange.rule` by import path."""

from collections.abc import Sequence

from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import GroupLesson, Lessons, Rule, as_they_are
from swarmnode.types import RolloutGroup


class OnlyTheBest(Rule):
    """Our own groups, and of each external one the answers with its highest reward."""

    keeps_own = True

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        return Lessons(as_they_are(own), tuple(best_of(group) for group in external))


def best_of(group: RolloutGroup) -> GroupLesson:
    """The answers with the group's highest reward, with an advantage of 1 each."""
    scored = [reward for reward in group.rewards if reward is not None]
    return GroupLesson(
        group, tuple(1.0 if scored and reward == max(scored) else None for reward in group.rewards)
    )


class TrustingBook(BookRule):
    """A book that takes right answers of strangers as they are, whoever sent them."""

    mends = False
    measures_teachers = False


class NoRule:
    """It has no lessons."""


OWN_RULE = f"{__name__}:{OnlyTheBest.__name__}"
TRUSTING = f"{__name__}:{TrustingBook.__name__}"
