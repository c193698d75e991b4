"""Reports when a task teaches nothing: no answer is ever right, or all answers get the same reward.

node.py, groups of each round -> [Droughts.advise] -> log, panel, Summary
swarm_member.py, requests for help, groups of others -> [Droughts.add_help] -> log

A group with equal rewards has no gradient (rollout_learner.py). If it gets only such groups for many rounds,
a node runs but learns nothing. Unless it says so, that looks like a defect of the node.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from swarmnode.training.records import TrainReport
from swarmnode.types import MIN_REWARD_SPREAD, RolloutGroup

logger = logging.getLogger(__name__)

ROUNDS = 20
"""Rounds without a gradient before the node reports it."""

ASK_AFTER = 2
"""Rounds without a right answer before the node asks the swarm for help (exchange/gossip/helping.py)."""

WHAT_HELPS = (
    "a swarm that knows the task, demonstrations with full marks, a reward that pays for part of an answer,"
    " or easier examples first"
)
"""Advice for when no answer is right."""


@dataclass(slots=True)
class Drought:
    """The consecutive rounds in which one task gave no gradient, and their rewards."""

    rounds: int = 0
    answers: int = 0
    """Number of answers with a reward."""
    lowest: float = inf
    """The lowest of these rewards."""
    highest: float = -inf
    asked: int = 0
    """Number of these rounds that asked the swarm for help."""
    given: int = 0
    """Right answers of others to the task since help was first asked for."""
    alike: bool = True
    """True if all answers to each example were the same text."""


class Droughts:
    """The droughts of a run, by task. The log says once of each task that there is advice, when we first ask
    for help, when help first arrives, and when it has led to our own first right answer."""

    def __init__(self) -> None:
        self.by_task: dict[str, Drought] = {}
        self._advised: set[str] = set()

    def never_right(self) -> set[str]:
        """Returns the tasks without a right answer for ASK_AFTER rounds, with which to ask for help."""
        return {
            task
            for task, drought in self.by_task.items()
            if drought.rounds >= ASK_AFTER and drought.answers and drought.highest <= 0
        }

    def add_help(self, asked: Collection[str], others: Sequence[RolloutGroup]) -> None:
        """Take in the tasks that we `asked` for help with in a round, and the groups of others in it."""
        right = Counter(
            group.example.key.task for group in others for reward in group.rewards if reward and reward > 0
        )
        for task, drought in self.by_task.items():
            if drought.asked and not drought.given and right[task]:
                logger.info(
                    "help came for %s: %d right answers from others, used as their authors are admitted"
                    " (asked for in %d rounds)",
                    *(task, right[task], drought.asked + (task in asked)),
                )
            if task in asked and not drought.asked:
                logger.info(
                    "asked the swarm for help with %s: no answer was right in %d rounds (%s answers)",
                    *(task, drought.rounds, f"{drought.answers:,}"),
                )
            drought.given += right[task] if drought.asked else 0
            drought.asked += task in asked

    def advise(self, groups: Sequence[RolloutGroup], report: TrainReport) -> str:
        """Take in a round's own groups, and return advice for as long as there is nothing to learn from."""
        self.add_round(groups)
        now = self.advice_by_task()
        if report.own_groups and not report.optimizer_steps:
            now["the gradient"] = "the gradient is not finite, so nothing is learnt: check training.loss"
        # Logged once per task, since a task that is almost mastered comes and goes. The panel shows it
        # throughout.
        for task in now.keys() - self._advised:
            logger.warning("%s", now[task])
        self._advised |= now.keys()
        return "; ".join(now.values())

    def add_round(self, groups: Sequence[RolloutGroup]) -> None:
        """Take in a round's own groups. A task without a group in it stays as it was."""
        for task in {group.example.key.task for group in groups}:
            of_task = [group for group in groups if group.example.key.task == task]
            drought = self.by_task.setdefault(task, Drought())
            if any(group.has_gradient for group in of_task):
                del self.by_task[task]
                if drought.given:
                    logger.info(
                        "help with %s worked: our first right answers, after %d rounds without one and %d"
                        " right answers from others",
                        *(task, drought.rounds, drought.given),
                    )
                continue
            rewards = [reward for group in of_task for reward in group.rewards if reward is not None]
            drought.rounds += 1
            drought.answers += len(rewards)
            drought.lowest = min([drought.lowest, *rewards])
            drought.highest = max([drought.highest, *rewards])
            drought.alike &= all(map(_has_one_answer, of_task))

    def advice_by_task(self) -> dict[str, str]:
        """Returns advice to people, by task, on droughts that have lasted for ROUNDS. Without any reward,
        which cannot be bad luck, ASK_AFTER rounds are enough."""
        return {
            task: advice_on(task, drought)
            for task, drought in self.by_task.items()
            if drought.rounds >= (ROUNDS if drought.answers else ASK_AFTER)
        }


def _has_one_answer(group: RolloutGroup) -> bool:
    return len({one.token_ids for one in group.completions}) == 1 < len(group.completions)


def advice_on(task: str, drought: Drought) -> str:
    """Returns advice to people on a drought that has lasted."""
    if not drought.answers:
        return (
            f"no answer to {task} had a reward in {drought.rounds} rounds, so there is nothing to learn from"
            " (None is not a reward); `swarmnode task check` shows how the task scores"
        )
    time = f"in {drought.rounds} rounds ({drought.answers:,} answers)"
    vary = ", or a higher temperature or another engine: all answers to an example were the same"
    differ = vary if drought.alike else ""
    if drought.highest <= 0 and drought.given:
        return f"none of our answers to {task} was right {time}; learning from {drought.given} by others"
    if drought.highest <= 0:
        asked = f"; help was asked for in {drought.asked} of them, and none came"
        return (
            f"no answer to {task} was right {time}: nothing to learn from yet"
            f"{asked if drought.asked else ''}. what helps: {WHAT_HELPS}{differ}"
        )
    if drought.highest - drought.lowest < MIN_REWARD_SPREAD:
        return (
            f"all answers to {task} had the reward {drought.highest:.2f} {time}: nothing to learn"
            f" from. what helps: harder examples, or a reward that distinguishes good from better{differ}"
        )
    return (
        f"answers to the same example of {task} always had equal rewards {time}: nothing to learn"
        f" from. what helps: a reward that tells them apart, or a higher rollout.temperature{differ}"
    )
