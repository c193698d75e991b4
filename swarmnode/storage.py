"""Writing so that a file is either the old one or the new one, also when the power goes.

identity, network, training, node -> [storage] -> disk

Errors are OSError: whoever writes knows what a full disk means to them.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write under another name and rename: a reader never sees half of it, a crash leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file piece by piece, wait until it is on the disk, and return the SHA-256 of it all."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, whatever its size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, so that their names outlive a power cut as well."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
