"""The reachability of this node, as the rest of the node sees it; an extension finds it out.

Discovery -> [find_reach] -> registry.py -> extensions/reach/ -> Reach -> status, invitations, doctor
"""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from swarmnode.network.host import Host
from swarmnode.registry import first

Verdict = Literal["unknown", "reachable", "relayed", "local", "nobody"]
"""Verdict of reachability. unknown: not known yet; reachable: everybody can dial us; relayed: others get our
groups through a peer that they can dial; local: only our own network or machine can dial us; nobody: no peer
can get anything from us."""


class Reach(msgspec.Struct, frozen=True):
    """The reachability of this node, in words."""

    verdict: str = "unknown"
    """A `Verdict`."""
    text: str = "not known yet whether others can reach you"
    """The verdict in words."""
    steps: tuple[str, ...] = ()
    """Advice to the user, the best first."""
    addresses: tuple[str, ...] = ()
    """Addresses by which an outsider joins the swarm: our own, or those of the peer that hands on our
    groups."""

    def as_line(self) -> str:
        """Returns the verdict and, where nobody reaches us, the numbered steps, as one line."""
        if not self.steps or self.verdict == "relayed":
            return self.text
        return f"{self.text}: " + ", ".join(f"({number}) {step}" for number, step in enumerate(self.steps, 1))


class ReachFinder(Protocol):
    """Finds out which peers can reach this node."""

    @property
    def reach(self) -> Reach:
        """The verdict so far."""
        ...

    async def run(self) -> None:
        """Checks again and again, until cancelled."""
        ...


def find_reach(
    host: Host, dialled: Callable[[], Mapping[str, str]], *, asks_router: bool
) -> ReachFinder | None:
    """Returns the installed finder. None: no extension finds it out. `dialled`: returns the peers that
    answered our dials, each with its address. `asks_router`: the host asks the router to forward its port."""
    make = first("reach")
    return None if make is None else make(host, dialled, asks_router=asks_router)
