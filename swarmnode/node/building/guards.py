"""Guards of a node: they hold its run back, and say why, while its machine is needed for something else.

run.py -> [open_guards] -> registry.py -> extensions/limits/machine_guard.py -> RunControl.hold
"""

import asyncio
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial

from swarmnode.node.showing.node_source import NodeSource
from swarmnode.registry import find, names


async def open_guards(stack: AsyncExitStack, source: NodeSource) -> None:
    """Starts every registered guard on this node; the stack stops them. Starting and stopping run in a thread
    beside the event loop, since a guard may read a whole home or wait for a webhook."""
    for name in names("guard"):
        guard: AbstractContextManager[object] = find("guard", name)(source)
        await asyncio.to_thread(guard.__enter__)
        stack.push_async_exit(partial(asyncio.to_thread, guard.__exit__))
