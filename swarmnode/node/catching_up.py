"""A node that knows less than its peers catches up: when, and how. Pure, so each case is a line of a test.

node.py, after every round: [after_round] -> CatchingUp -> [mix_of] -> Learner.catch_up -> the next round

Who begins, or comes back after long, finds in the libraries of others what it would take hundreds of rounds
to find by itself (exchange/library/). It helps as fast as it is replayed: optimizer steps on it are what
counts, and own sampling is what costs. So as long as the reward of its own answers rises a round has few own
groups and much of the book in it, in several steps. Then rounds are usual ones again. Few own groups tell
little, so rewards are compared as means over WINDOW rounds. `benchmarks/newcomer.py` has what it brings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from swarmnode.settings.config import Config
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.lessons import SharingRule
from swarmnode.training.rules.rules import groups_wanted
from swarmnode.types import RolloutGroup, mean_or_none

LEAST_ANSWERS = 32
"""Right answers of libraries with which it begins: fewer are learnt beside the usual rounds."""

KNOWN_SHARE = 0.5
"""Share of a full book from which a node is not a newcomer, whatever libraries have in addition."""

OWN_SHARE = 8
"""One group is sampled of so many."""

STEPS = 16
"""Optimizer steps of a round, at most: no answer of the book is in two of them."""

STEP_ANSWERS = 48
"""Answers of the book in each of these steps: fewer than a usual round replays, as more and smaller steps
learn more of as many answers. With 32 it took an eighth longer, since a step has costs of its own."""

RATE = 1.25
"""Share of the learning rate that the steps of the first round have. It falls from round to round: at one
share for all, whatever it is, the reward rises later or ends lower."""

RATE_HALVED_AFTER = 4
"""Rounds after which it is half as large; a third after twice as many."""

BORROWED_AT_ONCE = 12
"""So many times the groups that a round wants of others are taken out of libraries until it begins: with 5
the book is too small to learn from, and with 8 it took a tenth longer in a lab, which
a quiet machine has not shown."""

BORROWED_IN_DOUBT = 8
"""The same while few teach: who was doubted by a few answers needs new ones to be measured by, and the book
of one author is soon known."""

ENOUGH_TEACH = 3
"""Authors who teach with whom nothing is borrowed in doubt, however many wait: of eight lenders, three of
them liars, it took 5 and 10 % longer to go on until most taught."""

DOUBTED_FOR = 8
"""Rounds of catching up over which that goes on, at most: liars wait for ever."""

BORROWED_BESIDE = 2
"""The same in the first round of it, so that authors who still wait are measured by something new, and in
every fourth from then on: judging, mending and measuring more costs what steps would learn more by."""

BORROWED_EVERY = 4
"""Rounds of catching up from one that borrows to the next."""

WINDOW = 6
"""Rounds over which rewards are averaged."""

PATIENCE = 10
"""So many rounds without a better average, and it is over."""

MOST_ROUNDS = 100
"""It ends here, whatever the rewards do."""


@dataclass(frozen=True, slots=True)
class RoundMix:
    """The make-up of a round, in place of the settings."""

    groups: int
    """Own groups that are sampled."""
    replayed: int
    """Answers of the book that are replayed."""
    step_answers: int
    """Replayed answers of an optimizer step."""
    rate: float
    """Share of the learning rate that is taken."""


@dataclass(frozen=True, slots=True)
class LibraryRound:
    """One round's evidence on catching up."""

    answers: int
    """Right answers of libraries that the book has."""
    known: int
    """Answers that it has besides these."""
    reward: float | None
    """Mean reward of our own answers. None: unknown."""
    finds: float
    """Right answers that our own sampling finds in a usual round, at our present pass rate."""
    few_teach: bool = False
    """More authors wait than teach, and fewer than ENOUGH_TEACH do (training/rules/teachers.py)."""


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """The state of catching up: its phase, and the sums so far."""

    phase: Literal["before", "on", "over"] = "before"
    answers: int = 0
    """Right answers of libraries that the book had, at most."""
    rewards: tuple[float, ...] = ()
    """Of our own answers, round by round since it began."""
    rounds: int = 0
    """Rounds of catching up."""
    finds: float = 0.0
    """Right answers that our own sampling found in a usual round when it began."""
    few_teach: bool = False
    """After the last round more authors waited than taught, and fewer than ENOUGH_TEACH taught."""

    @property
    def rounds_worth(self) -> float | None:
        """Usual rounds in which our own sampling would have found as many. None: it found none."""
        return self.answers / self.finds if self.finds else None


def round_of(own: Sequence[RolloutGroup], answers: int, report: TrainReport, config: Config) -> LibraryRound:
    """Return what a round says: its own groups, and what the book holds after it, `answers` of that of
    libraries."""
    pass_rate = mean_or_none(report.pass_rates.values()) or 0.0
    return LibraryRound(
        answers=answers,
        known=report.book - answers,
        reward=mean_or_none(reward for group in own for reward in group.rewards),
        finds=config.rollout.groups * config.rollout.group_size * pass_rate,
        few_teach=report.teaching < min(report.waiting, ENOUGH_TEACH),
    )


def after_round(before: CatchingUp, seen: LibraryRound) -> CatchingUp:
    """Return where it stands after one more round.

    >>> after_round(CatchingUp(), LibraryRound(answers=40, known=9, reward=0.1, finds=2.0)).phase
    'on'
    """
    now = replace(before, answers=max(before.answers, seen.answers), few_teach=seen.few_teach)
    match before.phase:
        case "before" if seen.known >= KNOWN_SHARE * SharingRule().book_size:
            return replace(now, phase="over")
        case "before" if now.answers >= LEAST_ANSWERS:
            return replace(now, phase="on", finds=seen.finds)
        case "on":
            rewards = now.rewards if seen.reward is None else (*now.rewards, seen.reward)
            now = replace(now, rewards=rewards, rounds=now.rounds + 1)
            return now if now.rounds < MOST_ROUNDS and rises(rewards) else replace(now, phase="over")
        case _:
            return now


def rises(rewards: tuple[float, ...]) -> bool:
    """Return True while the average over WINDOW rounds had its best within the last PATIENCE rounds.

    >>> rises(tuple(0.01 * number for number in range(99))), rises((0.5,) * 99)
    (True, False)
    """
    means = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    return not means or len(means) - 1 - means.index(max(means)) < PATIENCE


def mix_of(state: CatchingUp, config: Config) -> RoundMix | None:
    """Return what the next round is made of; None: what is set."""
    if state.phase != "on":
        return None
    groups = max(1, config.rollout.groups // OWN_SHARE)
    rate = RATE / (1 + state.rounds / RATE_HALVED_AFTER)
    return RoundMix(groups, STEPS * STEP_ANSWERS, STEP_ANSWERS, rate)


def groups_to_borrow(state: CatchingUp, config: Config) -> int:
    """Return how many groups of libraries a round takes."""
    if state.phase == "before":
        return BORROWED_AT_ONCE * groups_wanted(config)
    if state.phase == "on" and state.few_teach and state.rounds < DOUBTED_FOR:
        return BORROWED_IN_DOUBT * groups_wanted(config)
    if state.phase == "on" and state.rounds % BORROWED_EVERY:
        return 0
    return BORROWED_BESIDE * groups_wanted(config)


def told(before: CatchingUp, now: CatchingUp, lenders: int, authors: int) -> str:
    """Return what the log says of a change; empty where there is none."""
    if before.phase == now.phase or (before.phase, now.phase) == ("before", "over"):
        return ""
    where = f"the libraries of {lenders} peers" if lenders else "the library of this home"
    source = f"{now.answers} right answers of {authors} authors, from {where}"
    if now.phase == "on":
        return (
            f"catching up with {source}: rounds replay more of the book and sample fewer groups"
            " while our reward rises"
        )
    first, last = fmean(now.rewards[:WINDOW]), fmean(now.rewards[-WINDOW:])
    rewards = f"reward was {first:.2f}, is now {last:.2f}"
    return f"caught up in {now.rounds} rounds: {rewards}; {worth(now)} ({source})"


def worth(now: CatchingUp) -> str:
    """Return what the answers of libraries are worth in rounds, in words."""
    rounds = now.rounds_worth
    if rounds is None:
        return "we had found none of it ourselves"
    return f"our own sampling would have needed {rounds:.0f} rounds to find as much"
