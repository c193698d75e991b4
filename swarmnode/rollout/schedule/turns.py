"""Whose turn it is to leave: how answers of all lengths are trained on from the first round on.

partial.py: may this complete group be handed out before older ones that are not complete? -> [Turns]

Where the engine is kept full, short answers come back first. Once things are under way that is no bias: for
each long answer that stays behind another one comes in. But at the start nobody comes in yet. All that was
asked, less what is trained on, is what is under way, and that is long: so many answers must stay behind, with
so many more tokens than the mean, before rounds are as long as what is asked. Whichever way they are handed
out this has to be paid once. Here it is paid slowly: groups leave in the order in which they were drawn, and
each that leaves lets a small part of another one stay behind, until nobody has to wait for that any more.

Meanwhile groups wait for older ones. The engine has as much to do as ever; what is trained on is older by as
much, within the bound of staleness.py, which comes first.
"""

from collections.abc import Collection
from heapq import nsmallest

GROUPS_PER_DELAY = 48
"""Groups that leave for one more that may stay behind them. Those that stay are the longest, of two or three
times the mean: so the mean of what leaves is lower by a twentieth at most."""

RELAXATION = 1 / 8
"""So much of that is taken back where fewer stay behind than may: when fewer are asked for, or answers become
alike, the way back is slow as well."""


class Turns:
    """How many groups may stay behind younger ones, and which that allows to leave. Groups are told apart by
    serial numbers: the lower, the older.

    >>> Turns().youngest_to_leave([3, 4, 5]), Turns(allowed=1.0).youngest_to_leave([3, 4, 5])
    (3, 4)
    """

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        """So many groups may stay behind; the fraction counts towards the next one."""
        self._youngest_out = -1

    def youngest_to_leave(self, begun: Collection[int]) -> int:
        """The youngest begun group that may leave, with all older ones."""
        oldest = nsmallest(int(self.allowed) + 1, begun)
        # Who is older than one that has left is behind already.
        return max(*oldest, self._youngest_out)

    def left(self, serial: int, begun: Collection[int]) -> None:
        """A group has left; `begun` are all others."""
        self._youngest_out = max(self._youngest_out, serial)
        behind = sum(other < self._youngest_out for other in begun)
        step = 1.0 if behind >= int(self.allowed) else -RELAXATION
        self.allowed = max(0.0, self.allowed + step / GROUPS_PER_DELAY)
