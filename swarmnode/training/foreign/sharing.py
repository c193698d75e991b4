"""Which rule a node learns from others by, and what the rule asks of node and exchange.

config -> [SharingRule] -> rules.py -> trainer;   node, exchange: what to fetch, whether own groups make room

No torch here: the node reads this without it.
"""

from dataclasses import dataclass

from swarmnode.config import Config, RuleName

KEEP_OWN: frozenset[RuleName] = frozenset({"book", "own_book", "rescue"})
"""The rules under which all own groups are trained on. Under the others, external ones take their places."""


ADAPT: frozenset[RuleName] = frozenset({"book", "successes", "rescue"})
"""The rules under which others' answers are taken by whether they go our way (sharing_gauge.py). Under those
that learn from others' failures too it is only shown: to push down what we would hardly write disagrees with
our own gradient even where the whole helps (`sapo`, four specialists: -0.06 +- 0.01, and 30 % more reward
than alone)."""


@dataclass(frozen=True, slots=True)
class SharingRule:
    """The rule by name, and its settings. Defaults are the recipe that was measured."""

    name: RuleName = "book"
    book_size: int = 2000
    """Answers that the book holds."""
    book_replayed: int = 64
    """M: answers of the book that a round trains on, besides its groups."""
    book_weight: float = 4.0
    """Lambda: the advantage of a replayed answer. One right answer of a group of 8 has 2.6."""
    shaped: bool = False
    """Weigh tokens that strangers wrote, and replayed ones, as LUFFY does (corrections.py)."""
    teach_ends: bool = True
    """Teach our end of text behind a stranger's answer that our own judge gave full marks (book_rule.py).
    False: only ends that our own policies sampled."""
    answers_per_example: int = 4
    """Distinct answers of one example in the book."""


def sharing_rule(config: Config) -> SharingRule:
    """The rule that these settings come to.

    Members of a pipeline train along the paths that sampled a group, and nobody sampled a book: they take
    foreign successes as they come. Without an exchange the book holds what we found ourselves, and the other
    rules are plain GRPO.

    >>> sharing_rule(Config()).name
    'book'
    """
    exchange, name = config.exchange, config.exchange.rule
    if config.pipeline.name:
        name = "sapo" if name == "sapo" else "successes"
    elif not exchange.enabled:
        name = "own_book" if name in ("book", "own_book") else "sapo"
    return SharingRule(
        name,
        book_size=exchange.book_size,
        book_replayed=exchange.book_replayed,
        book_weight=exchange.book_weight,
        shaped=exchange.shaped,
    )


def keeps_own(config: Config) -> bool:
    """Whether all own groups of a round are trained on, however many came from others."""
    return sharing_rule(config).name in KEEP_OWN


def adapts(config: Config) -> bool:
    """Whether less is taken from others while it works against us."""
    return config.exchange.adapt and sharing_rule(config).name in ADAPT


def groups_wanted(config: Config) -> int:
    """J: how many groups of others a round wants to have."""
    return 0 if sharing_rule(config).name == "own_book" else config.exchange.external_groups
