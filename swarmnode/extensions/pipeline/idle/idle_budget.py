"""Decides if a piece of idle work may begin now, and how large pieces should be. Pure: nothing here acts.

times of pieces, stage work, delays -> [idle_budget: StepForecast, DelayGuard, next_rows] -> idle_rollouts.py
"""

from collections import deque
from dataclasses import dataclass, replace
from math import ceil, exp, log2
from statistics import median

from swarmnode.errors import ConfigError

HANDOVER_S = 0.001
"""Time between the end of a piece and when the member's thread is ready for stage work."""
UNKNOWN_S = 0.25
"""Assumed duration of a piece of which nothing is known."""
UPPER_SHARE = 0.95
"""Share of recent pieces that took no longer than the forecast."""
RECENT_STEPS = 64
"""Latest pieces of one kind that its forecast is computed from."""
LEVELS_PER_OCTAVE = 2
SHORTER, LONGER = 0.75, 1.25
"""Factors of the rows when steps are too long, and when they are shorter than they may be."""


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """Limits of the delay that idle work may cause."""

    step_s: float
    """Wanted length of a step: a few per cent of a piece of stage work, or a few milliseconds."""
    most_rows: int = 64
    """Requests that run at once, at most."""
    delay_share: float = 0.02
    """Delay of stage work that may be caused, as a share of the stage work done."""
    window_s: float = 60.0
    """Seconds of stage work over which `delay_share` is taken: delay that was not used longer ago cannot be
    used now."""

    def __post_init__(self) -> None:
        if self.step_s <= 0 or self.most_rows < 1 or not 0 <= self.delay_share < 1 or self.window_s <= 0:
            raise ConfigError(f"idle work cannot be done as {self}", hint="times above 0, the share below 1")


@dataclass(frozen=True, slots=True)
class IdlePiece:
    """The two numbers that determine the duration of an engine step."""

    rows: int
    """Rows that the step advances."""
    starting: int
    """Rows that start with this step, so that their prompts are computed."""


BEGIN = IdlePiece(0, 0)
"""The piece without an engine step: it takes over a new policy, if there is one, and begins the next
round."""


class StepForecast:
    """Upper estimates of the next piece's duration, from the latest durations of its kind.

    >>> forecast = StepForecast()
    >>> for seconds in (0.004, 0.003, 0.005): forecast.observe(IdlePiece(8, 0), seconds)
    >>> [forecast.upper_s(IdlePiece(rows, 0)) for rows in (8, 4, 16)]
    [0.005, 0.005, 0.01]
    >>> forecast.upper_s(IdlePiece(8, 2)) == UNKNOWN_S
    True
    >>> for _ in range(20): forecast.observe(IdlePiece(8, 0), 0.001)
    >>> forecast.upper_s(IdlePiece(8, 0)), forecast.worst_s(IdlePiece(8, 0))
    (0.004, 0.005)
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._guesses: dict[tuple[int, bool], float] = {}

    def observe(self, piece: IdlePiece, seconds: float) -> None:
        self._seconds.setdefault(_kind(piece), deque(maxlen=RECENT_STEPS)).append(seconds)

    def upper_s(self, piece: IdlePiece) -> float:
        """Return a time that only a few of the latest pieces of this kind exceeded.

        If none was seen, use a kind with more rows; if there is none, scale the one with the most rows up in
        proportion. A step takes a + b * rows seconds, so neither estimate is too small.
        """
        rows, starts = kind = _kind(piece)
        if kind in self._seconds:
            return upper(self._seconds[kind])
        if kind in self._guesses:
            return self._guesses[kind]
        known = sorted(level for level, other in self._seconds if level and other == starts)
        more = next((level for level in known if level > rows), None)
        if not known or rows == 0:
            return UNKNOWN_S
        if more is not None:
            return upper(self._seconds[more, starts])
        return upper(self._seconds[known[-1], starts]) * 2 ** ((rows - known[-1]) / LEVELS_PER_OCTAVE)

    def usual_s(self, piece: IdlePiece) -> float:
        """Return the median of the latest pieces of this kind; `upper_s` if none was seen."""
        return median(self._seconds.get(_kind(piece), (self.upper_s(piece),)))

    def worst_s(self, piece: IdlePiece) -> float:
        """Return the slowest of the latest pieces of this kind; `upper_s` if none was seen."""
        return max(self._seconds.get(_kind(piece), (self.upper_s(piece),)))

    def doubt(self, piece: IdlePiece) -> None:
        """Forget the durations of a kind of piece that has not fitted for long, and guess half of the
        forecast.

        A piece that is never tried is never measured again, so one hiccup would keep it out for ever.
        """
        self._guesses[_kind(piece)] = self.upper_s(piece) / 2
        self._seconds.pop(_kind(piece), None)


def _kind(piece: IdlePiece) -> tuple[int, bool]:
    """Return (row level, two levels to a doubling; True if any row starts)."""
    return 1 + round(LEVELS_PER_OCTAVE * log2(piece.rows)) if piece.rows else 0, piece.starting > 0


def upper(seconds: deque[float]) -> float:
    """Return the time that `UPPER_SHARE` of these do not exceed.

    >>> upper(deque([3.0, 1.0, 2.0]))
    3.0
    """
    return sorted(seconds)[ceil(UPPER_SHARE * len(seconds)) - 1]


@dataclass(frozen=True, slots=True)
class DelayGuard:
    """The delay that idle work may still cause. Immutable: `worked` and `delayed` return a new guard.

    Both sums forget alike, by the stage work done since. So they never hold more than `window_s` of work, and
    whoever asks `allows` before each piece stays within `share`, lately and over all time, as long as pieces
    take no longer than they said: whatever the one sum forgets was within the share of the other.

    >>> guard = DelayGuard(share=0.02, window_s=60.0).worked(1.0)
    >>> guard.allows(0.015), guard.delayed(0.01).allows(0.015), guard.delayed(0.01).worked(0.5).allows(0.015)
    (True, False, True)
    """

    share: float
    window_s: float
    busy_s: float = 0.0
    """Seconds of stage work done, older work counting less."""
    delay_s: float = 0.0
    """Seconds that stage work waited for idle pieces, decaying at the same rate."""

    def allows(self, piece_s: float) -> bool:
        """Return True if a piece of this duration may begin even if stage work arrives at once."""
        return self.delay_s + piece_s <= self.share * self.busy_s

    def worked(self, busy_s: float) -> "DelayGuard":
        """Return the guard after `busy_s` more seconds of stage work."""
        kept = exp(-busy_s / self.window_s)
        return replace(self, busy_s=self.busy_s * kept + busy_s, delay_s=self.delay_s * kept)

    def delayed(self, delay_s: float) -> "DelayGuard":
        """Return the guard after stage work had to wait for `delay_s` seconds."""
        return replace(self, delay_s=self.delay_s + delay_s)


def fits(piece_s: float, left_s: float) -> bool:
    """Return True if a piece ends within the rest of a gap.

    >>> fits(0.004, 0.006), fits(0.004, 0.0045)
    (True, False)
    """
    return piece_s + HANDOVER_S <= left_s


def next_rows(rows: int, step_s: float, settings: IdleSettings) -> int:
    """Return the rows to run at once when steps of `rows` take `step_s`.

    >>> settings = IdleSettings(step_s=0.01, most_rows=20)
    >>> next_rows(16, 0.012, settings), next_rows(16, 0.009, settings), next_rows(16, 0.004, settings)
    (12, 16, 20)
    >>> next_rows(1, 0.012, settings), next_rows(20, 0.004, settings)
    (1, 20)
    """
    if step_s > settings.step_s:
        return max(1, int(rows * SHORTER))
    # One size up must still fit, or the two would take turns.
    longer = ceil(rows * LONGER)
    return min(longer, settings.most_rows) if step_s * longer <= settings.step_s * rows else rows
