"""The thread in which bodies of strangers are judged, with a deadline.

Fetcher, Borrower -> [Judge.run] -> check_body in a thread -> a group, or Rejected

One judgement at a time: scoring must not take the cores from training. The rule is the one by which a node
judges its own rollouts (tasks/judging/own_judge.py), with less patience. The code of task files runs in a
process that is ended at its deadline, and not in the one that judges our own rollouts. Anything else that
overruns is left behind in its thread and counted; with too many stuck, nothing is judged until one returns.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from swarmnode.errors import JudgementLost, JudgementOverran, Rejected, StillLoading
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.limits import MAX_STUCK_JUDGEMENTS
from swarmnode.tasks.deadlines.daemon_threads import SHORTEST_WAIT_S, in_daemon_thread
from swarmnode.tasks.deadlines.task_lock import leave_behind

T = TypeVar("T")


class Judge:
    """`await judge.run(work)` returns or raises what `work()` does, or raises Rejected after `timeout_s`."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._stuck: Counter[str] = Counter()

    @property
    def stuck(self) -> int:
        """Number of threads that overran and still run."""
        return self._stuck.total()

    def is_stuck_on(self, author: str) -> bool:
        """True while a thread that overran on a group of this author still runs."""
        return self._stuck[author] > 0

    async def run(
        self,
        work: Callable[[], T],
        charge: Callable[[float], None] = lambda seconds: None,
        *,
        author: str = "",
    ) -> T:
        """Runs `work` in a thread. `charge` is called with the seconds that it took, without those that it
        waited for others; it is not called if a process was still loading, which is nobody's work."""
        async with self._turn:
            if self.stuck >= MAX_STUCK_JUDGEMENTS:
                raise Rejected(Reason.JUDGE_STUCK, f"{self.stuck} judgements never returned")
            began, loading = self._clock(), False
            try:
                return await self._run_in_thread(work, author)
            except Rejected as rejected:
                loading = isinstance(rejected.__cause__, StillLoading)
                raise
            finally:
                if not loading:
                    charge(self._clock() - began)

    async def _run_in_thread(self, work: Callable[[], T], author: str) -> T:
        judged = in_daemon_thread(work, self._timeout_s)
        waited = asyncio.wrap_future(judged)
        # Errors are raised below; asyncio must not log them as exceptions that were never retrieved.
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not judged.done() and (left_s := judged.clock.left_s) > 0:
                await asyncio.wait([waited], timeout=max(left_s, SHORTEST_WAIT_S))
        finally:
            if not judged.done():
                leave_behind(judged.thread)
                self._count_until_it_returns(judged, author)
        if not judged.done():
            raise Rejected(Reason.SCORE_TIMEOUT, f"no result after {self._timeout_s:g} s")
        try:
            return judged.result()
        except JudgementOverran as error:
            raise Rejected(Reason.SCORE_TIMEOUT, error.message) from error
        except JudgementLost as error:
            # A process that is still being started, or that died, is not a peer's fault.
            raise Rejected(Reason.UNSCORABLE, error.message) from error

    def _count_until_it_returns(self, judged: "Future[Any]", author: str) -> None:
        loop = asyncio.get_running_loop()

        def returned(_: "Future[Any]") -> None:
            # The loop is closed if the node has ended meanwhile; then nobody counts any more.
            with suppress(RuntimeError):
                # A lambda, since `self._stuck` may be another Counter by then.
                loop.call_soon_threadsafe(lambda: self._stuck.subtract((author,)))

        self._stuck = +self._stuck  # Authors with nothing stuck any more are removed.
        self._stuck[author] += 1
        judged.add_done_callback(returned)
