"""How a bound on the age of trained tokens is kept without throwing work away.

partial.py: may this group be handed out now? may another one begin? -> [staleness]

A group whose oldest token is of version u may be trained on at versions up to u + K: it is *due* in
u + K - newest rounds, 0 being this one. Each round hands out N groups and then the policy moves on by one.
So everything is in time as long as, for every d, the groups due within d rounds are no more than the places
left in this round plus d * N. Two rules keep that true for ever, once it is:

- a new group (due in K rounds) begins only while all open groups fit into this round and K more;
- a complete group leaves only if every group due before it still has a place. The one due first always may.

It follows that a round ends only when nobody is due any more: it waits for those groups instead of dropping
them, while the rest goes on. With K = 0 exactly N groups begin, and all are waited for. The order of a round
is otherwise the order in which groups complete.
"""

from collections.abc import Iterable


def due_in_rounds(oldest_version: int | None, newest_version: int, max_lag: int) -> int:
    """Rounds that a group can still wait before it is trained on; negative: it is too old already.

    >>> due_in_rounds(7, newest_version=9, max_lag=4), due_in_rounds(None, 9, 4), due_in_rounds(4, 9, 4)
    (2, 4, -1)
    """
    return max_lag if oldest_version is None else max_lag - max(0, newest_version - oldest_version)


def leaves_room(due: int, others_due: Iterable[int], places: int, groups_per_round: int) -> bool:
    """Whether a group may take one of this round's `places` and all that are due before it still fit.

    >>> leaves_room(5, [0, 1, 1], places=2, groups_per_round=8)
    True
    >>> leaves_room(5, [0, 0], places=2, groups_per_round=8), leaves_room(0, [0, 0], 2, 8)
    (False, True)
    """
    sooner = sorted(other for other in others_due if other < due)
    return all(ahead < places - 1 + other * groups_per_round for ahead, other in enumerate(sooner))
