"""Rules of this benchmark's own: one of the product's each, with one thing changed.

sapo_rules.py -> `exchange.rule` -> [BookUnmended, BookLight, ...] -> training
"""

from dataclasses import replace
from typing import Any, ClassVar

from swarmnode.training.rules.book import Mend
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import Rule, SharingRule
from swarmnode.training.rules.rules import Sapo


class BookUnmended(BookRule):
    """Keeps right answers of strangers as they are."""

    mends = False


class BookUnmeasured(BookRule):
    """Lets everybody fill the book whose answers our judge gives full marks."""

    measures_teachers = False


class BookOpen(BookUnmended, BookUnmeasured):
    """Takes what anybody sends that our judge calls right."""


class _Changed(Rule):
    changes: ClassVar[dict[str, Any]]

    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(replace(settings, **self.changes), seed, mend)


class BookLight(_Changed, BookRule):
    """Replays with an advantage of 1 in place of 4."""

    changes: ClassVar = {"book_weight": 1.0}


class BookHeavy(_Changed, BookRule):
    """Replays with an advantage of 8."""

    changes: ClassVar = {"book_weight": 8.0}


class BookOf64(_Changed, BookRule):
    """Replays half as many answers, in the steps of the own groups, whoever found them."""

    changes: ClassVar = {"book_replayed": 64}


class BookOfAnybody(_Changed, BookRule):
    """Replays as many answers, all of them others' if the lot says so."""

    changes: ClassVar = {"book_foreign": 128}


class ShapedBook(_Changed, BookRule):
    """Weighs replayed tokens by how likely they are to us, as LUFFY does."""

    changes: ClassVar = {"shaped": True}


class ShapedSapo(_Changed, Sapo):
    """Weighs tokens of others so."""

    changes: ClassVar = {"shaped": True}
