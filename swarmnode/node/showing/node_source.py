"""A running node as its observers see it: its page, and its guards.

run.py, seed_node.py, run_pipeline.py -> [NodeSource] -> page.py, guards.py -> extensions
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarmnode.machine.storage import Paths
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A running node. Its users run in threads of their own and change nothing but `control`."""

    status: Callable[[], NodeStatus]
    control: RunControl
    config: Config
    origins: Mapping[str, str]
    """The origin of each setting, by its full name."""
    paths: Paths
    rollouts: Path | None = None
    """The file of the run's rollouts (kept_rollouts.py). None: the node keeps none."""
