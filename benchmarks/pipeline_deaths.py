"""Who is killed or frozen while a pipeline learns, when, and when it comes back.

pipeline_churn.py -> [Reaper.turn, all the time] -> SIGKILL, SIGSTOP -> Swarm (pipeline_swarm.py)

Drawn from decks, so that chance decides the order only: every kind of member is hit equally often, a fixed
share of each kind is frozen. The moment is somewhere within an iteration.
"""

import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline_records import Run
from pipeline_swarm import Member, Swarm

Kind = Literal["data", "stage", "convener"]
KINDS: tuple[Kind, ...] = ("data", "stage", "convener")
How = Literal["killed", "frozen"]

CALM_AT_END = 2
"""Nobody is struck in the last iterations: what it costs would not be seen."""
FIRST_S = 1.0
"""Within which the first is struck, where no iteration has been timed yet."""


@dataclass(frozen=True, slots=True)
class Fates:
    """How rough it gets."""

    every: tuple[int, int]
    """Iterations from one strike to when the next one is due: from, to."""
    first: int
    """The iteration before which nobody is struck."""
    most: int
    deck: tuple[tuple[Kind, How], ...]
    """Dealt in a random order; again when it is used up."""
    most_away: int = 2
    """At once: some have to be in their places to be lost."""
    away_s: tuple[float, float] = (2.0, 6.0)
    """Until a killed member is started again."""
    frozen_s: tuple[float, float] = (5.0, 20.0)
    """Shorter and longer than the silence after which a member is taken for dead (12 s)."""


@dataclass(frozen=True, slots=True)
class _Return:
    at_s: float
    how: How
    member: Member


@dataclass(slots=True)
class Reaper:
    """Decides who dies when, and does it."""

    swarm: Swarm
    run: Run
    fates: Fates
    last: int
    """The run's last iteration."""
    seed: int
    _chance: random.Random = field(init=False)
    _due: int = field(init=False)
    _at_s: float | None = None
    _hand: list[tuple[Kind, How]] = field(default_factory=list[tuple[Kind, How]])
    _away: list[_Return] = field(default_factory=list[_Return])

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._due = self.fates.first

    def turn(self, iteration: int) -> None:
        """Called all the time, with the number of steps taken."""
        now_s = time.monotonic()
        for each in [each for each in self._away if each.at_s <= now_s]:
            self._away.remove(each)
            self._bring_back(each)
        over = len(self.run.struck_in) >= self.fates.most or iteration >= self.last - CALM_AT_END
        if over or iteration < self._due:
            return
        if self._at_s is None:
            recent_s = self.run.durations()[-10:] or [FIRST_S]
            self._at_s = now_s + self._chance.uniform(0, statistics.median(recent_s))
        if now_s >= self._at_s and self._strike(iteration):
            self._at_s = None
            # From when it was due: strikes that had to wait are made up for.
            self._due = max(self._due + self._chance.randint(*self.fates.every), iteration + 1)

    def _strike(self, iteration: int) -> bool:
        """One member is lost, the first in hand that there is, if most members are in their places."""
        statuses = {member: member.status() for member in self.swarm.living()}
        seated = {
            member: status
            for member, status in statuses.items()
            if status is not None and status["pipeline"]["stage"] is not None
        }
        missing = self.swarm.size - len(seated)
        if len(self._away) >= self.fates.most_away or missing > self.fates.most_away:
            return False
        if not self._hand:
            self._hand = self._chance.sample(self.fates.deck, len(self.fates.deck))
        for kind, how in self._hand:
            if able := of_kind(kind, seated):
                self._hand.remove((kind, how))
                self._end(self._chance.choice(able), kind, how, iteration, seated)
                return True
        return False

    def _end(
        self, member: Member, kind: Kind, how: How, iteration: int, seated: dict[Member, dict[str, Any]]
    ) -> None:
        stage = seated[member]["pipeline"]["stage"]
        replicas = sum(status["pipeline"]["stage"] == stage for status in seated.values())
        if how == "frozen":
            member.signal(signal.SIGSTOP)
            member.frozen = True
            back_s = self._chance.uniform(*self.fates.frozen_s)
        else:
            self.run.counts.update(counts(seated[member]))
            member.signal(signal.SIGKILL)
            member.process.wait()
            back_s = self._chance.uniform(*self.fates.away_s)
        self._away.append(_Return(time.monotonic() + back_s, how, member))
        what = f"{how}: {member.home.name} ({kind}), one of {replicas} of stage {stage}"
        print(f"  iteration {iteration + 1}: {what}, back in {back_s:.0f} s", flush=True)
        self.run.strikes.append(what)
        self.run.struck_in.append(iteration + 1)
        self.run.struck.update((kind, how))

    def _bring_back(self, back: _Return) -> None:
        """A killed one comes back under its own name as often as under a new one."""
        if back.how == "frozen":
            back.member.signal(signal.SIGCONT)
            back.member.frozen = False
        else:
            self.swarm.start(back.member.home if self._chance.random() < 0.5 else None)


def of_kind(kind: Kind, seated: dict[Member, dict[str, Any]]) -> list[Member]:
    """Who is of this kind. The convener may be a data node too."""
    if kind == "convener":
        return [min(seated, key=lambda member: seated[member]["peer_id"])] if seated else []
    return [
        member for member, status in seated.items() if (status["pipeline"]["stage"] == 0) == (kind == "data")
    ]


def counts(status: dict[str, Any]) -> Counter[str]:
    """What a member's status page says that it has done about the losses of others."""
    names = ("repaired", "given_up", "stragglers", "plans")
    return Counter({name: status["pipeline"].get(name) or 0 for name in names})
