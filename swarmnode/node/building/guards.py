"""Guards of a node: they hold its run back, with a reason in words, while its machine is wanted elsewhere.

run.py -> [open_guards] -> registry.py -> extensions/limits/machine_guard.py -> RunControl.hold
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial

from swarmnode.machine.storage import Paths
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.registry import find, names
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class GuardSource:
    """A node as its guards see it. A guard has a thread of its own and changes nothing but `control`."""

    status: Callable[[], NodeStatus]
    control: RunControl
    config: Config
    paths: Paths


async def open_guards(stack: AsyncExitStack, source: GuardSource) -> None:
    """Has all guards that are registered look after this node, until the stack is closed. They begin and end
    beside the event loop: one may read a whole home, or wait for a webhook."""
    for name in names("guard"):
        guard: AbstractContextManager[object] = find("guard", name)(source)
        await asyncio.to_thread(guard.__enter__)
        stack.push_async_exit(partial(asyncio.to_thread, guard.__exit__))
