"""The file of a node's key: created once, never replaced automatically, readable only by its owner."""

import logging
import os
from pathlib import Path
from stat import S_IMODE

from swarmnode.errors import IdentityError
from swarmnode.identity.node_key import KEY_FILE_BYTES, RESTORE_HINT, NodeKey
from swarmnode.machine.storage import make_folder, sync

logger = logging.getLogger(__name__)

_SECRET_MODE = 0o600


def load_or_create(path: Path) -> NodeKey:
    """Returns the key at `path`, created if there is none. An unreadable key raises IdentityError and is
    never replaced."""
    if not os.path.lexists(path):
        key = NodeKey.generate()
        if install(key, path):
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


def keep_secret(path: Path, descriptor: int) -> None:
    """Removes other users' permission to read a secret, with a warning. It repairs instead of refusing: a key
    restored with `cp` should not keep a node off the network."""
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
        "other users could read %s (mode %04o); its mode is now fixed. If one may have, make a new key",
        path,
        mode,
    )


def install(key: NodeKey, path: Path, *, replace: bool = False) -> bool:
    """Writes the key file, completely or not at all. Returns False if another key got there first."""
    temporary = path.with_name(f".{path.name}.{os.urandom(3).hex()}.tmp")
    try:
        make_folder(path.parent)
        write_secret(temporary, key.to_protobuf())
        try:
            if replace:
                temporary.replace(path)
            else:
                # Unlike a rename, a link never overwrites a key that another process created meanwhile.
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


def write_secret(path: Path, data: bytes) -> None:
    """Writes a new file that only we can ever read, and that is on disk on return."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _SECRET_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
