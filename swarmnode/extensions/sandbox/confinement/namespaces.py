"""A world of its own for a program: no other process, no network, and a root with the folders it may read.

launch.py -> [namespaces] -> kernel.py

Whoever may have a user namespace may make these. Files are mounted read-only into an empty root in memory, so
there is nothing else to be found, and what a program writes lies in a file system of bounded size, which
vanishes with it.
"""

from __future__ import annotations

import ctypes
import errno
import os

from .kernel import LIBC, checked, number_of, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NEW_USER = 0x10000000
_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Flags CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID and NEWNET, joined."""

_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_NO_TIMES, _RELATIVE_TIMES = 1 << 10, 1 << 21
_KEPT = 0xF | _NO_TIMES | 1 << 11
"""Mount flags MS_RDONLY, NOSUID, NODEV, NOEXEC, NOATIME and NODIRATIME, which have the same numbers in
statvfs."""
_DETACH = 2

NOBODY = 65534
"""User id of a program that root starts."""

MOST_FILES = 1024
"""Files and folders that a program may make."""


def leave() -> None:
    """Leaves the namespaces that this process shares; its next child becomes the first process of a new one.
    Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    if user == 0 and _left(_OTHERS):
        return
    checked(LIBC.unshare(_NEW_USER | _OTHERS), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{NOBODY} {user} 1\n")
    _write("/proc/self/gid_map", f"{NOBODY} {group} 1\n")


def _left(kinds: int) -> bool:
    """Leaves these kinds of namespaces. Returns False if that needs a right which we lack."""
    try:
        checked(LIBC.unshare(kinds), "unshare")
    except OSError as error:
        if error.errno == errno.EPERM:
            return False
        raise
    return True


def enter_root(place: str, readable: Sequence[str], disk_bytes: int) -> None:
    """Makes an empty root at the folder `place`, with `readable` and an empty /tmp in it, and moves there.
    Raises OSError."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", place, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir(place + "/tmp")
    options = f"size={disk_bytes},nr_inodes={MOST_FILES},mode=777"
    _mount("tmpfs", place + "/tmp", "tmpfs", _NO_SETUID | _NO_DEVICES, options)
    for path in readable:
        _show(path, place)
    os.chdir(place)
    syscall(number_of("pivot_root") or 0, b".", b".")
    checked(LIBC.umount2(b".", _DETACH), "umount2")
    _mount(None, "/", None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | _NO_DEVICES)
    os.chdir("/tmp")


def _show(path: str, place: str) -> None:
    """Mounts a file or folder read-only at the same path within `place`; a link is made again."""
    target = place + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return  # Within a folder that is there already.
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    _mount(path, target, None, _BIND | _RECURSIVE)
    # What the mount had must be said again: a namespace may not take it off. Both count alike but for one.
    kept = os.statvfs(target).f_flag & _KEPT
    times = 0 if kept & _NO_TIMES else _RELATIVE_TIMES
    devices = 0 if path.startswith("/dev/") else _NO_DEVICES
    _mount(None, target, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | devices | kept | times)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    result = LIBC.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None)
    checked(result, f"mount {source or ''} at {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
