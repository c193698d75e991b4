"""The contribution of this machine, day by day, and the line that tells of the last seven.

node.py: NodeStatus of each policy -> [ContributionDays.see] -> WeekContribution -> status
power_meter.py -> a thread: hours and energy of today -> contribution.json in the node's home -> a line a week

A day is one of UTC. Hours and energy count while the node works: not while it starts, waits or rests.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from swarmnode.extensions.contribution.power_meter import PowerMeter
from swarmnode.machine.hardware import card_in_use
from swarmnode.machine.storage import read_kept, replace_file
from swarmnode.node.showing.at_work import WAITS
from swarmnode.node.showing.node_status import NodeStatus, WeekContribution

logger = logging.getLogger(__name__)

FILE = "contribution.json"
LOOK_EVERY_S = 15.0
WRITE_EVERY_LOOKS = 4
MOST_S = 60.0
"""Longest time between two looks that counts: the machine may have slept."""
DAY_S = 86400
WEEK = 7
MOST_DAYS = 400
MOST_BYTES = 2**20
IDLE = ("starting", *WAITS)
"""Beginnings of the phases that do not count."""
PATIENCE_S = 8.0
"""Longest wait at the end for a look that is under way."""

Amount = Annotated[float, Meta(ge=0, le=1e15)]


class Day(msgspec.Struct, forbid_unknown_fields=True):
    """One day's sums."""

    seconds: Amount = 0.0
    joules: Amount | None = None
    """None: the machine told of none."""
    given: Annotated[int, Meta(ge=0, le=2**53)] = 0
    learnt: Annotated[int, Meta(ge=0, le=2**53)] = 0


class SavedDays(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    told: int = 0
    """Day of the last line in the log."""
    days: dict[int, Day] = {}
    """By number, counted from the epoch."""


@dataclass(frozen=True, slots=True)
class PolicyCounts:
    """The counters of one policy, as they were seen last."""

    given: int
    learnt: int
    thanked_by: int
    works: bool


class ContributionDays:
    """Keeps days. `with ContributionDays(...) as days:` runs its thread; `see` may be called from any."""

    def __init__(
        self, path: Path, meter: Callable[[], PowerMeter], clock: Callable[[], float] = time.time
    ) -> None:
        """`meter` is called in the thread: it may take seconds."""
        self._path, self._make_meter, self._clock = path, meter, clock
        self._lock = threading.Lock()
        self._seen: dict[int, PolicyCounts] = {}
        self._failed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="contribution", daemon=True)

    def __enter__(self) -> Self:
        decode = msgspec.json.Decoder(SavedDays).decode
        self._saved = read_kept(self._path, "the days of this machine", decode, MOST_BYTES) or SavedDays()
        self._saved.told = self._saved.told or self._today()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)
        self._write()

    def see(self, status: NodeStatus) -> WeekContribution:
        """Takes note of a policy's counters, and returns what all of them gave and got in the last seven
        days."""
        now = PolicyCounts(
            status.exchange.published,
            sum(status.exchange.trained.values()),
            status.receipts.nodes_lately,
            not status.phase.name.startswith(IDLE),
        )
        with self._lock:
            before = self._seen.get(status.policy, now)
            self._seen[status.policy] = now
            day = self._day()
            day.given += max(0, now.given - before.given)
            day.learnt += max(0, now.learnt - before.learnt)
            return self._week()

    def look(self, meter: PowerMeter, passed_s: float) -> None:
        """Adds the time and the energy since the last look to today, and says once a week what the last seven
        days came to."""
        joules = meter.joules()
        with self._lock:
            if any(one.works for one in self._seen.values()):
                day = self._day()
                day.seconds += min(passed_s, MOST_S)
                if joules is not None:
                    day.joules = (day.joules or 0.0) + joules
            today, week = self._today(), self._week()
            due = not 0 <= today - self._saved.told < WEEK
            self._saved.told = today if due else self._saved.told
        if due and week.hours:
            logger.info("%s", week.in_words())

    def _run(self) -> None:
        meter, looks, looked_at = self._make_meter(), 0, time.monotonic()
        while True:
            is_last = self._ending.wait(LOOK_EVERY_S)
            now = time.monotonic()
            self.look(meter, now - looked_at)
            looked_at, looks = now, looks + 1
            if is_last:
                return
            if looks % WRITE_EVERY_LOOKS == 0:
                self._write()

    def _today(self) -> int:
        return int(self._clock() // DAY_S)

    def _day(self) -> Day:
        """Returns today, and lets go of the oldest days."""
        days = self._saved.days
        found = days.setdefault(self._today(), Day())
        while len(days) > MOST_DAYS:
            del days[min(days)]
        return found

    def _week(self) -> WeekContribution:
        today = self._today()
        days = [
            self._saved.days[day] for day in range(today - WEEK + 1, today + 1) if day in self._saved.days
        ]
        energy = [day.joules for day in days if day.joules is not None]
        return WeekContribution(
            hours=sum(day.seconds for day in days) / 3600,
            kwh=sum(energy) / 3.6e6 if energy else None,
            given=sum(day.given for day in days),
            learnt=sum(day.learnt for day in days),
            thanked_by=sum(one.thanked_by for one in self._seen.values()),
        )

    def _write(self) -> None:
        with self._lock:
            data = msgspec.json.encode(self._saved)
        try:
            replace_file(self._path, data)
        except OSError as error:
            if not self._failed:
                logger.warning("cannot save hours and energy of this machine: %s; the node continues", error)
            self._failed = True


def open_days(folder: Path, device: str) -> ContributionDays:
    """Returns the days of a node, to be entered. `folder`: for its file. `device`: policy.device."""
    return ContributionDays(folder / FILE, lambda: PowerMeter(card_in_use(device)))
