"""The contribution of a node, as the core sees it.

members.py -> [open_contribution] -> registry.py -> extensions/contribution/ -> WeekContribution -> status
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from swarmnode.node.showing.node_status import NodeStatus, WeekContribution
from swarmnode.registry import first
from swarmnode.settings.config import Config


class ContributionKeeper(Protocol):
    """Records what a machine gave and got."""

    def see(self, status: NodeStatus) -> WeekContribution:
        """Called often, with the status of each policy; returns the total of all policies at once."""
        ...


def open_contribution(
    stack: ExitStack, config: Config, folder: Path
) -> Callable[[NodeStatus], WeekContribution]:
    """Returns a function that reports the contribution until the stack is closed, from the first installed
    keeper. Without a keeper it reports nothing."""
    keep = first("contribution")
    if keep is None:
        return lambda status: WeekContribution()
    keeper: ContributionKeeper = stack.enter_context(keep(folder, config.policy.device))
    return keeper.see
