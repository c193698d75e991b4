"""File access by landlock: a confined program may read a few folders, write one, and open nothing else."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .kernel import syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14

_RIGHTS_SINCE = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: 1 << 15}
"""Rights on files that each version of landlock knows first: whatever is known is forbidden by default."""

_SCOPES = 0b11
"""No signals to processes outside, and no abstract Unix sockets of theirs: from version 6 on."""

_READING = _READ_FILE | _READ_DIR
_WRITING = (
    _READING
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_OF_A_FILE = _READ_FILE | _WRITE_FILE | _TRUNCATE


def landlock_version() -> int:
    """Returns the version of landlock in this kernel. 0: it has none, or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Forbids this process to open anything outside these files and folders, for good. Raises OSError."""
    version = landlock_version()
    handled = 0
    for since, rights in _RIGHTS_SINCE.items():
        handled |= rights if since <= version else 0
    ruleset = _ruleset(version, handled)
    for path in readable:
        _allow(ruleset, path, _READING & handled)
    for path in writable:
        _allow(ruleset, path, _WRITING & handled)
    syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _ruleset(version: int, handled: int) -> int:
    """Creates a landlock ruleset. It forbids TCP too, if landlock knows it, in case a socket leaks in."""
    attributes = struct.pack("=QQQ", handled, 0b11, _SCOPES)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    return syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, place)
        syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(place)
