"""The swarm as one wide sampler: what several nodes answered to one example is one group.

own and external groups -> [WideGroups] around a rule -> Lessons with advantages over all -> round.py

Eight failures on a hard example teach nothing. If others have answered it, too (exchange/selection.py), and
one of them was right, they are worse than what there is, and a rare success of our own is better by far: a
group of hundreds sees pass rates that one of eight does not (BroRL, arXiv 2510.01180). So an answer is
compared with all answers to its example that we know of, whoever gave them. All rewards are of our own judge.

Meeting costs answers to examples that everybody fails on, and in the swarms that we tried it paid for that
at best, so `exchange.meet` is 0 by default: among equals nothing changed, specialists learned a little
slower. Of nodes that do meet, those that compare ended higher than those that only answer.

Only rewards are kept, so it does not matter who was first. What strangers can move is bounded: an author
counts once for an example, and no answer gets more credit or blame than the only right or wrong one of its
own group.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import sqrt

from swarmnode.training.foreign.lessons import GroupLesson, Lessons, Rule
from swarmnode.training.losses import Advantage, group_advantages, standardised
from swarmnode.types import Example, ExampleKey, RolloutGroup

MAX_EXAMPLES = 4096
"""Examples whose rewards are kept, the oldest out: some hundred rounds of the demonstration policy."""

MAX_AUTHORS = 16
"""The most authors of whom rewards are kept for one example."""


class WideGroups(Rule):
    """A rule whose groups are compared with all that is known of their examples."""

    def __init__(self, rule: Rule, advantage: Advantage) -> None:
        """`advantage`: that of the loss."""
        super().__init__()
        self.keeps_own = rule.keeps_own
        self.keeps_answers = rule.keeps_answers
        self._rule = rule
        self._advantage = advantage
        self._rewards: OrderedDict[ExampleKey, dict[str, tuple[float, ...]]] = OrderedDict()
        self.widened = 0
        """Groups so far that were compared with answers of others."""

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
        foreign_share: float = 1.0,
    ) -> Lessons:
        for group in (*own, *external):
            self._remember(group)
        self._rule.replayed, self._rule.replay_steps = self.replayed, self.replay_steps
        found = self._rule.lessons(own, external, version=version, foreign_share=foreign_share)
        return replace(
            found,
            own=tuple(self._wide(lesson) for lesson in found.own),
            external=tuple(self._wide(lesson) for lesson in found.external),
        )

    def needs(self) -> Mapping[str, float]:
        return self._rule.needs()

    def wanted_examples(self) -> Sequence[Example]:
        return self._rule.wanted_examples()

    def state(self) -> bytes:
        """The state of the rule alone: what others got on examples of the last rounds is forgotten."""
        return self._rule.state()

    def restore(self, data: bytes, tasks: Mapping[str, str] | None = None) -> int | None:
        return self._rule.restore(data, tasks)

    def origins(self) -> Mapping[tuple[str, ExampleKey], int]:
        return self._rule.origins()

    def forget_strangers(self, tasks: Collection[str]) -> None:
        self._rule.forget_strangers(tasks)

    def _remember(self, group: RolloutGroup) -> None:
        by_author = self._rewards.setdefault(group.example.key, {})
        if len(by_author) < MAX_AUTHORS:
            scored = tuple(reward for reward in group.rewards if reward is not None)
            by_author.setdefault(group.author, scored)
        if len(self._rewards) > MAX_EXAMPLES:
            self._rewards.popitem(last=False)

    def _wide(self, lesson: GroupLesson) -> GroupLesson:
        group = lesson.group
        by_author = self._rewards.get(group.example.key, {})
        others = [rewards for author, rewards in by_author.items() if author != group.author]
        if not others or lesson.advantages is not None:
            return lesson
        of_all = group_advantages([*group.rewards, *chain.from_iterable(others)], self._advantage)
        if of_all is None:
            return lesson
        self.widened += 1
        # Others are differences of rewards, which are bounded by the rewards.
        most = sqrt(len(group.rewards) - 1) if self._advantage is standardised else float("inf")
        credit = islice(of_all, len(group.rewards))
        bounded = tuple(None if one is None else min(max(one, -most), most) for one in credit)
        return replace(lesson, advantages=bounded)
