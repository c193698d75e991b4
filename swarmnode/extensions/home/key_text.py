"""A node's key as a line of text, for a password manager or a piece of paper.

identity_command.py -> [export_key, import_key] -> identity/key_file.py
"""

import binascii
import logging
import os
import time
from base64 import b64decode, b64encode
from pathlib import Path

from swarmnode.errors import IdentityError
from swarmnode.identity.key_file import install, load, write_secret
from swarmnode.identity.node_key import NodeKey

logger = logging.getLogger(__name__)

_TEXT_PREFIX = "swarmnode-key-1"


def export_key(path: Path) -> str:
    """Returns the key at `path` as one line of text.

    The line names its peer id, by which `import_key` notices a slip of the pen. Its holder can act as this
    node.
    """
    key = load(path)
    return f"{_TEXT_PREFIX}:{key.peer_id}:{b64encode(key.to_protobuf()).decode('ascii')}"


def import_key(text: str, path: Path, *, overwrite: bool = False) -> NodeKey:
    """Installs an exported key at `path`. A key that is already there is kept beside it, never lost."""
    key = _parse_exported(text)
    if not os.path.lexists(path) and install(key, path):
        return key
    if not overwrite:
        raise IdentityError(
            f"{path} already holds an identity",
            hint="import with --overwrite to replace it; the old key is then kept beside it as a backup",
        )
    backup = _back_up(path)
    install(key, path, replace=True)
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


def _back_up(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    backup = path.with_name(f"{path.name}.{stamp}.{os.urandom(3).hex()}.bak")
    try:
        write_secret(backup, path.read_bytes())
    except OSError as error:
        raise IdentityError(
            f"cannot keep a backup of {path}: {error.strerror}", hint="nothing was changed"
        ) from error
    return backup
