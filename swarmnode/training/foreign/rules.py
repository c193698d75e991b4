"""What to learn from strangers, by name: the rules that `exchange.rule` chooses from.

own and external groups -> [Rule.lessons] -> Lessons -> samples.py -> trainer

- `sapo`: external groups as if they were our own, in the places of own ones: SAPO, the control.
- `successes`: the same, but of external groups only what is better than its group.
- `book`: own groups, and verified right answers replayed where we fail, foreign and own (book_rule.py).
- `own_book`: the same with nothing from others, its control.
- `rescue`: a stranger's right answer takes the place of a failure of ours on the same example (rescue.py).
- `hacpo`: external groups against a baseline that knows who is how capable (hacpo.py).

Or one of one's own, by its import path. sharing.py finds the class by the name.
"""

from collections.abc import Sequence

from swarmnode.training.foreign.book import Mend
from swarmnode.training.foreign.lessons import GroupLesson, Lessons, Rule, SharingRule, as_they_are
from swarmnode.training.foreign.sharing import groups_wanted, keeps_own, rule_of, sharing_rule
from swarmnode.types import RolloutGroup

__all__ = [
    "GroupLesson",
    "Lessons",
    "Mend",
    "Rule",
    "SharingRule",
    "groups_wanted",
    "keeps_own",
    "make_rule",
    "sharing_rule",
]


def make_rule(settings: SharingRule, seed: int, mend: Mend | None = None) -> Rule:
    """The rule of that name, knowing nothing yet. `mend`: what single foreign answers go through before a
    book or a rescue takes them; None: they are taken as they are.

    >>> make_rule(SharingRule("sapo"), seed=0).keeps_own
    False
    """
    return rule_of(settings.name)(settings, seed, mend)


class Sapo(Rule):
    """External groups are trained on as our own are (SAPO, section 4). It remembers nothing."""

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        return Lessons(as_they_are(own), self._external(external), shaped=self._settings.shaped)

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return as_they_are(groups)


class Successes(Sapo):
    """The same without the failures of strangers: pushing down text that we would hardly write moves
    probability anywhere, and takes the clip's budget."""

    adapts = True

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return tuple(GroupLesson(group, gains_only=True) for group in groups)
