"""Whether a piece of idle work may begin now, and how large pieces should be. Nothing here acts or asks.

times of pieces, stage work, delays -> [idle_budget: StepForecast, Guard, next_rows] -> idle.py
"""

from collections import deque
from dataclasses import dataclass, replace
from math import ceil, exp, log2
from statistics import median

from swarmnode.errors import ConfigError

HANDOVER_S = 0.001
"""Time between the end of a piece and when the member's thread is ready for stage work."""
UNKNOWN_S = 0.25
"""What a piece is taken to last of which nothing is known."""
UPPER_SHARE = 0.95
"""Share of recent pieces that took no longer than the forecast."""
RECENT_STEPS = 64
"""How many pieces of one kind decide its forecast: the latest."""
LEVELS_PER_OCTAVE = 2
SHORTER, LONGER = 0.75, 1.25
"""Factors of the rows when steps are too long, and when they are shorter than they may be."""


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """How careful we are."""

    step_s: float
    """Wanted length of a step: a few per cent of a piece of stage work, or a few milliseconds."""
    most_rows: int = 64
    """Requests that run at once, at most."""
    delay_share: float = 0.02
    """Delay that may be caused, as a share of the stage work done."""
    window_s: float = 60.0
    """Stage work that the share is of: what was not delayed long before cannot be delayed now."""

    def __post_init__(self) -> None:
        if self.step_s <= 0 or self.most_rows < 1 or not 0 <= self.delay_share < 1 or self.window_s <= 0:
            raise ConfigError(f"idle work cannot be done as {self}", hint="times above 0, the share below 1")


@dataclass(frozen=True, slots=True)
class Piece:
    """What decides how long a piece takes."""

    rows: int
    """Rows that the step advances."""
    starting: int
    """How many of the rows start with it: their prompts are computed."""


BEGIN = Piece(0, 0)
"""No step: a new policy is taken over, if there is one, and the next round begins."""


class StepForecast:
    """What pieces took lately, by their kind; upper estimates for the next one.

    >>> forecast = StepForecast()
    >>> for seconds in (0.004, 0.003, 0.005): forecast.observe(Piece(8, 0), seconds)
    >>> forecast.upper_s(Piece(8, 0)), forecast.upper_s(Piece(4, 0)), forecast.upper_s(Piece(16, 0))
    (0.005, 0.005, 0.01)
    >>> forecast.upper_s(Piece(8, 2)) == UNKNOWN_S
    True
    >>> for _ in range(20): forecast.observe(Piece(8, 0), 0.001)
    >>> forecast.upper_s(Piece(8, 0)), forecast.worst_s(Piece(8, 0))
    (0.004, 0.005)
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._guesses: dict[tuple[int, bool], float] = {}

    def observe(self, piece: Piece, seconds: float) -> None:
        self._seconds.setdefault(_kind(piece), deque(maxlen=RECENT_STEPS)).append(seconds)

    def upper_s(self, piece: Piece) -> float:
        """What no more than a few of such pieces exceeded.

        Where none was seen: that of one with more rows, or of one with fewer times as many as it has more (a
        step takes a + b * rows seconds, so that is no less).
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

    def usual_s(self, piece: Piece) -> float:
        """The median lately; where none was seen, `upper_s`."""
        return median(self._seconds.get(_kind(piece), (self.upper_s(piece),)))

    def worst_s(self, piece: Piece) -> float:
        """The slowest one lately; where none was seen, `upper_s`."""
        return max(self._seconds.get(_kind(piece), (self.upper_s(piece),)))

    def doubt(self, piece: Piece) -> None:
        """Such pieces have not fitted for long: forget what they took, and guess half of it.

        What is never tried is never measured again; a hiccup would keep us out for ever.
        """
        self._guesses[_kind(piece)] = self.upper_s(piece) / 2
        self._seconds.pop(_kind(piece), None)


def _kind(piece: Piece) -> tuple[int, bool]:
    """Rows, two levels to a doubling, and whether any of them start."""
    return 1 + round(LEVELS_PER_OCTAVE * log2(piece.rows)) if piece.rows else 0, piece.starting > 0


def upper(seconds: deque[float]) -> float:
    """The time that `UPPER_SHARE` of these do not exceed.

    >>> upper(deque([3.0, 1.0, 2.0]))
    3.0
    """
    return sorted(seconds)[ceil(UPPER_SHARE * len(seconds)) - 1]


@dataclass(frozen=True, slots=True)
class Guard:
    """How much delay may still be caused. A value: what happens gives another one.

    Both sums forget alike, by the stage work done since. So they never hold more than `window_s` of work, and
    whoever asks `allows` before each piece stays within `share`, lately and over all time, as long as pieces
    take no longer than they said: whatever the one sum forgets was within the share of the other.

    >>> guard = Guard(share=0.02, window_s=60.0).worked(1.0)
    >>> guard.allows(0.015), guard.delayed(0.01).allows(0.015), guard.delayed(0.01).worked(0.5).allows(0.015)
    (True, False, True)
    """

    share: float
    window_s: float
    busy_s: float = 0.0
    """Seconds of stage work done, the older the less it counts."""
    delay_s: float = 0.0
    """Seconds that stage work waited for pieces of idle work, forgotten alike."""

    def allows(self, piece_s: float) -> bool:
        """Whether a piece that takes so long may begin, even if stage work comes at once."""
        return self.delay_s + piece_s <= self.share * self.busy_s

    def worked(self, busy_s: float) -> "Guard":
        """The guard once so much more stage work is done."""
        kept = exp(-busy_s / self.window_s)
        return replace(self, busy_s=self.busy_s * kept + busy_s, delay_s=self.delay_s * kept)

    def delayed(self, delay_s: float) -> "Guard":
        """The guard once stage work has had to wait so long."""
        return replace(self, delay_s=self.delay_s + delay_s)


def fits(piece_s: float, left_s: float) -> bool:
    """Whether a piece ends within what is left of a gap.

    >>> fits(0.004, 0.006), fits(0.004, 0.0045)
    (True, False)
    """
    return piece_s + HANDOVER_S <= left_s


def next_rows(rows: int, step_s: float, settings: IdleSettings) -> int:
    """Rows to run at once when steps of `rows` take `step_s`.

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
