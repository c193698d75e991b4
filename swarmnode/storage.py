"""Writing so that a file is either the old one or the new one, also when the power goes.

identity, network, training, node -> [storage] -> disk

Errors are OSError: whoever writes knows what a full disk means to them.
"""

import os
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
