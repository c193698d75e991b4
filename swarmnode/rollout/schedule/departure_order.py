"""The rules by which a complete group leaves: none gets too old, and none stays behind for long.

group_pool.py -> [due_in_rounds, leaves_room, DepartureOrder] -> the group that is handed out
"""

from collections.abc import Collection, Iterable
from heapq import nsmallest

# ---- the bound on age ----


def due_in_rounds(oldest_version: int | None, newest_version: int, max_lag: int) -> int:
    """Returns the number of rounds that a group can still wait before it is trained on. Negative: it is too
    old already.

    >>> due_in_rounds(7, newest_version=9, max_lag=4), due_in_rounds(None, 9, 4), due_in_rounds(4, 9, 4)
    (2, 4, -1)
    """
    return max_lag if oldest_version is None else max_lag - max(0, newest_version - oldest_version)


def leaves_room(due: int, others_due: Iterable[int], places: int, groups_per_round: int) -> bool:
    """Returns True if a group may take one of this round's `places` and all groups that are due sooner still
    fit.

    >>> leaves_room(5, [0, 1, 1], places=2, groups_per_round=8)
    True
    >>> leaves_room(5, [0, 0], places=2, groups_per_round=8), leaves_room(0, [0, 0], 2, 8)
    (False, True)
    """
    sooner = sorted(other for other in others_due if other < due)
    return all(ahead < places - 1 + other * groups_per_round for ahead, other in enumerate(sooner))


# ---- the order of leaving ----

GROUPS_PER_DELAY = 48
"""Number of groups that must leave before one more may stay behind. Those that stay are the longest, two or
three times the mean, so the mean of the leaving groups is lower by a twentieth at most."""

RELAXATION = 1 / 8
"""Share of the allowance that is taken back while fewer groups stay behind than may: if fewer are requested,
or answers become alike, the way back is slow as well."""


class DepartureOrder:
    """The number of groups that may stay behind younger ones, and the groups that may leave as a result.
    Groups are identified by serial numbers: the lower, the older.

    >>> DepartureOrder().youngest_to_leave([3, 4, 5])
    3
    >>> DepartureOrder(allowed=1.0).youngest_to_leave([3, 4, 5])
    4
    """

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        """Number of groups that may stay behind; the fraction counts towards the next one."""
        self._youngest_out = -1

    def youngest_to_leave(self, begun: Collection[int]) -> int:
        """Returns the youngest begun group that may leave; all older ones may, too."""
        oldest = nsmallest(int(self.allowed) + 1, begun)
        # A group older than one that has left is behind already.
        return max(*oldest, self._youngest_out)

    def left(self, serial: int, begun: Collection[int]) -> None:
        """Records that a group has left; `begun` holds all others."""
        self._youngest_out = max(self._youngest_out, serial)
        behind = sum(other < self._youngest_out for other in begun)
        step = 1.0 if behind >= int(self.allowed) else -RELAXATION
        self.allowed = max(0.0, self.allowed + step / GROUPS_PER_DELAY)
