"""What a rule makes of a round: which groups are learned from and with what credit, and what is replayed.

node (own and external groups) -> Rule.lessons -> [Lessons] -> samples.py -> trainer

The rules are in rules.py. No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnode.types import Example, RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupLesson:
    """One group, and what of it is learned from."""

    group: RolloutGroup
    advantages: tuple[float | None, ...] | None = None
    """The advantage of each completion, in place of those that its rewards give; None at a place: it is left
    out. None: those of the group (advantage.py)."""
    gains_only: bool = False
    """Only completions that are better than their group are learned from."""
    end_foreign: bool = False
    """Our end of text follows the answers of strangers in it: our judge has seen that they end there."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One answer of the book, to be learned from again."""

    prompt: str
    token_ids: tuple[int, ...]
    """Its tokens without an end of text."""
    advantage: float
    ends: bool
    """Our end of text follows where there is room for it."""
    own: bool = False
    """We found it ourselves."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """Everything that one round trains on."""

    own: tuple[GroupLesson, ...]
    external: tuple[GroupLesson, ...]
    replayed: tuple[Replay, ...] = ()
    shaped: bool = False
    """Tokens that no policy of ours was recorded to sample are weighed by `corrections.shaped_weights`."""
    book: int = 0
    """Answers in the book."""
    book_foreign: int = 0
    """How many of those are from others."""
    mended: int = 0
    """Answers of others that were cut before the book kept them, in this round."""
    refused: int = 0
    """Answers of others that it did not keep, although our own judge gave them full marks."""
    pass_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Running share of own answers with full marks, by task, as far as it is known."""


class Rule(Protocol):
    """How to learn from a round of own and external groups. One thread calls at a time."""

    @property
    def keeps_own(self) -> bool:
        """Own groups are not displaced by external ones: `lessons` is given all of a round, those without a
        gradient among them."""
        ...

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        """What to train on. `version`: our policy's; the same calls give the same lessons. `foreign_share`:
        how much of what is replayed may be from others, of all that could be."""
        ...

    def needs(self) -> Mapping[str, float]:
        """How often, from 0 to 1, we fail on each task where full marks can be had. Empty: the rule does not
        count; a task that is not there is unknown."""
        ...

    def wanted_examples(self) -> Sequence[Example]:
        """Examples that somebody solved and that we should answer ourselves next, oldest first."""
        ...

    def state(self) -> bytes:
        """What a restart has to know, for a checkpoint."""
        ...

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> None:
        """Take up what `state` gave; nothing for no bytes or those of another rule. `tasks`: version by name;
        what belongs to others is forgotten. None: all is taken. Raises CheckpointError."""
        ...


def as_they_are(groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
    """Groups to be learned from with the advantages that their rewards give."""
    return tuple(GroupLesson(group) for group in groups)
