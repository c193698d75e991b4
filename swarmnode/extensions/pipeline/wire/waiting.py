"""The clock of the event loop, and waits with a time limit for changes and events.

membership/, replica_answers.py, pipeline_node.py, membership_supervisor.py
-> [loop_s, wait_at_most, ChangeSignal]
"""

import asyncio


def loop_s() -> float:
    """Return the time of the running event loop in seconds. It never goes backwards and is not a date."""
    return asyncio.get_running_loop().time()


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait until the event is set, but at most this long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class ChangeSignal:
    """Wakes all waiting tasks when something changes. A task that checks the state before each wait misses no
    change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait until something changes, but at most this long."""
        await wait_at_most(seconds, self._changed)
