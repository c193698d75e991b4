"""A home's admission to a private swarm, as the rest of a node sees it; an extension reads the key.

home, name of the swarm -> [admission_to] -> assemble.py (the host around the transport, seeds), doctor
invitation with a key -> [accept] -> home
"""

from pathlib import Path
from typing import Protocol

from swarmnode.errors import ConfigError, NetworkError
from swarmnode.machine.storage import Paths
from swarmnode.network.finding.invitation import Invitation
from swarmnode.network.streams import StreamHost
from swarmnode.registry import find, ours

SUFFIX = ".swarm"
"""Ending of the file that a home keeps for each private swarm whose key it has."""


class Admission(Protocol):
    """A private swarm whose key this home has."""

    @property
    def founder(self) -> str:
        """Peer id of the founder."""
        ...

    @property
    def seeds(self) -> tuple[str, ...]:
        """Addresses to dial, from the invitation."""
        ...

    def host(self, inner: StreamHost) -> StreamHost:
        """Returns a host around another one, for holders of the key only."""
        ...


class Admissions(Protocol):
    """Makes admissions; registered as the part `key`."""

    def __call__(self, path: Path, met_path: Path) -> Admission:
        """Reads the file of a private swarm; its members are noted in the file at `met_path` as they are met.
        Raises NetworkError for a damaged file: going on without it would mean going public."""
        ...

    def accept(self, invitation: Invitation, folder: Path) -> None:
        """Keeps the contents of an invitation. Raises NetworkError, StorageError."""
        ...


def admission_to(paths: Paths, name: str) -> Admission | None:
    """Returns this home's admission to a private swarm. None: it never had a key of that name, so the swarm
    is public. Raises NetworkError for a file that is damaged or gone, and ConfigError if nothing installed
    can read it."""
    path, met = file_of(paths.swarms, name), paths.met_members(name)
    if path.exists():
        return _admissions(name)(path, met)
    if met.exists():
        raise NetworkError(
            f"the swarm {name} was private in this home, and its key {path} is gone",
            hint=f"restore the file, join by an invitation, or remove {met} to go public under that name",
        )
    return None


def accept(invitation: Invitation, paths: Paths) -> None:
    """Keeps the contents of an invitation with a key. Raises NetworkError, StorageError, ConfigError."""
    _admissions(invitation.name).accept(invitation, paths.swarms)


def file_of(folder: Path, name: str) -> Path:
    """Returns the file of a private swarm in a home's folder for them."""
    return folder / f"{name}{SUFFIX}"


def _admissions(name: str) -> Admissions:
    if "key" not in ours("admission"):
        raise ConfigError(
            f"{name} is a private swarm, and nothing installed can read its key",
            hint="it needs swarmnode.extensions.private_swarms: reinstall swarmnode completely",
        )
    return find("admission", "key")
