"""Decides when and how a new node catches up with its peers. Pure, so one line tests each case.

swarm_member.py, after every round: [CatchingUp.after_round] -> [CatchingUp.mix] -> Learner.catch_up

A node that is new, or returns after a long time, finds in other nodes' libraries what it would take hundreds
of rounds to find by itself (exchange/library/). This helps as fast as it is replayed: optimizer steps on it
bring the progress, and our own sampling is what costs. So while the reward of its own answers rises, a round
has few own groups and much of the book, in several steps. After that, rounds are usual ones again. A few own
groups tell little, so rewards are compared as means over WINDOW rounds. `benchmarks/newcomer.py` measures the
gain.
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
"""Right answers from libraries at which catching up begins; fewer are learnt in the usual rounds."""

KNOWN_SHARE = 0.5
"""Share of a full book from which a node is not a newcomer, however much libraries add."""

OWN_SHARE = 8
"""The node samples one in this many of its usual groups."""

STEPS = 16
"""Most optimizer steps of a round; no answer of the book is in two of them."""

STEP_ANSWERS = 48
"""Answers of the book in each of these steps: fewer than a usual round replays, since more and smaller steps
learn more from the same answers. With 32 it took an eighth longer, since each step has its own cost."""

RATE = 1.25
"""Factor on the learning rate for the steps of the first round. It falls from round to round: with any
constant factor the reward rises later or ends lower."""

RATE_HALVED_AFTER = 4
"""Rounds after which that factor has halved; after twice as many it is a third."""

BORROWED_AT_ONCE = 12
"""Until catching up begins, a round takes this many times the groups from libraries that it wants from
others. With 5 the book is too small to learn from; with 8 it took a tenth longer in a lab, which a quiet
machine has not shown."""

BORROWED_IN_DOUBT = 8
"""The same factor while few authors teach: an author that a few answers have put in doubt needs new ones to
be measured by, and the book of a single author is soon known."""

ENOUGH_TEACH = 3
"""With this many teaching authors nothing is borrowed in doubt, however many wait. With eight lenders, three
of them liars, it took 5 and 10 % longer to borrow in doubt until most of them taught."""

DOUBTED_FOR = 8
"""Most rounds of catching up that borrow in doubt: liars wait for ever."""

BORROWED_BESIDE = 2
"""The same factor in the first round of catching up and in every fourth after it, so that authors who still
wait are measured by something new. More judging, mending and measuring costs more than steps would gain."""

BORROWED_EVERY = 4
"""Rounds of catching up from one that borrows to the next."""

WINDOW = 6
"""Number of rounds over which rewards are averaged."""

PATIENCE = 10
"""Catching up ends after this many rounds without a better average."""

MOST_ROUNDS = 100
"""Catching up ends after this many rounds, whatever the rewards are."""


@dataclass(frozen=True, slots=True)
class RoundMix:
    """The make-up of a round, used instead of the settings."""

    groups: int
    """Own groups to sample."""
    replayed: int
    """Answers of the book to replay."""
    step_answers: int
    """Replayed answers in one optimizer step."""
    rate: float
    """Factor on the learning rate."""


@dataclass(frozen=True, slots=True)
class LibraryRound:
    """What one round tells about catching up."""

    answers: int
    """Right answers from libraries in the book."""
    known: int
    """Other answers in the book."""
    reward: float | None
    """Mean reward of our own answers. None: unknown."""
    finds: float
    """Right answers that our own sampling finds in a usual round at our present pass rate."""
    few_teach: bool = False
    """True if more authors wait than teach, and fewer than ENOUGH_TEACH teach
    (training/rules/teachers.py)."""


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """The state of catching up: its phase, and the sums so far."""

    phase: Literal["before", "on", "over"] = "before"
    answers: int = 0
    """The most right answers from libraries that the book has held."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of our own answers, one per round since it began."""
    rounds: int = 0
    """Rounds of catching up so far."""
    finds: float = 0.0
    """Right answers that our own sampling found in a usual round when it began."""
    few_teach: bool = False
    """True if in the last round more authors waited than taught, and fewer than ENOUGH_TEACH taught."""

    @property
    def rounds_worth(self) -> float | None:
        """Usual rounds in which our own sampling would have found as many answers. None: it found none."""
        return self.answers / self.finds if self.finds else None

    def after_round(self, seen: LibraryRound) -> "CatchingUp":
        """Returns the state of catching up after one more round.

        >>> CatchingUp().after_round(LibraryRound(answers=40, known=9, reward=0.1, finds=2.0)).phase
        'on'
        """
        now = replace(self, answers=max(self.answers, seen.answers), few_teach=seen.few_teach)
        match self.phase:
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

    def mix(self, config: Config) -> RoundMix | None:
        """Returns the mix of the next round. None: as the settings say."""
        if self.phase != "on":
            return None
        groups = max(1, config.rollout.groups // OWN_SHARE)
        rate = RATE / (1 + self.rounds / RATE_HALVED_AFTER)
        return RoundMix(groups, STEPS * STEP_ANSWERS, STEP_ANSWERS, rate)

    def groups_to_borrow(self, config: Config) -> int:
        """Returns the number of groups that a round takes from libraries."""
        if self.phase == "before":
            return BORROWED_AT_ONCE * groups_wanted(config)
        if self.phase == "on" and self.few_teach and self.rounds < DOUBTED_FOR:
            return BORROWED_IN_DOUBT * groups_wanted(config)
        if self.phase == "on" and self.rounds % BORROWED_EVERY:
            return 0
        return BORROWED_BESIDE * groups_wanted(config)


def library_round(
    own: Sequence[RolloutGroup], answers: int, report: TrainReport, config: Config
) -> LibraryRound:
    """Returns the evidence of a round from its own groups and its report. `answers`: those in the book that
    come from libraries."""
    pass_rate = mean_or_none(report.pass_rates.values()) or 0.0
    return LibraryRound(
        answers=answers,
        known=report.book - answers,
        reward=mean_or_none(reward for group in own for reward in group.rewards),
        finds=config.rollout.groups * config.rollout.group_size * pass_rate,
        few_teach=report.teaching < min(report.waiting, ENOUGH_TEACH),
    )


def rises(rewards: tuple[float, ...]) -> bool:
    """Returns True while the best average over WINDOW rounds lies within the last PATIENCE rounds.

    >>> rises(tuple(0.01 * number for number in range(99))), rises((0.5,) * 99)
    (True, False)
    """
    means = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    return not means or len(means) - 1 - means.index(max(means)) < PATIENCE


def phase_change(before: CatchingUp, now: CatchingUp, lenders: int, authors: int) -> str:
    """Returns the log line for a change of phase, or "" if there is none."""
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
    saved = "we had found none of it ourselves"
    if now.rounds_worth is not None:
        saved = f"our own sampling would have needed {now.rounds_worth:.0f} rounds to find as much"
    return f"caught up in {now.rounds} rounds: {rewards}; {saved} ({source})"
