"""Guards of a node: they hold its run back, with a reason in words, while its machine is wanted elsewhere.

run.py -> [open_guards] -> registry.py -> extensions/limits/machine_guard.py -> RunControl.hold
"""

import asyncio
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial

from swarmnode.node.showing.node_source import NodeSource
from swarmnode.registry import find, names


async def open_guards(stack: AsyncExitStack, source: NodeSource) -> None:
    """Has all guards that are registered look after this node, until the stack is closed. They begin and end
    beside the event loop: one may read a whole home, or wait for a webhook."""
    for name in names("guard"):
        guard: AbstractContextManager[object] = find("guard", name)(source)
        await asyncio.to_thread(guard.__enter__)
        stack.push_async_exit(partial(asyncio.to_thread, guard.__exit__))
