"""Judges what strangers sent in a thread with a deadline, so that no answer can stall the event loop.

exchange -> [Judge.run(check_body)] -> exchange

One judgement at a time: scoring must not take the cores from training. It is the rule by which a node judges
its own rollouts too (tasks/judged.py), with less patience: the code of task files runs in a process that is
ended at its deadline, and what else overruns in a thread is left behind and counted; with too many stuck,
nothing is judged until one returns. The process is not the one that judges our own rollouts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from swarmnode.errors import JudgementLost, JudgementOverran, Rejected
from swarmnode.exchange.limits import MAX_STUCK_JUDGEMENTS
from swarmnode.exchange.reasons import Reason
from swarmnode.tasks.judged import in_daemon_thread

T = TypeVar("T")


class Judge:
    """`await judge.run(work)` gives what `work()` returns or raises, or Rejected after `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._stuck = 0

    @property
    def stuck(self) -> int:
        """Threads that overran and still run."""
        return self._stuck

    async def run(self, work: Callable[[], T]) -> T:
        async with self._turn:
            if self._stuck >= MAX_STUCK_JUDGEMENTS:
                raise Rejected(Reason.JUDGE_STUCK, f"{self._stuck} judgements never ended")
            return await self._run_in_thread(work)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        judged = in_daemon_thread(work)
        waited = asyncio.wrap_future(judged)
        # What is wrong with an answer is told below: asyncio need not log it as something nobody looked at.
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait([waited])
        except TimeoutError as error:
            raise Rejected(Reason.SCORE_TIMEOUT, f"no result after {self._timeout_s:g} s") from error
        finally:
            if not judged.done():
                self._count_until_it_returns(judged)
        try:
            return judged.result()
        except JudgementOverran as error:
            raise Rejected(Reason.SCORE_TIMEOUT, error.message) from error
        except JudgementLost as error:
            # A process that is still being started, or that died, is no peer's fault.
            raise Rejected(Reason.UNSCORABLE, error.message) from error

    def _count_until_it_returns(self, judged: "Future[Any]") -> None:
        loop = asyncio.get_running_loop()

        def returned(_: "Future[Any]") -> None:
            # The loop is closed when the node has ended meanwhile; then nobody counts any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._returned)

        self._stuck += 1
        judged.add_done_callback(returned)

    def _returned(self) -> None:
        self._stuck -= 1
