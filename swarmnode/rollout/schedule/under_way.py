"""Groups and requests under way: queued, in the engine, and the rules by which a group begins or leaves."""

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from heapq import nsmallest

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Engine, InFlight, Output, Request
from swarmnode.rollout.schedule.group import OpenGroup

FALLBACKS: tuple[InFlight, ...] = ("keep", "recompute", "abort")
"""Modes of an update, the cheapest first."""


class GroupPool:
    """The groups that are not handed out yet, and the order in which members go to the engine: book-keeping
    alone, without requests, sampling or decisions.

    A group is in exactly one of `drawn` and `begun` until it is forgotten; `complete` lists the complete ones
    among `begun`. A member that has not ended is queued, in the engine, or waits for its environment.
    """

    def __init__(self, groups: Iterable[OpenGroup] = ()) -> None:
        """`groups` have begun, the oldest first; none of their members is in the engine."""
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
        """All groups that are not handed out yet, the oldest first."""
        return [*self.begun.values(), *self.drawn]

    @property
    def has_line(self) -> bool:
        return bool(self._line)

    def begin(self) -> None:
        """Begins the next drawn group: its members are queued."""
        group = self.drawn.popleft()
        self.begun[group.serial] = group
        self._line.extend((group, place) for place in group.for_the_engine)

    def next_members(self, limit: int) -> tuple[OpenGroup, list[int]]:
        """Takes the first member of the queue, and the following ones of the same group, at most `limit`."""
        group, first = self._line.popleft()
        places = [first]
        while len(places) < limit and self._line and self._line[0][0] is group:
            places.append(self._line.popleft()[1])
        return group, places

    def line_up(self, in_engine: Container[str]) -> None:
        """Queues all members that have neither ended nor are in the engine: those with tokens first, then by
        age."""
        waiting = [
            (group, place)
            for group in self.begun.values()
            for place in group.for_the_engine
            if group.request_id(place) not in in_engine
        ]
        self._line = deque(sorted(waiting, key=lambda entry: not entry[0].members[entry[1]].sampled))

    def start_over(self, group: OpenGroup) -> None:
        """Forgets a group's tokens; its members are queued as new ones. None of them may be in the engine."""
        self._remove(group)
        group.start_over()
        self._line.extend((group, place) for place in group.for_the_engine)

    def forget(self, group: OpenGroup) -> None:
        """Removes a group that has been handed out, or is left out."""
        del self.begun[group.serial]
        self._remove(group)

    def _remove(self, group: OpenGroup) -> None:
        self.complete = [other for other in self.complete if other is not group]
        self._line = deque(entry for entry in self._line if entry[0] is not group)


class RequestsInFlight:
    """The requests in the engine by name, with each one's group and place."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[OpenGroup, int, int]] = {}  # and its tokens less the steps until then
        self._steps = 0
        self._tokens_at_step_0 = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    @property
    def context(self) -> int:
        """Tokens that all requests look back on together, prompts included, if each step gave each a token:
        an engine in another process is further than that, and a full one lets some wait."""
        return self._tokens_at_step_0 + self._steps * len(self._places)

    def add(self, group: OpenGroup, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Records that the engine has taken these requests for these places of the group."""
        for place, request in zip(places, requests, strict=True):
            tokens = len(request.prompt_ids) + len(request.sampled) - self._steps
            self._places[request.request_id] = (group, place, tokens)
            self._tokens_at_step_0 += tokens

    def step_done(self) -> None:
        self._steps += 1

    def take(self, output: Output) -> tuple[OpenGroup, int]:
        """Returns an output of the engine to its group. Returns the group and the place in it. Raises
        EngineError for a request that is not ours."""
        if output.request_id not in self._places:
            raise EngineError(
                f"the engine returned request {output.request_id}, which is not ours",
                hint="while partial rollouts run, nobody else may use their engine: park() them first",
            )
        group, place, tokens = self._places.pop(output.request_id)
        self._tokens_at_step_0 -= tokens
        group.record(place, output)
        return group, place


def nearest_mode(engine: Engine, wanted: InFlight) -> InFlight | None:
    """Returns the wanted mode of an update, or the nearest available one. None: the engine has to be
    empty."""
    can = engine.capabilities.inflight
    return next((mode for mode in (wanted, *FALLBACKS) if mode in can and _possible(engine, mode)), None)


def _possible(engine: Engine, mode: InFlight) -> bool:
    return mode != "pin" or len(engine.stats().live_versions) < engine.capabilities.max_versions


# ---- the bound on age ----


def due_in_rounds(oldest_version: int | None, newest_version: int, max_lag: int) -> int:
    """Returns the rounds that a group can still wait before it is trained on. Negative: it is too old
    already.

    >>> due_in_rounds(7, newest_version=9, max_lag=4), due_in_rounds(None, 9, 4), due_in_rounds(4, 9, 4)
    (2, 4, -1)
    """
    return max_lag if oldest_version is None else max_lag - max(0, newest_version - oldest_version)


def leaves_room(due: int, others_due: Iterable[int], places: int, groups_per_round: int) -> bool:
    """Returns True if a group may take one of this round's `places` and all groups due before it still fit.

    >>> leaves_room(5, [0, 1, 1], places=2, groups_per_round=8)
    True
    >>> leaves_room(5, [0, 0], places=2, groups_per_round=8), leaves_room(0, [0, 0], 2, 8)
    (False, True)
    """
    sooner = sorted(other for other in others_due if other < due)
    return all(ahead < places - 1 + other * groups_per_round for ahead, other in enumerate(sooner))


# ---- whose turn it is to leave ----

GROUPS_PER_DELAY = 48
"""Groups that leave for one more that may stay behind them. Those that stay are the longest, two or three
times the mean: so the mean of the groups that leave is lower by a twentieth at most."""

RELAXATION = 1 / 8
"""Share of the allowance that is taken back while fewer groups stay behind than may: if fewer are asked for,
or answers become alike, the way back is slow as well."""


class DepartureOrder:
    """The number of groups that may stay behind younger ones, and the groups that this allows to leave.
    Groups are identified by serial numbers: the lower, the older.

    >>> DepartureOrder().youngest_to_leave([3, 4, 5])
    3
    >>> DepartureOrder(allowed=1.0).youngest_to_leave([3, 4, 5])
    4
    """

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        """So many groups may stay behind; the fraction counts towards the next one."""
        self._youngest_out = -1

    def youngest_to_leave(self, begun: Collection[int]) -> int:
        """Returns the youngest begun group that may leave, as all older ones may."""
        oldest = nsmallest(int(self.allowed) + 1, begun)
        # Who is older than one that has left is behind already.
        return max(*oldest, self._youngest_out)

    def left(self, serial: int, begun: Collection[int]) -> None:
        """Records that a group has left; `begun` are all others."""
        self._youngest_out = max(self._youngest_out, serial)
        behind = sum(other < self._youngest_out for other in begun)
        step = 1.0 if behind >= int(self.allowed) else -RELAXATION
        self.allowed = max(0.0, self.allowed + step / GROUPS_PER_DELAY)
