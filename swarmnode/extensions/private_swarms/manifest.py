"""The founder's signed list of a private swarm: its valid key, its members, removed peers, and publishers.

swarmnode swarm create, remove, rotate, publishers -> [signed] -> home -> members, from one to the next
greeting of a peer -> [read_manifest] -> private_swarm.py

The founder is a node like any other. Its key signs the list, and its peer id is in every invitation. A list
replaces only lists with lower versions, so nobody can bring an old one back.
"""

from typing import Annotated

import msgspec

from swarmnode.errors import Rejected
from swarmnode.extensions.private_swarms.swarm_key import MARK_BYTES
from swarmnode.identity.envelope import decoded, seal, unseal
from swarmnode.identity.node_key import NodeKey
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.network.finding.invitation import MAX_NAME_CHARS

MAX_LISTED = 512
"""Most peer ids in each list of the manifest."""

MAX_MANIFEST_BYTES = 128 * 1024

_CONTEXT = "swarmnode/private-swarm/1"

_PeerId = Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID_CHARS)]

_PeerIds = Annotated[tuple[_PeerId, ...], msgspec.Meta(max_length=MAX_LISTED)]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The founder's list of a private swarm, as signed."""

    swarm: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    version: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    """Number of the list; each change raises it by one."""
    key_mark: Annotated[bytes, msgspec.Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]
    """Mark of the valid key."""
    members: _PeerIds = ()
    """Peer ids of members that may get the new key by proving an earlier one. Others need an invitation."""
    removed: _PeerIds = ()
    publishers: _PeerIds | None = None
    """Peer ids whose groups are trained on. None: all peers with the key."""


_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(Manifest)


def signed(manifest: Manifest, founder: NodeKey) -> bytes:
    """Returns the list in its signed form, as it is sent and stored."""
    return seal(founder, _CONTEXT, _encoder.encode(manifest))


def read_manifest(data: bytes, *, swarm: str, founder: str) -> Manifest:
    """Returns the list of this swarm. Raises Rejected if its founder did not sign it."""
    envelope = unseal(data, _CONTEXT, max_bytes=MAX_MANIFEST_BYTES)
    if envelope.author != founder:
        raise Rejected("not_the_founder", f"signed by {envelope.author}")
    manifest = decoded(_decoder, envelope.payload)
    if manifest.swarm != swarm:
        raise Rejected("another_swarm", f"a list of {manifest.swarm!r}")
    return manifest
