"""Our membership of the pipeline, from one coming to the next: one service enters it, leaves it, comes back.

pipeline_node.py (we have lost track) ----------v
pipeline_link.py (which plan is next) -> [MembershipSupervisor] -> membership.py

A membership ends when we have lost track of the others; then we come back as one who holds nothing, and
whoever asks meanwhile waits. One that fails ends the node with its error.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan


class MembershipSupervisor:
    """Keeps this node a member of the pipeline, through one membership after the other.

    async with MembershipSupervisor(make, steps=lambda: member.iteration, left=ready.clear) as supervisor:
        plan = await supervisor.agreed(7)
    """

    def __init__(
        self, make: Callable[[], Membership], *, steps: Callable[[], int], left: Callable[[], None]
    ) -> None:
        """`make`: returns another membership, not entered. `steps`: returns the optimizer steps in our
        weights. `left`: called when a membership is over and another follows."""
        self._make = make
        self._steps = steps
        self._left = left
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._ending = False
        self._stack = AsyncExitStack()
        self.membership = make()
        """The present membership, or the last one while none is entered."""

    async def __aenter__(self) -> Self:
        """Return once we are a member. Raises the errors that keep us from becoming one, in a group."""
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
        """Leave the pipeline. Raises, in a group, the error by which our membership failed."""
        await self._stack.__aexit__(exc_type, exc, tb)

    async def agreed(self, iteration: int) -> AgreedPlan:
        """Call `Membership.agreed` of the present membership, or of the next one if there is none. Raises
        ModelError."""
        await self._up.wait()
        return await self.membership.agreed(iteration)

    async def come_back(self) -> None:
        """Leave the pipeline, having lost track of it, and come back as a member that holds nothing."""
        self._up.clear()
        self._over.set()
        await self._up.wait()

    def _end(self) -> None:
        """End the membership without cancelling it: a cancelled one would not tell the others that it
        leaves."""
        self._ending = True
        self._over.set()

    async def _serve(self) -> None:
        while True:
            async with self.membership:
                self._over.clear()
                if not self._ending:
                    self._up.set()
                    await self._over.wait()
            if self._ending:
                return
            self._up.clear()
            self._left()
            self.membership = self._make()
            self.membership.stepped(self._steps())
