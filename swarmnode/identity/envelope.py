"""Signed envelopes: a payload, its author, and a signature for one purpose. Also strict decoding."""

from typing import Annotated, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarmnode.errors import Rejected
from swarmnode.identity.node_key import NodeKey
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS, public_key_from_peer_id

T = TypeVar("T")

SIGNATURE_BYTES = 64


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A payload and its author's signature. Only one returned by `unseal` can be trusted."""

    author: Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID_CHARS)]
    payload: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_encoder = msgspec.msgpack.Encoder()

_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(key: NodeKey, context: str, payload: bytes) -> bytes:
    """Signs `payload` for one purpose, for example `seal(key, "swarmnode/4/rollout-header", header)`."""
    return _encoder.encode(Envelope(key.peer_id, payload, key.sign(_signed_bytes(context, payload))))


def unseal(data: bytes, context: str, *, max_bytes: int) -> Envelope:
    """Checks the signature and returns author and payload.

    Raises Rejected: too_large, malformed, bad_peer_id, bad_signature.

    >>> key = NodeKey.generate()
    >>> unseal(seal(key, "greeting", b"hello"), "greeting", max_bytes=1024).payload
    b'hello'
    """
    if len(data) > max_bytes:
        raise Rejected("too_large", f"{len(data)} bytes, at most {max_bytes}")
    envelope = decoded(_decoder, data)
    public_key = Ed25519PublicKey.from_public_bytes(public_key_from_peer_id(envelope.author))
    try:
        public_key.verify(envelope.signature, _signed_bytes(context, envelope.payload))
    except InvalidSignature as error:
        raise Rejected("bad_signature", f"not signed by {envelope.author} for {context}") from error
    return envelope


def decoded(
    decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], data: bytes, reason: str = "malformed"
) -> T:
    """Returns the content of a stranger's bytes, whose size the caller has bounded. Raises Rejected with
    `reason` for anything else, including a thousand nested lists."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(reason, str(error)) from error


def _signed_bytes(context: str, payload: bytes) -> bytes:
    # A context cannot contain a NUL, so no other pair of context and payload gives the same bytes.
    if "\0" in context:
        raise ValueError("a signing context must not contain NUL")
    return context.encode() + b"\0" + payload
