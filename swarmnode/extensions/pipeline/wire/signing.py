"""Proves that a micro-batch's path comes from its data node: signed once per attempt, checked by every node.

message_sender.py (at the data node) -> [signed] -> ForwardHop, from node to node -> [check_signature]
                                                                                    -> active_assignment.py

Without this, any member could start attempts in a data node's name, at the next node on a path of its own
choice, and so block the honest ones. Peer ids are public keys, so no key exchange is needed.
"""

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.frames import encode
from swarmnode.extensions.pipeline.wire.hop_messages import ForwardHop
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.identity.node_key import NodeKey
from swarmnode.identity.peer_id import public_key_from_peer_id

CONTEXT = b"swarmnode/1/pipeline-attempt\0"
"""A signature for one purpose proves nothing in another (identity/key_file.py)."""


def signed(message: ForwardHop, key: NodeKey) -> ForwardHop:
    """Return the message with its data node's signature. Takes about 50 us."""
    return msgspec.structs.replace(message, signature=key.sign(_signed_bytes(message)))


def check_signature(message: ForwardHop, data_node: str) -> None:
    """Raises Rejected: bad_signature, unless the peer `data_node` signed this attempt. Takes about 130 us."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key_from_peer_id(data_node))
        key.verify(message.signature, _signed_bytes(message))
    except (InvalidSignature, Rejected) as error:
        raise Rejected(Refusal.BAD_SIGNATURE, f"{data_node} has not signed this attempt") from error


def _signed_bytes(message: ForwardHop) -> bytes:
    """Return the fields that are the same on the whole path. Agent and wave follow from the micro-batch
    (hop_checks.py)."""
    fixed = (
        message.plan,
        message.iteration,
        message.micro_batch,
        message.attempt,
        message.path,
        message.tokens,
        message.lengths,
        message.prompts,
    )
    return CONTEXT + encode(fixed)
