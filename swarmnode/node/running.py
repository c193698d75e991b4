"""The note a running node leaves for other commands on this machine: its pid, its status page, its addresses.

run.py writes it -> [running.json] -> `swarmnode status`, `swarmnode swarm`
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from swarmnode.storage import replace_file


class RunningNode(msgspec.Struct, frozen=True):
    """A node that runs now."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    peer_id: str
    http_host: str
    http_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    addresses: tuple[str, ...] = ()


def write_running(path: Path, note: RunningNode) -> None:
    """Leave the note. Raises OSError."""
    replace_file(path, msgspec.json.encode(note))


def read_running(path: Path) -> RunningNode | None:
    """The node that runs here, or None: no note, a damaged note, or one whose process is gone."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunningNode)
    except (OSError, msgspec.DecodeError):
        return None
    return note if psutil.pid_exists(note.pid) else None


def remove_running(path: Path) -> None:
    """Take back our own note; another process's stays."""
    note = read_running(path)
    if note is not None and note.pid == os.getpid():
        path.unlink(missing_ok=True)
