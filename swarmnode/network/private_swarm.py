"""A private swarm while a node runs: what its home keeps, who was met there, and what a peer is handed.

home (swarm_record.py) <-> [PrivateSwarm] <-> private_host.py, which brings it to the wire
                              `-> may_publish -> ExchangeSettings.publishers

Commands change the file of the home (`swarmnode swarm remove`, `rotate`); a running node looks at it and
follows. A newer list that the founder signed is taken from whoever has it, so a founder need not be there.
"""

import logging
import time
from collections.abc import Container
from pathlib import Path
from typing import Annotated

import msgspec

from swarmnode.errors import NetworkError, StorageError
from swarmnode.network.manifest import MAX_LISTED, MAX_MANIFEST_BYTES
from swarmnode.network.swarm_key import SECRET_BYTES, SwarmKey
from swarmnode.network.swarm_record import SwarmRecord, load, save, succeeded
from swarmnode.storage import replace_file

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 60.0
"""How often it is written down when members were last met; a new one is at once."""

MAX_NEWS_BYTES = MAX_MANIFEST_BYTES + 1024


class SwarmNews(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member is told that has an older list: the newer one, and the key where that is another."""

    signed_list: Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)] = b""
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)] = b""


class PrivateSwarm:
    """What one node knows of its private swarm. Nothing here waits."""

    def __init__(self, path: Path, met_path: Path) -> None:
        """Raises NetworkError for a damaged file."""
        self._path = path
        self._changed_at = _changed_at(path)
        self._set(load(path))
        self.met = Met(met_path)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def key(self) -> SwarmKey:
        return self.record.key

    @property
    def version(self) -> int:
        """Of the founder's list; 0: none has been heard of."""
        return 0 if self._manifest is None else self._manifest.version

    @property
    def removed(self) -> frozenset[str]:
        return self._removed

    @property
    def may_publish(self) -> Container[str]:
        """Holds the peer ids whose groups are accepted, as the list is now."""
        return _Publishers(self)

    def publishes(self, peer_id: str) -> bool:
        manifest = self._manifest
        return peer_id not in self._removed and (
            manifest is None or manifest.publishers is None or peer_id in manifest.publishers
        )

    def refresh(self) -> bool:
        """Follow the file where a command has changed it. Returns True where it did."""
        changed_at = _changed_at(self._path)
        if changed_at == self._changed_at:
            return False
        self._changed_at = changed_at
        try:
            record = load(self._path)
        except NetworkError as error:
            logger.error("%s; going on with what was read at the start", error)
            return False
        if record == self.record:
            return False
        self._set(record)
        return True

    def news_for(self, peer_id: str, held: SwarmKey, version: int) -> SwarmNews | None:
        """What a peer is handed that has proved this key; None: nothing, not even an answer."""
        if peer_id in self._removed:
            return None
        if held == self.key:
            return SwarmNews(self.record.signed_list if version < self.version else b"")
        if self._manifest is None or peer_id not in self._manifest.members:
            return None
        return SwarmNews(self.record.signed_list, self.key.secret)

    def hear(self, news: SwarmNews) -> None:
        """Take over what a peer hands on, where it is newer. Raises Rejected."""
        if not news.signed_list:
            return
        record = succeeded(self.record, news.signed_list, news.secret)
        if record is None:
            return
        moved = record.key != self.key
        self._set(record)
        try:
            save(record, self._path)
            self._changed_at = _changed_at(self._path)
        except StorageError as error:
            logger.warning("%s; after a restart it is asked for again", error)
        logger.info(
            "private swarm %s: list %d of its founder%s", self.name, self.version, ", a new key" * moved
        )

    def _set(self, record: SwarmRecord) -> None:
        self.record = record
        self._manifest = record.manifest
        self._removed = frozenset(self._manifest.removed if self._manifest else ())


class _Publishers(Container[str]):
    """A view of the list, which may change while the exchange looks at it."""

    def __init__(self, swarm: PrivateSwarm) -> None:
        self._swarm = swarm

    def __contains__(self, peer_id: object) -> bool:
        return isinstance(peer_id, str) and self._swarm.publishes(peer_id)


# ---- who was met ----


class Met:
    """Peers that proved the key, with the time when they last did (seconds since the epoch). On the disk, for
    `swarmnode swarm members` and for the list of who is handed the next key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept_at = time.time()
        self.last_s = read_met(path)

    def note(self, peer_id: str) -> None:
        """A peer proved the key. Beyond MAX_LISTED members newcomers are not written down."""
        now, known = time.time(), peer_id in self.last_s
        if not known and len(self.last_s) >= MAX_LISTED:
            return
        self.last_s[peer_id] = now
        if not known or now - self._kept_at >= KEEP_EVERY_S:
            self._kept_at = now
            try:
                replace_file(self._path, msgspec.json.encode(self.last_s), mode=0o600)
            except OSError as error:
                logger.warning(
                    "the members that were met cannot be kept in %s: %s", self._path, error.strerror
                )


def read_met(path: Path) -> dict[str, float]:
    """Who was met, by the file of a node; nobody where there is none or it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("the members that were met cannot be read from %s: %s", path, error)
        return {}


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
