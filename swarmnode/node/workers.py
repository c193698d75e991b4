"""The threads a node computes in, so that its event loop never does.

node.py (asyncio) -> [Workers] -> learner.py

One thread learns, evaluates and takes snapshots; the other generates, at times beside it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Workers:
    """Two threads with a queue each. They start with their first work and end with `close`.

    Work runs in the context of whoever asks for it: log lines say which policy they are about.
    """

    def __init__(self) -> None:
        self._learner = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._generator = ThreadPoolExecutor(1, thread_name_prefix="generator")

    async def learn(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run `work` in the thread that owns the policy."""
        return await asyncio.wrap_future(self._learner.submit(copy_context().run, work, *arguments))

    async def generate(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run `work` in the thread that owns the engine during a round."""
        return await asyncio.wrap_future(self._generator.submit(copy_context().run, work, *arguments))

    async def close(self) -> None:
        """Wait for the work in hand without holding up the event loop."""
        loop = asyncio.get_running_loop()
        for thread in (self._generator, self._learner):
            await loop.run_in_executor(None, thread.shutdown)
