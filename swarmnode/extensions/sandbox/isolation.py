"""The ways of isolating a program that this machine has, and the files that the program may see."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.extensions.sandbox.confinement.landlock import landlock_version
from swarmnode.extensions.sandbox.confinement.seccomp import seccomp_is_here

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Paths of the system that the standard library needs: shared libraries and time zones."""

_DEVICES = ("/dev/null", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Isolation:
    """The barriers between a program and this machine."""

    namespaces: bool = False
    landlock: int = 0
    """Version of landlock. 0: it is not used."""
    seccomp: bool = False

    @property
    def confines(self) -> bool:
        """True if the program can reach neither files nor processes nor the network."""
        return self.seccomp and bool(self.namespaces or self.landlock)

    def describe(self) -> str:
        """Returns the isolation in one sentence.

        >>> Isolation(landlock=7, seccomp=True).describe()
        'programs run in a sandbox of landlock 7 and seccomp'
        """
        layers = [
            *(["namespaces"] if self.namespaces else []),
            *([f"landlock {self.landlock}"] if self.landlock else []),
            *(["seccomp"] if self.seccomp else []),
        ]
        if not self.confines:
            return "programs would run without a sandbox"
        return f"programs run in a sandbox of {', '.join(layers[:-1])} and {layers[-1]}"


UNCONFINED = Isolation()
"""No isolation: limits alone, which a malicious program gets round."""


def candidates() -> Iterator[Isolation]:
    """Yields the isolations that this machine may offer, the strongest first."""
    if sys.platform != "linux" or not seccomp_is_here():
        return
    version = landlock_version()
    yield Isolation(namespaces=True, landlock=version, seccomp=True)
    if version:
        yield Isolation(landlock=version, seccomp=True)


def interpreter() -> str:
    """Returns the path of the interpreter itself, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


def runtime_paths() -> list[str]:
    """Returns the files and folders that Python needs, folders before their contents."""
    bases = {sys.base_prefix, sys.base_exec_prefix} - {"/usr"}
    shared = [f"{base}/{name}" for base in sorted(bases) for name in ("lib", "lib64")]
    paths = [*_SYSTEM, *shared, sysconfig.get_path("stdlib"), *_DEVICES]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]
