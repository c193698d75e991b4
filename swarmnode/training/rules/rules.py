"""The rules that `exchange.rule` chooses from, by name.

config -> [sharing_rule] -> [make_rule] -> Rule.lessons -> Lessons -> round.py -> trainer
             |
             +-> [groups_wanted, own_to_learn_from] -> node, exchange: what to fetch, which own groups
                 are trained on beside it

- `sapo`: trains on external groups as if they were our own, in the places of own ones: SAPO, the control.
- `successes`: the same, but uses only those completions of external groups that beat their group.
- `book`: trains on own groups, and replays verified right answers, foreign and own, where we fail
  (book_rule.py).
- `own_book`: the same without anything from others, its control.

Or your own rule, by its import path (examples/rules/ has two); `Rule` is in lessons.py. The node imports this
module, so there is no torch here.
"""

import random
from collections.abc import Sequence

from swarmnode.errors import ConfigError
from swarmnode.registry import find
from swarmnode.settings.config import Config
from swarmnode.training.rules.book import Mend
from swarmnode.training.rules.lessons import GroupLesson, Lessons, Rule, SharingRule, as_they_are
from swarmnode.types import RolloutGroup


def rule_of(name: str) -> type[Rule]:
    """Returns the class that `exchange.rule` names: one of ours (registry.py), or your own.

    >>> rule_of("book") is rule_of("swarmnode.training.rules.book_rule:BookRule")
    True

    Raises ConfigError where there is none.
    """
    found = find("rule", name)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ConfigError(
            f"exchange.rule = {name!r} is not a subclass of Rule",
            hint=f"write class {name.partition(':')[2]}(Rule), from swarmnode.training.rules.lessons",
        )
    return found


def sharing_rule(config: Config) -> SharingRule:
    """Returns the rule that these settings amount to.

    Members of a pipeline train along the paths that sampled a group, and no path sampled a book, so they use
    foreign successes directly. Without an exchange, the book holds only our own finds, and the other rules
    are plain GRPO.

    >>> sharing_rule(Config()).name
    'book'
    """
    exchange, name = config.exchange, config.exchange.rule
    if config.pipeline.name:
        name = "sapo" if name == "sapo" else "successes"
    elif not exchange.enabled:
        name = "own_book" if name in ("book", "own_book") else "sapo"
    return SharingRule(name)


def keeps_own(config: Config) -> bool:
    """Returns True if all own groups of a round are trained on, however many came from others."""
    return rule_of(sharing_rule(config).name).keeps_own


def uses_library(config: Config) -> bool:
    """Returns True if we keep right answers for others, and ask others for theirs at a start."""
    wanted = config.exchange.enabled and config.exchange.library
    return wanted and rule_of(sharing_rule(config).name).keeps_answers


def groups_wanted(config: Config) -> int:
    """Returns J: how many foreign groups a round should have."""
    return config.exchange.external_groups if rule_of(sharing_rule(config).name).fetches else 0


def make_rule(settings: SharingRule, seed: int, mend: Mend | None = None) -> Rule:
    """Returns a new rule of that name. `mend`: applied to foreign answers before a book takes them. None:
    they are taken unchanged.

    >>> make_rule(SharingRule("sapo"), seed=0).keeps_own
    False
    """
    return rule_of(settings.name)(settings, seed, mend)


class Sapo(Rule):
    """Trains on external groups as on our own (SAPO, section 4). It has no memory."""

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        return Lessons(as_they_are(own), self._external(external), shaped=self._settings.shaped)

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return as_they_are(groups)


class Successes(Sapo):
    """Trains on external groups without their failures: pushing down text that we would hardly write moves
    probability to arbitrary text, and uses up the clip's budget."""

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return tuple(GroupLesson(group, gains_only=True) for group in groups)


def own_to_learn_from(
    groups: Sequence[RolloutGroup], external: int, config: Config, rng: random.Random
) -> Sequence[RolloutGroup]:
    """Chooses which of a round's own groups the rule gets, given the number of external ones.

    If the rule keeps own groups, it gets all of them, including those without a gradient, which it counts.
    Otherwise it gets I, and one more for each missing external group. Without an exchange, it gets as many as
    the round has.
    """
    if keeps_own(config):
        return groups
    exchange = config.exchange
    wanted = exchange.local_groups + exchange.external_groups
    room = max(0, wanted - external) if exchange.enabled else config.rollout.groups
    return choose_own(groups, room, rng)


def choose_own(groups: Sequence[RolloutGroup], room: int, rng: random.Random) -> list[RolloutGroup]:
    """Chooses at most `room` own groups, uniformly among those that have a gradient.

    SAPO's rule for external groups (section 5: drop zero advantage, then sample uniformly), applied to our
    own as well: a group without a gradient would only take the place of one that has one. Places that peers
    do not fill go to own groups, so a node alone trains on as much as one in a swarm.
    """
    useful = [group for group in groups if group.has_gradient]
    return useful if len(useful) <= room else rng.sample(useful, room)
