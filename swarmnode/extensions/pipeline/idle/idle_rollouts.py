"""Rollouts of a small policy of one's own in the gaps of the pipeline, in slices that hardly delay it.

stage_queue.py (nothing is ready; the plan says until when) -> [IdleRollouts] -> partial_rollouts.py, one
    engine step
                                                              |           at a time
                                                              v  whole groups -> sink (exchange, trainer)

The idea is PipeFill's (arXiv 2410.07192): a pipeline waits in gaps that its plan predicts, and other work
that comes in small pieces can fill them. A piece is one step of the engine. It begins only if

- no stage work waits,
- the time that it hardly ever exceeds fits into the gap (`StepForecast`: what such steps took lately),
- should stage work come the moment it begins, and it take as long as the slowest one lately, all delay that
  was caused would still be within 2 % of the stage work done (`DelayGuard`). So this holds whatever the plan
  predicts, but for a piece that is slower than all before it; what that delays is waited for again. Of stage
  work and not of time: a micro-batch meets one member after the other, and each may delay it by 2 % of its
  own work there, which is 2 % of the way; 2 % of the time at each would be many times that.

Steps are kept short by the number of rows that run at once: a short step loses little to a gap's end.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from swarmnode.errors import SwarmnodeError
from swarmnode.extensions.pipeline.idle.idle_budget import (
    BEGIN,
    DelayGuard,
    IdlePiece,
    IdleSettings,
    StepForecast,
    fits,
    next_rows,
)
from swarmnode.rollout.engine import Engine, PolicyUpdate
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.types import Example

logger = logging.getLogger(__name__)

MISFITS = 16
"""Gaps in a row without room for a piece after which its forecast is doubted."""


@dataclass(frozen=True, slots=True)
class IdleStats:
    """Counters of idle rollouts since they were made."""

    slices: int
    """Gaps in which at least one piece ran."""
    pieces: int
    tokens: int
    groups: int
    """Complete groups that were given to the sink."""
    used_s: float
    """Seconds of the gaps that were used."""
    overruns: int
    """Pieces that ended while stage work waited."""
    overrun_s: float
    """Total time of those pieces, an upper bound of the time that stage work waited."""
    too_short: int
    """Gaps, or rests of gaps, in which no piece fitted."""
    paused: int
    """Gaps that were left unused because earlier pieces had delayed stage work too much."""
    rows: int
    """Requests that run at once at present."""
    failure: str | None
    """Reason why no more rollouts are generated; None while they are."""


class IdleRollouts:
    """`IdleWork` of a pipeline member: `run` is called in the thread that does the stage's work.

    >>> idle = IdleRollouts(engine, rollouts, examples, sink, IdleSettings(0.005), busy)  # doctest: +SKIP
    >>> idle.rehearse(32)                                                                # doctest: +SKIP
    >>> idle.run(until_s=time.monotonic() + 0.2, wanted=lambda: False)                   # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        rollouts: PartialRollouts,
        examples: Iterator[Example],
        sink: Callable[[Answered], None],
        settings: IdleSettings,
        stage_busy_s: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rollouts`: in mode "refill" over `engine`, which has no other user. `sink` is called with each
        whole group as part of a piece, so it should only pass it on. `stage_busy_s`: returns the seconds of
        stage work done so far."""
        self._engine = engine
        self._rollouts = rollouts
        self._examples = examples
        self._sink = sink
        self._settings = settings
        self._stage_busy_s = stage_busy_s
        self._clock = clock
        self._forecast = StepForecast()
        self._guard = DelayGuard(settings.delay_share, settings.window_s)
        self._busy_s = 0.0
        self._misfits = 0  # gaps one after the other in which nothing fitted
        self._round: Generator[Answered | None, None, None] | None = None
        self._updates: deque[PolicyUpdate] = deque(maxlen=1)
        self._stats = IdleStats(0, 0, 0, 0, 0.0, 0, 0.0, 0, 0, 1, None)
        self._keep(rows=1)

    def run(self, until_s: float, wanted: Callable[[], bool]) -> None:
        """Generate until `until_s` (of `clock`), or until stage work is `wanted`, if that is sooner."""
        if self._stats.failure is not None:
            return
        self._count_work()
        before, tokens = self._stats, self._engine.stats().generated_tokens
        try:
            while not wanted() and (piece := self._next_piece(until_s)) is not None:
                groups = self._stats.groups
                took_s = self._do(piece)
                if wanted():
                    self._overran(took_s)
                # A round may also end as it begins because groups were left from the one before.
                if piece == BEGIN and self._round is None and self._stats.groups == groups:
                    break  # there is nothing to ask
        except SwarmnodeError as error:
            # The pipeline goes on without our rollouts.
            logger.warning("no more rollouts in idle time: %s", error)
            self._stats = replace(self._stats, failure=str(error))
        stats = self._stats
        self._stats = replace(
            stats,
            slices=stats.slices + (stats.pieces > before.pieces),
            tokens=stats.tokens + self._engine.stats().generated_tokens - tokens,
        )

    def rehearse(self, pieces: int) -> None:
        """Run some pieces at once to learn their duration, before the stage has work, in the same thread."""
        for _ in range(pieces):
            self._do(self._kind_of_next())

    def use_policy(self, update: PolicyUpdate) -> None:
        """Sample from this policy from the next round on. From any thread; a later one replaces it."""
        self._updates.append(update)

    def stats(self) -> IdleStats:
        return self._stats

    def close(self) -> None:
        """End the running round. The engine is closed by its owner."""
        if self._round is not None:
            self._round.close()
            self._round = None

    def _count_work(self) -> None:
        busy_s = self._stage_busy_s()
        self._guard = self._guard.worked(max(0.0, busy_s - self._busy_s))
        self._busy_s = busy_s

    def _next_piece(self, until_s: float) -> IdlePiece | None:
        """Return the next piece, or None if it may not begin now."""
        piece = self._kind_of_next()
        if not fits(self._forecast.upper_s(piece), until_s - self._clock()):
            self._did_not_fit(piece)
            return None
        if not self._guard.allows(self._forecast.worst_s(piece)):
            self._stats = replace(self._stats, paused=self._stats.paused + 1)
            return None
        return piece

    def _did_not_fit(self, piece: IdlePiece) -> None:
        self._stats = replace(self._stats, too_short=self._stats.too_short + 1)
        self._misfits += 1
        if self._misfits >= MISFITS:
            self._forecast.doubt(piece)
            self._misfits = 0

    def _kind_of_next(self) -> IdlePiece:
        if self._round is None:
            return BEGIN
        engine = self._engine.stats()
        return IdlePiece(engine.running + engine.waiting, engine.waiting)

    def _do(self, piece: IdlePiece) -> float:
        """Run one piece. Returns the seconds that it took."""
        began_s = self._clock()
        if piece == BEGIN:
            self._begin()
        self._go_to_next_step()
        took_s = self._clock() - began_s
        self._forecast.observe(piece, took_s)
        self._misfits = 0
        self._stats = replace(self._stats, pieces=self._stats.pieces + 1, used_s=self._stats.used_s + took_s)
        # Only steps that ran as many rows as they should and started none say whether those are too many.
        if piece == IdlePiece(self._stats.rows, 0):
            self._keep(next_rows(piece.rows, self._forecast.usual_s(piece), self._settings))
        return took_s

    def _begin(self) -> None:
        if self._updates:
            self._rollouts.set_policy(self._updates.pop())
        self._round = self._rollouts.in_steps(self._examples)

    def _go_to_next_step(self) -> None:
        """Run the engine step that is due, if any, and everything up to the next one."""
        assert self._round is not None
        for answered in self._round:
            if answered is None:
                return
            self._sink(answered)
            self._stats = replace(self._stats, groups=self._stats.groups + 1)
        self._round = None

    def _overran(self, piece_s: float) -> None:
        """Count a piece during which stage work arrived. The time of arrival is unknown, so the whole piece
        counts as delay."""
        self._guard = self._guard.delayed(piece_s)
        stats = self._stats
        self._stats = replace(stats, overruns=stats.overruns + 1, overrun_s=stats.overrun_s + piece_s)

    def _keep(self, rows: int) -> None:
        self._stats = replace(self._stats, rows=rows)
        self._rollouts.keep_in_flight(rows)
