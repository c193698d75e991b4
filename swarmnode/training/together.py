"""One round of learning for several policies on one base: their tokens share the micro-batches.

cohort.py (a RoundOfPolicy of each) -> [train_together] -> step.py -> reports, versions + 1

What they share is work. Each one's gradient is the one it would have alone (step.train_round), up to the
rounding of sums of another shape.
"""

from collections.abc import Sequence

from swarmnode.training.records import TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.step import OptimizerStep, known_before, take_step


def train_together(rounds: Sequence[RoundOfPolicy]) -> list[TrainReport]:
    """Train each policy on its samples and raise its version by one; reports in the order of `rounds`.

    All policies stand on one base and share its `Forward`. Who has fewer steps than another is done earlier.
    """
    with rounds[0].forward.alone():
        known = known_before(rounds)
        for number in range(max(len(one.steps) for one in rounds)):
            take_step([OptimizerStep(one, number) for one in rounds if number < len(one.steps)], known)
    return [one.finish() for one in rounds]
