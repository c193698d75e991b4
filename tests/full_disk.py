"""A disk that takes nothing more, for this process."""

import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def full_disk() -> Generator[None]:
    """Context in which files of this process cannot grow: writing raises OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
