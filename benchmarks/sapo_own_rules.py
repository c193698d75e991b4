"""Rules of this benchmark's own: one of the product's each, with one thing changed.

sapo_rules.py -> `exchange.rule` -> [BookInFull, ShapedBook, ShapedSapo] -> training
"""

from dataclasses import replace

from swarmnode.training.foreign.book import Mend
from swarmnode.training.foreign.book_rule import BookRule
from swarmnode.training.foreign.lessons import Rule, SharingRule
from swarmnode.training.foreign.rules import Sapo


class BookInFull(BookRule):
    """Takes as much of others as is set, whatever the gradients say."""

    adapts = False


class _Shaped(Rule):
    def __init__(self, settings: SharingRule, seed: int = 0, mend: Mend | None = None) -> None:
        super().__init__(replace(settings, shaped=True), seed, mend)


class ShapedBook(_Shaped, BookRule):
    """Weighs replayed tokens by how likely they are to us, as LUFFY does."""


class ShapedSapo(_Shaped, Sapo):
    """Weighs tokens of others so."""
