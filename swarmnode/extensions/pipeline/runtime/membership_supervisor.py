"""Keeps a node in its pipeline: one service that joins it, leaves it, and comes back.

pipeline_node.py (we have lost track) ----------v
data_node.py (which plan is next) -> [MembershipSupervisor] -> membership.py

A membership ends when we have lost track of the other members, or when it fails. Then we come back as a
member that holds nothing, and callers wait meanwhile. After too many failures in a row, the last error ends
the node.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from swarmnode.errors import PipelineError, SwarmnodeError, plain_error
from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.wire.waiting import wait_at_most

logger = logging.getLogger(__name__)

MAX_FAILURES = 6
"""Failures in a row after which the node ends: half a minute, with the pauses between them."""

FIRST_PAUSE_S = 1.0
"""Pause before a membership that failed is tried again; it doubles each time."""

LASTING_S = 120.0
"""A membership that lasted longer than this before it failed counts as the first failure again."""


class MembershipSupervisor:
    """Keeps this node a member of the pipeline, through one membership after the other.

    async with MembershipSupervisor(make, steps=lambda: member.iteration, left=ready.clear) as supervisor:
        plan = await supervisor.agreed(7)
    """

    def __init__(
        self,
        make: Callable[[], Membership],
        *,
        steps: Callable[[], int],
        left: Callable[[], None],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`make`: returns a new membership, not entered. `steps`: returns the optimizer steps in our weights.
        `left`: called when one membership has ended and another follows."""
        self._make = make
        self._steps = steps
        self._left = left
        self._first_pause_s = first_pause_s
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._ending = asyncio.Event()
        self._failures = 0
        self._was_member = False
        self._stack = AsyncExitStack()
        self.membership = make()
        """The current membership, or the next one before it is entered."""
        self.trouble = ""
        """The reason why we are not a member now; empty if we are."""

    async def __aenter__(self) -> Self:
        """Return once we are a member. Raises, in a group, the errors that keep us from becoming one."""
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(self._end)
            tasks.create_task(self._serve())
            await self._up.wait()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Leave the pipeline. Raises, in a group, the error after which we did not come back."""
        await self._stack.__aexit__(exc_type, exc, tb)

    async def agreed(self, iteration: int) -> AgreedPlan:
        """Call `Membership.agreed` of the current membership, or of the next one if there is none. Raises
        ModelError."""
        await self._up.wait()
        return await self.membership.agreed(iteration)

    async def come_back(self) -> None:
        """Leave the pipeline after losing track of it, and come back as a member that holds nothing."""
        self._up.clear()
        self._over.set()
        await self._up.wait()

    def _end(self) -> None:
        """End the membership without cancelling it: a cancelled membership would not tell the others that it
        leaves."""
        self._ending.set()
        self._over.set()

    async def _serve(self) -> None:
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                async with self.membership:
                    self.trouble = ""
                    self._over.clear()
                    if self._ending.is_set():
                        return
                    self._was_member = True
                    self._up.set()
                    await self._over.wait()
            except (SwarmnodeError, ExceptionGroup) as error:
                lasted_s = asyncio.get_running_loop().time() - began_s
                self._failures = 1 if lasted_s > LASTING_S else self._failures + 1
                await self._failed(error)
            if self._ending.is_set():
                return
            self._up.clear()
            self._left()
            self.membership = self._make()
            self.membership.stepped(self._steps())

    async def _failed(self, error: Exception) -> None:
        """Log the failure and wait a while. Raises the error itself if we have never been a member, and
        PipelineError after too many failures."""
        if not self._was_member:
            raise error
        self._up.clear()
        self.trouble = str(plain_error(error))
        if self._failures >= MAX_FAILURES:
            raise PipelineError(
                f"our part in the pipeline failed {self._failures} times in a row: {self.trouble}",
                hint="the log of this member has the tracebacks; restart it once that is fixed",
            ) from error
        pause_s = self._first_pause_s * 2 ** (self._failures - 1)
        logger.error(
            "our part in the pipeline failed, coming back in %.1f s (%d of %d)",
            pause_s, self._failures, MAX_FAILURES, exc_info=error,
        )  # fmt: skip
        await wait_at_most(pause_s, self._ending)
