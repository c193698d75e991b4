"""Reports when a task teaches nothing: no answer is ever right, or all answers get the same reward.

groups of each round -> [after] -> [advice] -> node.py -> log, panel, Summary
requests for help, groups of others -> [after_help] -> [story] -> log

A group with equal rewards has no gradient (rollout_learner.py). If it gets only such groups for many rounds,
a node runs but learns nothing. Unless it says so, that looks like a defect of the node.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from swarmnode.types import MIN_REWARD_SPREAD, RolloutGroup

ROUNDS = 20
"""Rounds without a gradient before the node reports it."""

ASK_AFTER = 2
"""Rounds without a right answer before the node asks the swarm for help (exchange/gossip/helping.py)."""

WHAT_HELPS = (
    "a swarm that knows the task, demonstrations with full marks, a reward that pays for part of an answer,"
    " or easier examples first"
)
"""Advice for when no answer is right."""


@dataclass(frozen=True, slots=True)
class Drought:
    """The consecutive rounds in which one task gave no gradient, and their rewards."""

    rounds: int
    answers: int
    """Number of answers with a reward."""
    lowest: float
    highest: float
    """The highest of these rewards. Without any it is minus infinity, and `lowest` is infinity."""
    asked: int = 0
    """Number of these rounds that asked the swarm for help."""
    given: int = 0
    """Right answers of others to the task since help was first asked for."""
    alike: bool = True
    """True if all answers to each example were the same text."""


def after(droughts: Mapping[str, Drought], groups: Sequence[RolloutGroup]) -> dict[str, Drought]:
    """Returns the droughts by task after one more round. A task without a group in it stays as it was.

    >>> after({"rev": Drought(3, 96, 0.0, 0.0)}, [])
    {'rev': Drought(rounds=3, answers=96, lowest=0.0, highest=0.0, asked=0, given=0, alike=True)}
    """
    found = dict(droughts)
    for task in {group.example.key.task for group in groups}:
        of_task = [group for group in groups if group.example.key.task == task]
        rewards = [reward for group in of_task for reward in group.rewards if reward is not None]
        if any(group.has_gradient for group in of_task):
            found.pop(task, None)
        else:
            before = droughts.get(task, Drought(0, 0, inf, -inf))
            found[task] = replace(
                before,
                rounds=before.rounds + 1,
                answers=before.answers + len(rewards),
                lowest=min([before.lowest, *rewards]),
                highest=max([before.highest, *rewards]),
                alike=before.alike and all(map(_has_one_answer, of_task)),
            )
    return found


def _has_one_answer(group: RolloutGroup) -> bool:
    return len({one.token_ids for one in group.completions}) == 1 < len(group.completions)


def after_help(
    droughts: Mapping[str, Drought], asked: Collection[str], others: Sequence[RolloutGroup]
) -> dict[str, Drought]:
    """Returns the droughts after we `asked` for help with some tasks and groups of others arrived.

    >>> after_help({"rev": Drought(3, 96, 0.0, 0.0)}, {"rev"}, [])["rev"].asked
    1
    """
    right = Counter(
        group.example.key.task for group in others for reward in group.rewards if reward and reward > 0
    )
    return {
        task: replace(
            drought,
            asked=drought.asked + (task in asked),
            given=drought.given + (right[task] if drought.asked else 0),
        )
        for task, drought in droughts.items()
    }


def story(before: Mapping[str, Drought], now: Mapping[str, Drought]) -> list[str]:
    """Returns what the log says about help: when we first ask for it, when it first arrives, and when it has
    led to our own first right answer."""
    lines = list[str]()
    for task, known in before.items():
        drought = now.get(task)
        if drought is None and known.given:
            lines.append(
                f"help with {task} worked: our first right answers, after {known.rounds} rounds without"
                f" one and {known.given} right answers from others"
            )
        elif drought is not None and drought.asked > known.asked == 0:
            lines.append(
                f"asked the swarm for help with {task}: no answer was right in {known.rounds} rounds"
                f" ({known.answers:,} answers)"
            )
        elif drought is not None and drought.given > known.given == 0:
            lines.append(
                f"help came for {task}: {drought.given} right answers from others, used as their"
                f" authors are admitted (asked for in {drought.asked} rounds)"
            )
    return lines


def never_right(droughts: Mapping[str, Drought]) -> set[str]:
    """Returns the tasks without a right answer for ASK_AFTER rounds, with which to ask for help.

    >>> never_right({"rev": Drought(3, 96, 0.0, 0.0), "gcd": Drought(1, 32, 0.0, 0.0)})
    {'rev'}
    """
    return {
        task
        for task, drought in droughts.items()
        if drought.rounds >= ASK_AFTER and drought.answers and drought.highest <= 0
    }


def advice(droughts: Mapping[str, Drought]) -> dict[str, str]:
    """Returns advice to people, by task, on droughts that have lasted for ROUNDS. Without any reward, which
    cannot be bad luck, ASK_AFTER rounds are enough."""
    return {
        task: _said(task, drought)
        for task, drought in droughts.items()
        if drought.rounds >= (ROUNDS if drought.answers else ASK_AFTER)
    }


def _said(task: str, drought: Drought) -> str:
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
