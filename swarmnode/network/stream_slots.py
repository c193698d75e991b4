"""The bounded places for incoming streams. No peer can hold one by doing nothing.

stream_server.py -> [StreamSlots] -> answer, handle_stream

A stream waits for its request, is worked on, and then waits for the far end to take the answer. If all places
are taken, a stream that waits for its peer makes room, chosen from the peer that has most of those. An honest
peer's request comes with its stream and is gone in milliseconds, so its stream is not chosen, however many
identities wait.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

MAX_STREAMS = 256

MAX_STREAMS_PER_PEER = 32
"""Most streams of one peer at once; with the bounds on requests, they limit what strangers can make us
hold."""


class StreamStage(IntEnum):
    """The progress of a stream. In the first two stages it waits for its peer."""

    HALF_OPEN = 0
    ANSWERED = 1
    WORKED_ON = 2


@dataclass(slots=True, eq=False)
class StreamSlot:
    """The place of one stream."""

    peer_id: str
    hang_up: Callable[[], None]
    stage: StreamStage = StreamStage.HALF_OPEN

    def reach(self, stage: StreamStage) -> None:
        self.stage = stage


class StreamSlots:
    """All places, in the order in which their streams came."""

    def __init__(self, *, most: int = MAX_STREAMS, most_per_peer: int = MAX_STREAMS_PER_PEER) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._taken: dict[StreamSlot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer_id: str, hang_up: Callable[[], None]) -> StreamSlot | None:
        """Returns a place for a new stream, or None. `hang_up` ends the stream if its place is needed."""
        of_peer = [slot for slot in self._taken if slot.peer_id == peer_id]
        if len(of_peer) >= self._most_per_peer and not self._make_room(of_peer):
            return None
        if len(self._taken) >= self._most and not self._make_room(self._of_the_greediest()):
            return None
        slot = StreamSlot(peer_id, hang_up)
        self._taken[slot] = None
        return slot

    def give_back(self, slot: StreamSlot) -> None:
        """Frees the place of a stream that ended, unless it was freed already to make room."""
        self._taken.pop(slot, None)

    def _of_the_greediest(self) -> list[StreamSlot]:
        waiting = Counter(slot.peer_id for slot in self._taken if slot.stage is not StreamStage.WORKED_ON)
        if not waiting:
            return []
        greediest, _ = waiting.most_common(1)[0]
        return [slot for slot in self._taken if slot.peer_id == greediest]

    def _make_room(self, among: list[StreamSlot]) -> bool:
        """Ends the stream that has waited longest for its request, or else longest for its answer to be
        read."""
        waiting = [slot for slot in among if slot.stage is not StreamStage.WORKED_ON]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda slot: slot.stage)
        del self._taken[oldest]
        oldest.hang_up()
        return True
