"""The clock of the event loop, and waits on it: for a change, and for a time at most.

membership/, replica_answers.py, pipeline_node.py, membership_supervisor.py
-> [loop_s, wait_at_most, ChangeSignal]
"""

import asyncio


def loop_s() -> float:
    """Return the seconds of the running event loop, which never go backwards and have no date."""
    return asyncio.get_running_loop().time()


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait until the event is set, at most for this time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class ChangeSignal:
    """Wakes all waiting tasks at a change. No change between two waits is missed by a task that looks at the
    state first."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait until something changes, at most for this time."""
        await wait_at_most(seconds, self._changed)
