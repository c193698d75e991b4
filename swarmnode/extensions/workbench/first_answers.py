"""The first answers of a policy to a task, before it trains on it, and what follows from them.

`swarmnode task check --samples K` -> tryout.py -> [first_answers] -> FirstAnswers.follows
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from swarmnode.extensions.workbench.tryout import TriedExample
from swarmnode.node.drought import WHAT_HELPS
from swarmnode.training.evaluation import pass_at_k, powers_of_two

OFTEN = 0.9
"""The share of right answers from which there is little left to learn."""


@dataclass(frozen=True, slots=True)
class FirstAnswers:
    """Answers of a policy to a task, right where they have the best reward that any of them could have."""

    answers: int
    """Answers that were judged."""
    paid: float
    """Share of them with a reward above 0."""
    learnable: float
    """Share of examples whose answers have different rewards: only those teach."""
    pass_at: dict[int, float]
    """By k: the chance that one of k answers to an example has a reward above 0."""
    demonstrated: int = 0
    """Demonstrations of the task with full marks."""

    @property
    def begins(self) -> bool:
        """True if there is something to learn from without a swarm."""
        return self.paid > 0 or self.learnable > 0 or self.demonstrated > 0

    @property
    def follows(self) -> str:
        """A person's outlook on training, in a sentence.

        >>> FirstAnswers(256, 0.0, 0.0, {1: 0.0}).follows.partition(":")[0]
        'no answer is right yet, and there is nothing to learn from'
        """
        if self.learnable > 0:
            return f"{self.learnable:.0%} of the examples teach something from the first round on"
        if self.paid == 0 and self.demonstrated:
            return "no answer is right yet: the demonstrations are learnt from first"
        if self.paid == 0:
            return f"no answer is right yet, and there is nothing to learn from: what helps is {WHAT_HELPS}"
        if self.paid > OFTEN:
            return "nearly every answer is right already: harder examples would teach more"
        return "answers to one example always get equal rewards: a reward that tells them apart would teach"


def first_answers(tried: Iterable[TriedExample], demonstrated: int = 0) -> FirstAnswers:
    """Returns the figures of the answers to some examples of a task with so many right demonstrations."""
    rewards = [[one.reward for one in example.answers if one.reward is not None] for example in tried]
    rewards = [row for row in rewards if row]
    counts = [(len(row), sum(reward > 0 for reward in row)) for row in rewards]
    judged = sum(number for number, _ in counts)
    ks = powers_of_two(min((number for number, _ in counts), default=0))
    return FirstAnswers(
        answers=judged,
        paid=sum(right for _, right in counts) / judged if judged else 0.0,
        learnable=fmean(max(row) > min(row) for row in rewards) if rewards else 0.0,
        pass_at={k: fmean(pass_at_k(number, right, k) for number, right in counts) for k in ks},
        demonstrated=demonstrated,
    )
