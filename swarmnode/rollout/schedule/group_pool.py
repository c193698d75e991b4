"""The groups that are not handed out yet, and the queue of their members for the engine.

tasks -> drawn -> begun -> [GroupPool] -> complete -> partial_rollouts.py hands out
"""

from collections import deque
from collections.abc import Container, Iterable

from swarmnode.rollout.schedule.open_group import OpenGroup


class GroupPool:
    """The groups that are not handed out yet, and the order in which members go to the engine. Only
    book-keeping: no requests, sampling or decisions.

    A group is in exactly one of `drawn` and `begun` until it is forgotten; `complete` lists the complete ones
    among `begun`. A member that has not ended is queued, in the engine, or waits for its environment.
    """

    def __init__(self, groups: Iterable[OpenGroup] = ()) -> None:
        """`groups` have begun, oldest first; none of their members is in the engine."""
        self.begun: dict[int, OpenGroup] = {group.serial: group for group in groups}
        """Begun groups by serial, oldest first."""
        self.drawn: deque[OpenGroup] = deque()
        """Groups that have not begun, the next one first."""
        self.complete = [group for group in self.begun.values() if group.complete]
        """Complete groups in the order of completion."""
        self._line: deque[tuple[OpenGroup, int]] = deque()
        self.line_up(in_engine=())

    @property
    def unhanded(self) -> list[OpenGroup]:
        """All groups that are not handed out yet, oldest first."""
        return [*self.begun.values(), *self.drawn]

    @property
    def has_line(self) -> bool:
        return bool(self._line)

    def begin(self) -> None:
        """Begins the next drawn group: queues its members."""
        group = self.drawn.popleft()
        self.begun[group.serial] = group
        self._line.extend((group, place) for place in group.for_the_engine)

    def next_members(self, limit: int) -> tuple[OpenGroup, list[int]]:
        """Takes at most `limit` members of one group off the queue: the first, and those of its group right
        after it."""
        group, first = self._line.popleft()
        places = [first]
        while len(places) < limit and self._line and self._line[0][0] is group:
            places.append(self._line.popleft()[1])
        return group, places

    def line_up(self, in_engine: Container[str]) -> None:
        """Queues all members that have not ended and are not in the engine: those with tokens first, then by
        age."""
        waiting = [
            (group, place)
            for group in self.begun.values()
            for place in group.for_the_engine
            if group.request_id(place) not in in_engine
        ]
        self._line = deque(sorted(waiting, key=lambda entry: not entry[0].members[entry[1]].sampled))

    def start_over(self, group: OpenGroup) -> None:
        """Forgets a group's tokens and queues its members as new ones. None of them may be in the engine."""
        self._remove(group)
        group.start_over()
        self._line.extend((group, place) for place in group.for_the_engine)

    def forget(self, group: OpenGroup) -> None:
        """Removes a group that has been handed out, or that is skipped."""
        del self.begun[group.serial]
        self._remove(group)

    def _remove(self, group: OpenGroup) -> None:
        self.complete = [other for other in self.complete if other is not group]
        self._line = deque(entry for entry in self._line if entry[0] is not group)
