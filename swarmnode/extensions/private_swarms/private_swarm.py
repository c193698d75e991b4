"""The state of a private swarm in a running node: its record, known members, and updates for peers."""

import logging
import time
from pathlib import Path
from typing import Annotated

import msgspec

from swarmnode.errors import NetworkError, StorageError
from swarmnode.extensions.private_swarms.manifest import MAX_LISTED, MAX_MANIFEST_BYTES
from swarmnode.extensions.private_swarms.swarm_key import SECRET_BYTES, SwarmKey
from swarmnode.extensions.private_swarms.swarm_record import SwarmRecord, load, save, succeeded
from swarmnode.machine.storage import read_kept, replace_file

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 60.0
"""Seconds between writes of the times at which members were last met. A new member is written at once."""

MAX_NEWS_BYTES = MAX_MANIFEST_BYTES + 1024

MAX_MET_BYTES = 256 * MAX_LISTED
"""Limit on the file of met members; each takes less than a hundred bytes."""


class SwarmUpdate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An update for a member with an older list: the newer list, and the key if it changed."""

    signed_list: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)] = b""
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""


class PrivateSwarm:
    """One node's knowledge of its private swarm. No method blocks."""

    def __init__(self, path: Path, met_path: Path) -> None:
        """Reads the files. Raises NetworkError if one is damaged."""
        self._path = path
        self._changed_at = _changed_at(path)
        self._set(load(path))
        self.met = MetMembers(met_path)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def key(self) -> SwarmKey:
        return self.record.key

    @property
    def version(self) -> int:
        """Version of the founder's list, or 0 if none has been received."""
        return 0 if self._manifest is None else self._manifest.version

    @property
    def removed(self) -> frozenset[str]:
        return self._removed

    def __contains__(self, peer_id: object) -> bool:
        """Returns True if the current list accepts this peer's groups."""
        manifest = self._manifest
        return peer_id not in self._removed and (
            manifest is None or manifest.publishers is None or peer_id in manifest.publishers
        )

    def refresh(self) -> None:
        """Reads the file again if a command has changed it."""
        changed_at = _changed_at(self._path)
        if changed_at == self._changed_at:
            return
        self._changed_at = changed_at
        try:
            self._take(load(self._path))
        except NetworkError as error:
            logger.error("%s; continuing with what was read at the start", error)

    def news_for(self, peer_id: str, held: SwarmKey, version: int) -> SwarmUpdate | None:
        """Returns the update for a peer that has proved this key, or None if it gets no answer at all."""
        if peer_id in self._removed:
            return None
        if held == self.key:
            return SwarmUpdate(self.record.signed_list if version < self.version else b"")
        if self._manifest is None or peer_id not in self._manifest.members:
            return None
        return SwarmUpdate(self.record.signed_list, self.key.secret)

    def hear(self, news: SwarmUpdate) -> None:
        """Adopts an update from a peer if it is newer. Raises Rejected."""
        if not news.signed_list:
            return
        record = succeeded(self.record, news.signed_list, news.secret)
        if record is None:
            return
        self._take(record)
        try:
            save(record, self._path)
            self._changed_at = _changed_at(self._path)
        except StorageError as error:
            logger.warning("%s; it will be requested again after a restart", error)

    def _take(self, record: SwarmRecord) -> None:
        """Adopts a changed record, with a log line if the founder's list is a newer one."""
        key, version, removed = self.key, self.version, self._removed
        self._set(record)
        if self.version != version:
            gone = ", ".join(sorted(self._removed - removed))
            news = ", a new key" * (self.key != key) + (gone and f", removed: {gone}")
            logger.info("private swarm %s: list %d of its founder%s", self.name, self.version, news)

    def _set(self, record: SwarmRecord) -> None:
        self.record = record
        self._manifest = record.manifest
        self._removed = frozenset(self._manifest.removed if self._manifest else ())


# ---- members that were met ----


class MetMembers:
    """Peers that proved the key, with the last time of each (seconds since the epoch). Stored on disk for
    `swarmnode swarm members` and for the list of peers that get the next key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept_at = time.time()
        self.last_s = read_met(path)

    def note(self, peer_id: str) -> None:
        """Records that a peer proved the key. If there are MAX_LISTED members, newcomers are not recorded."""
        now, known = time.time(), peer_id in self.last_s
        if not known and len(self.last_s) >= MAX_LISTED:
            return
        self.last_s[peer_id] = now
        if not known or now - self._kept_at >= KEEP_EVERY_S:
            self._kept_at = now
            try:
                replace_file(self._path, msgspec.json.encode(self.last_s), mode=0o600)
            except OSError as error:
                logger.warning("cannot save the members that were met in %s: %s", self._path, error.strerror)


def read_met(path: Path) -> dict[str, float]:
    """Returns the members met, from a node's file; empty if the file is missing or damaged."""
    decode = msgspec.json.Decoder(dict[str, float]).decode
    return read_kept(path, "the members that were met", decode, MAX_MET_BYTES) or {}


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
