"""Places for incoming streams: a bounded number, and nobody holds one by doing nothing.

daemon -> p2pd.py -> [StreamSlots] -> rpc.py (a request) | a stream's handler

A stream waits for its request, is worked on, then waits for the far end to take the answer. When all places
are taken, one that waits for its peer makes room, of the peer that has the most of them: an honest peer's
request comes with its stream and is gone in milliseconds, so it is not the one, however many identities wait.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

MAX_STREAMS = 256
MAX_STREAMS_PER_PEER = 32
"""The most streams of one peer at once; with the bounds on requests, they are all that strangers can make us
hold."""


class Stage(IntEnum):
    """How far a stream is. In the first two it waits for its peer."""

    HALF_OPEN = 0
    ANSWERED = 1
    WORKED_ON = 2


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one stream."""

    peer_id: str
    hang_up: Callable[[], None]
    stage: Stage = Stage.HALF_OPEN

    def reach(self, stage: Stage) -> None:
        self.stage = stage


class StreamSlots:
    """All places, in the order in which their streams came."""

    def __init__(self, *, most: int = MAX_STREAMS, most_per_peer: int = MAX_STREAMS_PER_PEER) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._taken: dict[Slot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer_id: str, hang_up: Callable[[], None]) -> Slot | None:
        """A place for a new stream, or None. `hang_up` ends the stream when its place is needed."""
        of_peer = [slot for slot in self._taken if slot.peer_id == peer_id]
        if len(of_peer) >= self._most_per_peer and not self._make_room(of_peer):
            return None
        if len(self._taken) >= self._most and not self._make_room(self._of_the_greediest()):
            return None
        slot = Slot(peer_id, hang_up)
        self._taken[slot] = None
        return slot

    def give_back(self, slot: Slot) -> None:
        """The stream has ended. One that had to make room gave its place back already."""
        self._taken.pop(slot, None)

    def _of_the_greediest(self) -> list[Slot]:
        waiting = Counter(slot.peer_id for slot in self._taken if slot.stage is not Stage.WORKED_ON)
        if not waiting:
            return []
        greediest, _ = waiting.most_common(1)[0]
        return [slot for slot in self._taken if slot.peer_id == greediest]

    def _make_room(self, among: list[Slot]) -> bool:
        """End the stream that has waited longest for its request, else for its answer to be taken."""
        waiting = [slot for slot in among if slot.stage is not Stage.WORKED_ON]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda slot: slot.stage)
        del self._taken[oldest]
        oldest.hang_up()
        return True
