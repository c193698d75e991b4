"""A running node as a process: the lock on its identity, and the note that it leaves for other commands.

run.py (take_identity) -> [IdentityLock]
                       -> [write_running] -> running.json -> `swarmnode status`, `swarmnode swarm`

One process per identity: two nodes with one peer id would each receive half of what is sent to them. The
kernel holds the lock (flock), so it disappears with its holder, even on SIGKILL; the file that is left behind
locks nothing. It is never deleted, because deleting a lock file is a race.

The note tells other commands the node's pid, its status page and its addresses.
"""

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

import msgspec
import psutil

from swarmnode.errors import IdentityError, IdentityInUse
from swarmnode.machine.storage import make_folder, replace_file

logger = logging.getLogger(__name__)


class IdentityLock:
    """Holds the identity at `path` (the key file) while the block runs. Raises IdentityInUse.

    >>> with IdentityLock(paths.identity):      # doctest: +SKIP
    ...     key = load_or_create(paths.identity)
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise IdentityInUse(
                f"process {holder or 'unknown'} already uses this identity",
                hint="give a second node its own identity: swarmnode join --home DIR",
            ) from error
        # The pid only informs the next process; the lock holds without it, also on a full disk.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *error: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        try:
            make_folder(self.path.parent)
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise IdentityError(
                f"cannot open the lock {self.path}: {error.strerror}",
                hint="choose another folder with --home DIR",
            ) from error


class RunningNode(msgspec.Struct, frozen=True):
    """The note of a node that is running."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    peer_id: str
    http_host: str
    http_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """Port of its page. 0: no page."""
    addresses: tuple[str, ...] = ()
    token: str = ""
    """The secret with which commands on this machine ask the page for something."""


def write_running(path: Path, note: RunningNode) -> None:
    """Writes the note, readable only by ourselves. Raises OSError."""
    replace_file(path, msgspec.json.encode(note), mode=0o600)


def read_running(path: Path) -> RunningNode | None:
    """Returns the node that runs here, or None: no note, a damaged note, or its process is gone."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunningNode)
    except (OSError, msgspec.DecodeError):
        return None
    return note if psutil.pid_exists(note.pid) else None


def remove_running(path: Path) -> None:
    """Deletes our own note; another process's note stays."""
    note = read_running(path)
    if note is not None and note.pid == os.getpid():
        path.unlink(missing_ok=True)
