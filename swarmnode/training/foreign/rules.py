"""What to learn from strangers, by name: the rules that `exchange.rule` chooses from.

own and external groups -> [Rule.lessons] -> Lessons -> samples.py -> trainer

- `sapo`: external groups as if they were our own, in the places of own ones: SAPO, the control.
- `successes`: the same, but of external groups only what is better than its group.
- `book`: own groups, and verified right answers replayed where we fail, foreign and own (book_rule.py).
- `own_book`: the same with nothing from others, its control.
- `rescue`: a stranger's right answer takes the place of a failure of ours on the same example (rescue.py).
- `hacpo`: external groups against a baseline that knows who is how capable (hacpo.py).
"""

from collections.abc import Mapping, Sequence

from swarmnode.config import RuleName
from swarmnode.training.foreign.book import Mend
from swarmnode.training.foreign.book_rule import BookRule
from swarmnode.training.foreign.hacpo import Hacpo
from swarmnode.training.foreign.lessons import GroupLesson, Lessons, Replay, Rule, as_they_are
from swarmnode.training.foreign.rescue import Rescue
from swarmnode.training.foreign.sharing import SharingRule, groups_wanted, keeps_own, sharing_rule
from swarmnode.types import Example, RolloutGroup

__all__ = [
    "GroupLesson",
    "Lessons",
    "Mend",
    "Replay",
    "Rule",
    "RuleName",
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
    match settings.name:
        case "sapo":
            return Sapo(settings)
        case "successes":
            return Successes(settings)
        case "book" | "own_book":
            return BookRule(settings, seed, mend)
        case "rescue":
            return Rescue(settings, mend)
        case "hacpo":
            return Hacpo(settings)


class Sapo:
    """External groups are trained on as our own are (SAPO, section 4). It remembers nothing."""

    keeps_own = False

    def __init__(self, settings: SharingRule = SharingRule("sapo")) -> None:  # noqa: B008 - frozen
        self._shaped = settings.shaped

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        return Lessons(as_they_are(own), self._external(external), shaped=self._shaped)

    def needs(self) -> Mapping[str, float]:
        return {}

    def wanted_examples(self) -> Sequence[Example]:
        return ()

    def state(self) -> bytes:
        return b""

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> None:
        pass

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return as_they_are(groups)


class Successes(Sapo):
    """The same without the failures of strangers: pushing down text that we would hardly write moves
    probability anywhere, and takes the clip's budget."""

    def _external(self, groups: Sequence[RolloutGroup]) -> tuple[GroupLesson, ...]:
        return tuple(GroupLesson(group, gains_only=True) for group in groups)
