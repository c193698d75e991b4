"""Which rule a node learns from others by, and what the rule asks of node and exchange.

config -> [RULES, sharing_rule] -> rules.py -> trainer
                  |
                  +-> node, exchange: what to fetch, whether own groups make room

No torch here: the node reads this without it.
"""

from collections.abc import Mapping

from swarmnode.config import Config, import_named
from swarmnode.errors import ConfigError
from swarmnode.training.foreign.lessons import Rule, SharingRule

RULES: Mapping[str, str] = {
    "sapo": "swarmnode.training.foreign.rules:Sapo",
    "successes": "swarmnode.training.foreign.rules:Successes",
    "book": "swarmnode.training.foreign.book_rule:BookRule",
    "own_book": "swarmnode.training.foreign.book_rule:OwnBook",
    "rescue": "swarmnode.training.foreign.rescue:Rescue",
    "hacpo": "swarmnode.training.foreign.hacpo:Hacpo",
}
"""Our own rules by name, those of config.RULE_NAMES. Only the one in use is imported."""


def rule_of(name: str) -> type[Rule]:
    """The class that `exchange.rule` names: one of `RULES`, or `module:name` of a rule of one's own.

    >>> rule_of("book") is rule_of("swarmnode.training.foreign.book_rule:BookRule")
    True

    Raises ConfigError where there is none.
    """
    found = import_named("exchange.rule", RULES.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ConfigError(
            f"exchange.rule = {name!r} is no subclass of Rule",
            hint=f"write class {name.partition(':')[2]}(Rule), from swarmnode.training.foreign.lessons",
        )
    return found


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
    return rule_of(sharing_rule(config).name).keeps_own


def adapts(config: Config) -> bool:
    """Whether less is taken from others while it works against us."""
    return config.exchange.adapt and rule_of(sharing_rule(config).name).adapts


def groups_wanted(config: Config) -> int:
    """J: how many groups of others a round wants to have."""
    return config.exchange.external_groups if rule_of(sharing_rule(config).name).fetches else 0
