"""The identity of a node: the key made at its first run, and its peer id, name and signatures."""

import binascii
import hashlib
import logging
import os
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from stat import S_IMODE
from typing import Annotated

import base58
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.errors import IdentityError, Rejected
from swarmnode.machine.storage import sync

logger = logging.getLogger(__name__)


# ---- peer ids ----

PUBLIC_KEY_BYTES = 32

_MULTIHASH_PREFIX = bytes.fromhex("002408011220")
"""Prefix of a peer id: identity hash of 36 bytes; protobuf field 1 (key type) = Ed25519; field 2 (data) of 32
bytes."""

MAX_PEER_ID_CHARS = 52
"""Longest Ed25519 peer id. Decoding base58 is quadratic, so the length is checked first."""


def peer_id_from_public_key(public_key: bytes) -> str:
    """Spells a raw Ed25519 public key as a libp2p peer id.

    >>> peer_id_from_public_key(bytes(32))
    '12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw'
    """
    return base58.b58encode(_MULTIHASH_PREFIX + public_key).decode("ascii")


def public_key_from_peer_id(peer_id: str) -> bytes:
    """Reads the raw Ed25519 public key back out of a peer id. Raises Rejected for anything else.

    >>> public_key_from_peer_id("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw") == bytes(32)
    True
    """
    if len(peer_id) > MAX_PEER_ID_CHARS or not peer_id.isascii():
        raise Rejected("bad_peer_id", "not an Ed25519 peer id")
    try:
        multihash = base58.b58decode(peer_id)
    except ValueError as error:
        raise Rejected("bad_peer_id", "not base58") from error
    prefix, public_key = multihash[:-PUBLIC_KEY_BYTES], multihash[-PUBLIC_KEY_BYTES:]
    if prefix != _MULTIHASH_PREFIX:
        raise Rejected("bad_peer_id", f"{peer_id} is not an Ed25519 peer id")
    return public_key


# ---- the key and its file ----

SEED_BYTES = 32
KEY_FILE_BYTES = 68
_KEY_FILE_PREFIX = bytes.fromhex("08011240")
_TEXT_PREFIX = "swarmnode-key-1"
_SECRET_MODE = 0o600
_RESTORE_HINT = "put your backup back, or move the file away and start again under a new identity"


@dataclass(frozen=True)
class NodeKey:
    """An Ed25519 key pair. The peer id and the name follow from it.

    >>> NodeKey(bytes(32)).peer_id
    '12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN'
    """

    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES:
            raise IdentityError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(self.seed)}")

    @classmethod
    def generate(cls) -> "NodeKey":
        return cls(os.urandom(SEED_BYTES))

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    @cached_property
    def public_bytes(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    @cached_property
    def peer_id(self) -> str:
        return peer_id_from_public_key(self.public_bytes)

    @property
    def name(self) -> str:
        return memorable_name(self.peer_id)

    def sign(self, data: bytes) -> bytes:
        """Returns the raw signature of `data`, 64 bytes. Messages go through `seal`, which adds the
        context."""
        return self._private.sign(data)

    def to_protobuf(self) -> bytes:
        """Returns the key in libp2p's format, which is also the file's."""
        return _KEY_FILE_PREFIX + self.seed + self.public_bytes

    @classmethod
    def from_protobuf(cls, data: bytes) -> "NodeKey":
        """Reads `to_protobuf` back. Raises IdentityError for anything but a consistent Ed25519 key."""
        if len(data) != KEY_FILE_BYTES or not data.startswith(_KEY_FILE_PREFIX):
            raise IdentityError(
                f"not a libp2p Ed25519 private key ({len(data)} bytes, expected {KEY_FILE_BYTES})",
                hint=_RESTORE_HINT,
            )
        key = cls(data[4 : 4 + SEED_BYTES])
        if data[4 + SEED_BYTES :] != key.public_bytes:
            raise IdentityError(
                "the key is damaged: its public half does not belong to its seed", hint=_RESTORE_HINT
            )
        return key


def load_or_create(path: Path) -> NodeKey:
    """Returns the key at `path`, made if there is none. An unreadable one raises IdentityError and is never
    replaced."""
    if not os.path.lexists(path):
        key = NodeKey.generate()
        if _install(key, path):
            logger.info("created the identity %s (%s) in %s", key.name, key.peer_id, path)
            return key
    return load(path)


def load(path: Path) -> NodeKey:
    """Returns the key at `path`. Permissions that let others read it are repaired, with a warning."""
    try:
        with path.open("rb") as file:
            data = file.read(KEY_FILE_BYTES + 1)
            keep_secret(path, file.fileno())
    except OSError as error:
        raise IdentityError(
            f"cannot read the identity {path}: {error.strerror}", hint=_RESTORE_HINT
        ) from error
    try:
        return NodeKey.from_protobuf(data)
    except IdentityError as error:
        raise IdentityError(f"{path}: {error.message}", hint=error.hint) from error


def export_key(path: Path) -> str:
    """Returns the key at `path` as one line of text, for a password manager or a piece of paper.

    The line names its peer id, by which `import_key` notices a slip of the pen. Its holder can act as this
    node.
    """
    key = load(path)
    return f"{_TEXT_PREFIX}:{key.peer_id}:{b64encode(key.to_protobuf()).decode('ascii')}"


def import_key(text: str, path: Path, *, overwrite: bool = False) -> NodeKey:
    """Installs an exported key at `path`. A key that is already there is kept beside it, never lost."""
    key = _parse_exported(text)
    if not os.path.lexists(path) and _install(key, path):
        return key
    if not overwrite:
        raise IdentityError(
            f"{path} already holds an identity",
            hint="import with --overwrite to replace it; the old key is then kept beside it as a backup",
        )
    backup = _back_up(path)
    _install(key, path, replace=True)
    logger.warning(
        "the identity in %s is now %s (%s); the one before is kept in %s", path, key.name, key.peer_id, backup
    )
    return key


def _parse_exported(text: str) -> NodeKey:
    hint = "paste the whole line that `swarmnode identity export` printed"
    parts = text.strip().split(":")
    if len(parts) != 3 or parts[0] != _TEXT_PREFIX:
        raise IdentityError("this is not an exported swarmnode key", hint=hint)
    try:
        key = NodeKey.from_protobuf(b64decode(parts[2], validate=True))
    except (binascii.Error, ValueError, IdentityError) as error:
        raise IdentityError("the exported key is damaged", hint=hint) from error
    if key.peer_id != parts[1]:
        raise IdentityError(
            f"the exported key is damaged: it should be {parts[1]} but is {key.peer_id}", hint=hint
        )
    return key


def keep_secret(path: Path, descriptor: int) -> None:
    """Takes the permission to read a secret from others, with a warning. It repairs instead of refusing: a
    key restored with `cp` should not keep a node off the network."""
    mode = S_IMODE(os.fstat(descriptor).st_mode)
    if not mode & 0o077:
        return
    try:
        os.fchmod(descriptor, _SECRET_MODE)
    except OSError as error:
        raise IdentityError(
            f"other users of this machine can read {path} (mode {mode:04o})", hint=f"run: chmod 600 {path}"
        ) from error
    logger.warning(
        "other users could read %s (mode %04o); it is now yours alone. If one may have, make a new key",
        path,
        mode,
    )


def _install(key: NodeKey, path: Path, *, replace: bool = False) -> bool:
    """Puts the key file in place whole or not at all. Returns False if another key got there first."""
    temporary = path.with_name(f".{path.name}.{os.urandom(3).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_secret(temporary, key.to_protobuf())
        try:
            if replace:
                temporary.replace(path)
            else:
                # Unlike a rename, a link never overwrites a key that another process made meanwhile.
                path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise IdentityError(
            f"cannot write the identity {path}: {error.strerror}",
            hint="check the disk, or choose another --home DIR",
        ) from error
    return True


def _back_up(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    backup = path.with_name(f"{path.name}.{stamp}.{os.urandom(3).hex()}.bak")
    try:
        _write_secret(backup, path.read_bytes())
    except OSError as error:
        raise IdentityError(
            f"cannot keep a backup of {path}: {error.strerror}", hint="nothing was changed"
        ) from error
    return backup


def _write_secret(path: Path, data: bytes) -> None:
    """Writes a new file that is readable by us alone from its first moment, and on the disk on return."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _SECRET_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---- signed bytes ----

SIGNATURE_BYTES = 64


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A payload and its author's signature. Only one returned by `unseal` can be trusted."""

    author: Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID_CHARS)]
    payload: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(key: NodeKey, context: str, payload: bytes) -> bytes:
    """Signs `payload` for one purpose, for example `seal(key, "swarmnode/3/rollout-header", header)`."""
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
    try:
        envelope = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected("malformed", str(error)) from error
    public_key = Ed25519PublicKey.from_public_bytes(public_key_from_peer_id(envelope.author))
    try:
        public_key.verify(envelope.signature, _signed_bytes(context, envelope.payload))
    except InvalidSignature as error:
        raise Rejected("bad_signature", f"not signed by {envelope.author} for {context}") from error
    return envelope


def _signed_bytes(context: str, payload: bytes) -> bytes:
    # A NUL cannot occur in a context, so no context and payload can be cut elsewhere into another pair.
    if "\0" in context:
        raise ValueError("a signing context must not contain NUL")
    return context.encode() + b"\0" + payload


# ---- names that people can say ----


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MOODS = _words(
    """
    able agile alert amused ardent bold brave brisk calm candid careful cheerful clever content
    cordial curious daring decent earnest eager fair fearless fond frank friendly gentle glad
    graceful happy hardy helpful honest hopeful humble jolly jovial keen kind lively loyal lucid
    merry mild modest neat nimble noble patient placid polite proud prudent quick quiet sincere
    steady sunny tender tidy trusty upbeat vivid warm witty
    """
)

LOOKS = _words(
    """
    amber ashen azure beige black blond blue bronze brown chrome cobalt copper coral cream
    crimson cyan dappled dusky ebony emerald fawn flaxen frosted gilded golden granite green
    grey hazel indigo ivory jade khaki lilac lime maroon mauve mossy navy ochre olive opal
    orange pale pearly pink plum purple red rosy ruby russet rusty sable saffron sandy scarlet
    silver speckled striped tawny teal violet white
    """
)

ANIMALS = _words(
    """
    alpaca antelope badger beaver bison bobcat buffalo camel caribou cheetah cobra condor cougar
    coyote crane dingo dolphin donkey eagle egret falcon ferret finch fox gazelle gecko gibbon
    heron hyena ibex iguana impala jackal jaguar koala lemur leopard llama lynx macaw magpie
    marmot marten meerkat moose newt ocelot orca osprey otter owl panda panther pelican puffin
    puma rabbit raven salmon seal stork tapir walrus wombat
    """
)


def memorable_name(peer_id: str) -> str:
    """Returns the readable name of a peer, computed from its id alone.

    >>> memorable_name("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw")
    'graceful-copper-puma'
    """
    digest = hashlib.blake2b(peer_id.encode(), digest_size=3, person=b"swarmnode-name").digest()
    words = (MOODS, LOOKS, ANIMALS)
    return "-".join(choices[byte % len(choices)] for choices, byte in zip(words, digest, strict=True))
