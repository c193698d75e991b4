"""The page of a running node, as the core sees it.

run.py, seed_node.py, run_pipeline.py -> [open_page] -> registry.py -> extensions/page/page_server.py
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from swarmnode.node.showing.node_source import NodeSource
from swarmnode.registry import find, names

logger = logging.getLogger(__name__)

USUAL = "web"
"""The page of extensions/page/; without that extension a node has no page."""


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
        """The secret of this start, with which commands on this machine make requests."""
        ...


@dataclass(frozen=True, slots=True)
class NoPage:
    """Stands for the page of a node without one."""

    port: int = 0
    address: str = ""
    token: str = ""


def open_page(source: NodeSource) -> AbstractContextManager[Page]:
    """Returns the page of a node; it is served within the `with` block. Raises PortInUse there."""
    name = source.config.node.page
    if name == "off" or (name == USUAL and name not in names("page")):
        logger.info("this node has no page, so `swarmnode status` cannot reach it")
        return nullcontext(NoPage())
    return find("page", name)(source)
