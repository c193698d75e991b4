"""Guards of a node: they hold its run back, with a reason in words, while its machine is wanted elsewhere.

run.py -> [open_guards] -> registry.py -> extensions/limits/machine_guard.py -> RunControl.hold
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import cast

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


def open_guards(stack: AsyncExitStack, source: GuardSource) -> None:
    """Has all guards that are registered look after this node, until the stack is closed."""
    for name in names("guard"):
        guard = cast(Callable[[GuardSource], AbstractContextManager[object]], find("guard", name))(source)
        stack.enter_context(guard)
