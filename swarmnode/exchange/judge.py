"""Runs a judgement in a thread with a deadline, so that no answer can stall the event loop.

exchange -> [Judge.run(check_body)] -> exchange

One judgement at a time: scoring must not take the cores from training. The learner may use the same task at
the same time in its own thread; how tasks bear that is told in tasks/task.py.
A thread cannot be killed. One that overruns is left behind, as a daemon so that it never holds up the exit of
the process (asyncio.to_thread would), and counted; with too many stuck, nothing is judged until one returns.
A judge that holds the GIL, such as a runaway regular expression, stalls Python itself: verifiers that run
untrusted patterns or code belong in a subprocess of the task's own.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from swarmnode.errors import Rejected
from swarmnode.exchange.limits import MAX_STUCK_JUDGEMENTS
from swarmnode.exchange.reasons import Reason

T = TypeVar("T")


class _Outcome(Generic[T]):
    """What a thread brings back. Not a Future's exception, because that cannot be a StopIteration."""

    def __init__(self, value: T | None = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error


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
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Outcome[T]] = loop.create_future()
        thread = threading.Thread(target=self._judge, args=(work, loop, done), name="judge", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await done
        except TimeoutError as error:
            raise Rejected(Reason.SCORE_TIMEOUT, f"no result after {self._timeout_s:g} s") from error
        finally:
            self._stuck += done.cancelled()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # pyright: ignore[reportReturnType]  (T may itself be None)

    def _judge(
        self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, done: "asyncio.Future[_Outcome[T]]"
    ) -> None:
        outcome: _Outcome[T]
        try:
            outcome = _Outcome(value=work())
        except Exception as error:  # noqa: BLE001  carried to the task that awaits it, which logs it
            outcome = _Outcome(error=error)
        except BaseException as error:  # noqa: BLE001  a judge that calls sys.exit() must not end the node
            outcome = _Outcome(error=RuntimeError(f"the judge raised {error!r}"))
        # The loop is closed when the node has ended meanwhile; then nobody waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._hand_over, done, outcome)

    def _hand_over(self, done: "asyncio.Future[_Outcome[T]]", outcome: "_Outcome[T]") -> None:
        if done.cancelled():
            self._stuck -= 1
        else:
            done.set_result(outcome)
