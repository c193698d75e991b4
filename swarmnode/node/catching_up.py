"""Decides when and how a new node catches up with its peers. Pure, so one line tests each case.

swarm_member.py, after every round: [CatchingUp.after_round] -> [CatchingUp.mix] -> Learner.catch_up

A node that is new, or returns after a long time, finds in other nodes' libraries what it would take hundreds
of rounds to find by itself (exchange/library/). This helps as fast as it is replayed: optimizer steps on it
bring the progress, and our own sampling is what costs. So while the reward of its own answers rises, a round
has few own groups and much of the book, in several steps. After that, rounds are usual ones again, and the
learning rate, which fell on the way, comes back slowly. A few own groups tell little, so rewards are compared
as means over WINDOW rounds. `benchmarks/newcomer.py` measures the gain.
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
"""Factor on the learning rate when catching up begins, times what an earlier start left of it. It falls with
every answer that is replayed: with any constant factor the reward rises later or ends lower."""

RATE_HALVED_AFTER = 3000
"""Replayed answers after which that factor has halved; after twice as many it is a third. Rounds are no
measure: those of a small book have few steps."""

LEAST_RATE = 0.1
"""The factor never falls below this."""

RATE_BACK = 1.005
"""Growth of the factor in every usual round, until it is 1: from LEAST_RATE that takes 460. When the whole
rate came back at once, held-out reward fell from 0.80 to 0.69 in twenty rounds and was at 0.75 after seventy;
this way it was at 0.82."""

KEPT = 0.7
"""Share of a round's change of the weights that is kept. Many large steps over the same answers go a little
too far: the goal of newcomer.py took a third more tokens with all of it."""

BORROWED_AT_ONCE = 12
"""Until catching up begins, a round takes this many times the groups from libraries that it wants from
others."""

BORROWED_FOR_MORE = 8
"""The factor on borrowed groups while the node catches up and its book holds less than ENOUGH_ANSWERS."""

ENOUGH_ANSWERS = 384
"""Right answers from libraries in the book, half of those that a round can replay. A newcomer whose book had
some 200, since few authors taught at first, took half as long again. 256 and 512 were no better and no worse
than runs differ."""

HURRIED_FOR = 8
"""Most rounds that borrow BORROWED_FOR_MORE times: libraries may be small, and liars wait for ever."""

BORROWED_BESIDE = 2
"""The factor on borrowed groups in later rounds, so that authors who still wait are measured by something
new. More judging, mending and measuring costs more than steps would gain."""

BORROWED_EVERY = 4
"""Of the later rounds of catching up, one in so many borrows; usual rounds all do."""

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
    replayed: int | None
    """Answers of the book to replay. None: as the settings say."""
    step_answers: int | None
    """Replayed answers in one optimizer step. None: as the settings say."""
    rate: float
    """Factor on the learning rate."""
    kept: float = 1.0
    """Share of the round's change of the weights that is kept."""


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
    replayed: int = 0
    """Answers of the book that the round replayed."""


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
    replayed: int = 0
    """Answers replayed in these rounds."""
    rate: float = 1.0
    """Factor on the learning rate of the next round."""
    finds: float = 0.0
    """Right answers that our own sampling found in a usual round when it began."""

    @property
    def rounds_worth(self) -> float | None:
        """Usual rounds in which our own sampling would have found as many answers. None: it found none."""
        return self.answers / self.finds if self.finds else None

    def after_round(self, seen: LibraryRound) -> "CatchingUp":
        """Returns the state of catching up after one more round.

        >>> CatchingUp().after_round(LibraryRound(answers=40, known=9, reward=0.1, finds=2.0)).phase
        'on'
        """
        now = replace(self, answers=max(self.answers, seen.answers))
        match self.phase:
            case "before" if seen.known >= KNOWN_SHARE * SharingRule().book_size:
                return replace(now, phase="over")
            case "before" if now.answers >= LEAST_ANSWERS:
                return replace(now, phase="on", finds=seen.finds, rate=RATE * self.rate)
            case "on":
                rewards = self.rewards if seen.reward is None else (*self.rewards, seen.reward)
                replayed = self.replayed + seen.replayed
                fall = (RATE_HALVED_AFTER + self.replayed) / (RATE_HALVED_AFTER + replayed)
                rate = max(LEAST_RATE, self.rate * fall)
                now = replace(now, rewards=rewards, rounds=self.rounds + 1, replayed=replayed, rate=rate)
                if now.rounds < MOST_ROUNDS and rises(rewards):
                    return now
                return replace(now, phase="over", rate=min(1.0, now.rate))
            case _:
                return now.after_usual_round()

    def after_usual_round(self) -> "CatchingUp":
        """Returns the state after a round that did not catch up: only the rate changes."""
        return replace(self, rate=min(1.0, RATE_BACK * self.rate))

    def mix(self, config: Config) -> RoundMix | None:
        """Returns the mix of the next round. None: as the settings say."""
        groups = config.rollout.groups
        if self.phase == "on":
            return RoundMix(max(1, groups // OWN_SHARE), STEPS * STEP_ANSWERS, STEP_ANSWERS, self.rate, KEPT)
        return None if self.rate == 1.0 else RoundMix(groups, None, None, self.rate)

    def groups_to_borrow(self, config: Config) -> int:
        """Returns the number of groups that a round takes from libraries."""
        wanted = groups_wanted(config)
        if self.phase == "before":
            return BORROWED_AT_ONCE * wanted
        if self.phase == "on":
            if self.answers < ENOUGH_ANSWERS and self.rounds < HURRIED_FOR:
                return BORROWED_FOR_MORE * wanted
            if self.rounds % BORROWED_EVERY:
                return 0
        return BORROWED_BESIDE * wanted


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
        replayed=report.replayed,
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
    rate = f"the learning rate is {now.rate:.0%} of what is set and grows by {RATE_BACK - 1:.1%} a round"
    return f"caught up in {now.rounds} rounds: {rewards}; {saved} ({source}); {rate}"
