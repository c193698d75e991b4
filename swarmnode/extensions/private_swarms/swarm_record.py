"""The record of a private swarm in a home: its keys, its founder, and the list that the founder signed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from swarmnode.errors import NetworkError, Rejected, StorageError
from swarmnode.extensions.private_swarms.manifest import MAX_LISTED, Manifest, read_manifest, signed
from swarmnode.extensions.private_swarms.swarm_key import SECRET_BYTES, SwarmKey
from swarmnode.identity.key_file import keep_secret
from swarmnode.identity.node_key import NodeKey
from swarmnode.identity.peer_id import PUBLIC_KEY_BYTES, peer_id_from_public_key, public_key_from_peer_id
from swarmnode.machine.storage import make_folder, replace_file
from swarmnode.network.admission import SUFFIX, file_of
from swarmnode.network.finding.invitation import MAX_SEEDS, Invitation
from swarmnode.network.multiaddr import split_peer
from swarmnode.settings.config import SWARM_NAME

MAX_KEYS = 8
"""Most keys stored: the newest, and earlier ones with which returning members can ask for it."""

MAX_FILE_BYTES = 1024 * 1024
_VERSION_BYTES = 8
_ASK_AGAIN = "ask for a new invitation, and paste all of it"

_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Secrets = Annotated[tuple[_Secret, ...], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


@dataclass(frozen=True)
class SwarmRecord:
    """One private swarm, as stored in its file."""

    name: str
    founder: str
    """Peer id of the founder, who signs the list."""
    secrets: _Secrets = field(repr=False)
    """Secrets of the swarm's keys, starting with the valid one."""
    seeds: tuple[str, ...] = ()
    signed_list: bytes = b""
    """The list as sealed by the founder. Empty: none has been received."""
    least_version: int = 0
    """Version of the list at the time of our invitation. Any earlier list is out of date, whoever sends
    it."""
    version: Literal[1] = 1
    """Version of the file."""

    @property
    def key(self) -> SwarmKey:
        return SwarmKey(self.secrets[0])

    @property
    def manifest(self) -> Manifest | None:
        """Returns the founder's list, or None if none has been received."""
        if not self.signed_list:
            return None
        return read_manifest(self.signed_list, swarm=self.name, founder=self.founder)

    def invitation(self, seeds: Sequence[str]) -> Invitation:
        """Returns an invitation with everything that a friend needs, including the key. `seeds`: addresses at
        which we can be reached."""
        version = max(self.least_version, self.manifest.version if self.manifest else 0)
        key = (
            self.secrets[0] + public_key_from_peer_id(self.founder) + version.to_bytes(_VERSION_BYTES, "big")
        )
        known = tuple(dict.fromkeys((*seeds, *self.seeds)))[:MAX_SEEDS]
        return Invitation(name=self.name, seeds=known, key=key)


# ---- making and changing records ----


def founded(name: str, founder: NodeKey, seeds: Sequence[str]) -> SwarmRecord:
    """Returns the record of a new swarm with a new key. Raises NetworkError if a seed is malformed."""
    for seed in seeds:
        split_peer(seed)
    _check_name(name)
    key = SwarmKey.generate()
    manifest = Manifest(name, 1, key.mark, (founder.peer_id,), (), None)
    return SwarmRecord(name, founder.peer_id, (key.secret,), tuple(seeds), signed(manifest, founder))


def invited(invitation: Invitation, known: SwarmRecord | None) -> SwarmRecord:
    """Returns the record for a pasted invitation. `known`: this home's record for the same name. Raises
    NetworkError if the key is malformed, or if the invitation is for another swarm of the same name."""
    secret, public, version = (
        invitation.key[:SECRET_BYTES],
        invitation.key[SECRET_BYTES:-_VERSION_BYTES],
        invitation.key[-_VERSION_BYTES:],
    )
    if len(invitation.key) != SECRET_BYTES + PUBLIC_KEY_BYTES + _VERSION_BYTES:
        raise NetworkError("the invitation is damaged: its key is cut off", hint=_ASK_AGAIN)
    founder = peer_id_from_public_key(public)
    least = int.from_bytes(version, "big")
    if known is None:
        return SwarmRecord(invitation.name, founder, (secret,), invitation.seeds, least_version=least)
    if known.founder != founder:
        raise NetworkError(
            f"this home is already in another private swarm called {invitation.name}",
            hint="join this one with another --home DIR",
        )
    seeds = tuple(dict.fromkeys((*invitation.seeds, *known.seeds)))[:MAX_SEEDS]
    if secret in known.secrets:
        # An invitation with one of our earlier keys: what we have received since is newer.
        return replace(known, seeds=seeds)
    least = max(least, known.least_version, known.manifest.version if known.manifest else 0)
    secrets = (secret, *known.secrets)[:MAX_KEYS]
    return replace(known, secrets=secrets, seeds=seeds, signed_list=b"", least_version=least)


def changed(
    record: SwarmRecord,
    founder: NodeKey,
    *,
    members: Sequence[str] = (),
    only: Sequence[str] = (),
    remove: Sequence[str] = (),
    publishers: Sequence[str] | None = None,
    new_key: bool = False,
) -> SwarmRecord:
    """Returns the record with a new signed list. `members` are added to the listed ones as far as there is
    room; `only` replaces both. `publishers`: empty for everybody, None for no change. Raises NetworkError if
    this key is not the founder's, and for peers that were removed before."""
    before = record.manifest
    if founder.peer_id != record.founder or before is None:
        raise NetworkError(
            f"the private swarm {record.name} was founded by another node, and only that node can change it",
            hint="run this in the founder's home (--home DIR)",
        )
    if record.founder in remove:
        raise NetworkError("the founder cannot be removed: nobody else could sign the list")
    gone = set(before.removed)
    named = {*only, *(publishers or ()), *(remove if gone.issuperset(remove) else ())}
    if again := gone & named:
        raise NetworkError(f"{', '.join(sorted(again))} was already removed from {record.name}")
    removed = tuple(sorted({*gone, *_ids(remove)}))
    # Earlier members come first: one member with a thousand names must not keep the founder from a new key.
    wanted = (record.founder, *(_ids(only) or (*before.members, *_ids(members))))
    staying = [peer for peer in dict.fromkeys(wanted) if peer not in removed][:MAX_LISTED]
    if len(removed) > MAX_LISTED:
        raise NetworkError(
            f"a list names at most {MAX_LISTED} removed peers",
            hint="use `swarmnode swarm rotate --only PEER` to name those who stay instead",
        )
    secrets = (SwarmKey.generate().secret, *record.secrets)[:MAX_KEYS] if new_key else record.secrets
    mark = SwarmKey(secrets[0]).mark
    allowed = before.publishers if publishers is None else _ids(publishers) or None
    manifest = Manifest(record.name, before.version + 1, mark, tuple(sorted(staying)), removed, allowed)
    return replace(record, secrets=secrets, signed_list=signed(manifest, founder))


def succeeded(record: SwarmRecord, signed_list: bytes, secret: bytes) -> SwarmRecord | None:
    """Returns the record with a newer list from a peer and the key that the list names, or None if the list
    is not newer. Raises Rejected if the founder did not sign the list, or for another key."""
    manifest, before = read_manifest(signed_list, swarm=record.name, founder=record.founder), record.manifest
    if manifest.version < record.least_version or (before and manifest.version <= before.version):
        return None
    if manifest.key_mark == record.key.mark:
        return replace(record, signed_list=signed_list)
    if len(secret) != SECRET_BYTES or SwarmKey(secret).mark != manifest.key_mark:
        raise Rejected("another_key", "it is not the key that the founder signed for")
    return replace(record, secrets=(secret, *record.secrets)[:MAX_KEYS], signed_list=signed_list)


def _check_name(name: str) -> None:
    """Raises NetworkError if a text is not a valid name of a swarm, and so not safe as a file name."""
    if not re.fullmatch(SWARM_NAME, name):
        raise NetworkError(
            f"{name!r} is not the name of a swarm", hint="lower-case letters, digits, dots, - and _"
        )


def _ids(peer_ids: Sequence[str]) -> tuple[str, ...]:
    """Returns the peer ids, sorted. Raises NetworkError if one is malformed."""
    for peer_id in peer_ids:
        try:
            public_key_from_peer_id(peer_id)
        except Rejected as error:
            raise NetworkError(
                f"{peer_id!r} is not a peer id", hint="`swarmnode swarm members` lists them"
            ) from error
    return tuple(sorted(set(peer_ids)))


# ---- the file ----


def names_in(folder: Path) -> tuple[str, ...]:
    """Returns the names of the private swarms for which a home has a key."""
    return tuple(sorted(path.stem for path in folder.glob(f"*{SUFFIX}")))


def save(record: SwarmRecord, path: Path) -> None:
    """Writes the record so that only we can read it. Raises StorageError."""
    try:
        make_folder(path.parent)
        replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=1), mode=0o600)
    except OSError as error:
        raise StorageError(f"cannot save the key of a swarm in {path}: {error.strerror}") from error


def load(path: Path) -> SwarmRecord:
    """Reads a record. Raises NetworkError if it is damaged: going on without it would mean going public."""
    hint = f"restore your backup, or remove {path} and join again with an invitation"
    try:
        with path.open("rb") as file:
            keep_secret(path, file.fileno())
            data = file.read(MAX_FILE_BYTES)
        record = msgspec.json.decode(data, type=SwarmRecord)
        if record.name != path.stem or (record.manifest and record.manifest.key_mark != record.key.mark):
            raise NetworkError("its parts do not belong together")
    except OSError as error:
        raise NetworkError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, NetworkError, Rejected) as error:
        raise NetworkError(f"the key of a private swarm in {path} is damaged: {error}", hint=hint) from error
    return record


def accept(invitation: Invitation, folder: Path) -> None:
    """Stores the contents of an invitation to a private swarm. Raises NetworkError, StorageError."""
    _check_name(invitation.name)
    save(invited(invitation, record_of(folder, invitation.name)), file_of(folder, invitation.name))


def record_of(folder: Path, name: str) -> SwarmRecord | None:
    """Returns a home's record of a private swarm. None: the home has no key for this name, so the swarm is
    public."""
    path = file_of(folder, name)
    return load(path) if path.exists() else None
