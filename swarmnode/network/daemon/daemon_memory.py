"""The memory that one life of the daemon may take.

psutil -> [DaemonMemory] -> daemon_supervisor.py
"""

from typing import Literal

import psutil

MEMORY_INTERVAL_S = 0.2
"""Seconds between checks of the daemon's memory. Floods were seen to grow it by 45 MiB/s: 10 MiB between two
checks."""

MAX_GROWTH_BYTES = 160 * 2**20
"""Most bytes that a life may grow above its smallest size. Two hundred honest peers take less than half of
it."""

RELIEF_AT_BYTES = 64 * 2**20

RELIEF_EVERY_BYTES = 24 * 2**20
"""Growth in bytes at which the largest senders are disconnected, at first and then again."""

GO_MEMORY_LIMIT = "208MiB"
"""Memory limit of the daemon's garbage collector (GOMEMLIMIT): above it the collector works harder, before we
have to act.

It is just below the size at which a life is replaced. A collector that must stay far below the size of a
flood, all of it live, runs without end (with 128 MiB here it took half of a node's rounds), and the daemon
never grows enough to be replaced.
"""

Verdict = Literal["calm", "swollen", "over"]


def resident_bytes(pid: int) -> int | None:
    """Returns the bytes of memory that a process holds. None: the process is gone."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None


class DaemonMemory:
    """Judges the memory of one life.

    >>> memory = DaemonMemory()
    >>> [memory.judge(mib * 2**20) for mib in (50, 60, 120, 130, 150, 220)]
    ['calm', 'calm', 'swollen', 'calm', 'swollen', 'over']
    """

    def __init__(self) -> None:
        self._least_bytes: int | None = None
        self._relief_at_bytes = RELIEF_AT_BYTES
        self.grown_bytes = 0
        """The growth at the last look."""

    def judge(self, resident: int) -> Verdict:
        """Returns the action that is due: nothing, relief, or a new life."""
        self._least_bytes = resident if self._least_bytes is None else min(self._least_bytes, resident)
        self.grown_bytes = resident - self._least_bytes
        if self.grown_bytes > MAX_GROWTH_BYTES:
            return "over"
        if self.grown_bytes > self._relief_at_bytes:
            self._relief_at_bytes = self.grown_bytes + RELIEF_EVERY_BYTES
            return "swollen"
        return "calm"
