"""The page of a running node, as the heart knows it: what it shows, and whom it asks.

run.py, seed_node.py, run_pipeline.py -> [open_page] -> registry.py -> extensions/page/page_server.py
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.registry import find, names
from swarmnode.settings.config import Config

logger = logging.getLogger(__name__)

USUAL = "web"
"""The page of extensions/page/; a node does without where that is not installed."""


@dataclass(frozen=True, slots=True)
class PageSource:
    """A node as its page sees it. The page runs in a thread of its own and changes nothing but `control`."""

    status: Callable[[], NodeStatus]
    control: RunControl
    config: Config
    origins: Mapping[str, str]
    """The origin of each setting, by its full name."""
    logs: Path
    """The folder of metrics.jsonl."""
    rollouts: Path | None = None
    """The file of the run's rollouts (kept_rollouts.py). None: the node keeps none."""


class Page(Protocol):
    """A page that is being served."""

    @property
    def port(self) -> int: ...

    @property
    def address(self) -> str:
        """The address for a browser on this machine."""
        ...

    @property
    def token(self) -> str:
        """The secret of this start, by which commands of this machine ask for something."""
        ...


@dataclass(frozen=True, slots=True)
class NoPage:
    """Stands for the page of a node that has none."""

    port: int = 0
    address: str = ""
    token: str = ""


def open_page(source: PageSource) -> AbstractContextManager[Page]:
    """Returns the page of a node; it is served within the `with` block. Raises PortInUse there."""
    name = source.config.node.page
    if name == "off" or (name == USUAL and name not in names("page")):
        logger.info("this node has no page: `swarmnode status` cannot ask it")
        return nullcontext(NoPage())
    return find("page", name)(source)
