"""Every group that is not handed out yet, and the order in which members go to the engine.

examples -> [drawn -> begun -> complete] -> partial.py hands out
                        |
                        v  line of members -> engine

A group is in exactly one of `drawn` and `begun` until it is forgotten; `complete` lists those of `begun` that
are. A member that has not ended is either in line or in the engine.
"""

from collections import deque
from collections.abc import Container, Iterable

from swarmnode.rollout.schedule.group import OpenGroup


class GroupPool:
    """Book-keeping alone: nothing here asks, samples or decides."""

    def __init__(self, groups: Iterable[OpenGroup] = ()) -> None:
        """`groups` have begun, the oldest first; no member is in the engine."""
        self.begun: dict[int, OpenGroup] = {group.serial: group for group in groups}
        """Begun groups by serial, the oldest first."""
        self.drawn: deque[OpenGroup] = deque()
        """Not begun, the next one first."""
        self.complete = [group for group in self.begun.values() if group.complete]
        """Complete groups in the order of completion."""
        self._line: deque[tuple[OpenGroup, int]] = deque()
        self.line_up(in_engine=())

    @property
    def unhanded(self) -> list[OpenGroup]:
        """All of them, the oldest first."""
        return [*self.begun.values(), *self.drawn]

    @property
    def has_line(self) -> bool:
        return bool(self._line)

    def begin(self) -> None:
        """The next drawn group begins: its members join the line."""
        group = self.drawn.popleft()
        self.begun[group.serial] = group
        self._line.extend((group, place) for place in group.unfinished)

    def reopen(self, group: OpenGroup) -> None:
        """A group that was handed out has begun again: its new members join the line."""
        self.begun[group.serial] = group
        self._line.extend((group, place) for place in group.unfinished)

    def next_members(self, limit: int) -> tuple[OpenGroup, list[int]]:
        """Take the first in line, and those behind it of the same group, at most `limit`."""
        group, first = self._line.popleft()
        places = [first]
        while len(places) < limit and self._line and self._line[0][0] is group:
            places.append(self._line.popleft()[1])
        return group, places

    def line_up(self, in_engine: Container[str]) -> None:
        """Line up all that have neither ended nor are in the engine: first what has tokens, then by age."""
        waiting = [
            (group, place)
            for group in self.begun.values()
            for place in group.unfinished
            if group.request_id(place) not in in_engine
        ]
        self._line = deque(sorted(waiting, key=lambda entry: not entry[0].members[entry[1]].sampled))

    def start_over(self, group: OpenGroup) -> None:
        """Forget its tokens; its members line up as new ones. None of them may be in the engine."""
        self._remove(group)
        group.start_over()
        self._line.extend((group, place) for place in group.unfinished)

    def forget(self, group: OpenGroup) -> None:
        """It has been handed out, or is left out."""
        del self.begun[group.serial]
        self._remove(group)

    def _remove(self, group: OpenGroup) -> None:
        self.complete = [other for other in self.complete if other is not group]
        self._line = deque(entry for entry in self._line if entry[0] is not group)
