"""The file of a node's key: made once, never replaced, readable by its owner alone, exported as text."""

import binascii
import logging
import os
import time
from base64 import b64decode, b64encode
from pathlib import Path
from stat import S_IMODE

from swarmnode.errors import IdentityError
from swarmnode.identity.node_key import KEY_FILE_BYTES, RESTORE_HINT, NodeKey
from swarmnode.machine.storage import sync

logger = logging.getLogger(__name__)

_TEXT_PREFIX = "swarmnode-key-1"

_SECRET_MODE = 0o600


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
            f"cannot read the identity {path}: {error.strerror}", hint=RESTORE_HINT
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
