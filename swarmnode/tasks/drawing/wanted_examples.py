"""Examples that others ask for help with, between those of a node's own rounds.

exchange/gossip/helping.py -> want -> [WantedExamples] -> rollout

Strangers choose what they ask for help with, so such examples are at most every second one that we answer,
and each is answered once.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from swarmnode.bounded_dict import BoundedDict
from swarmnode.tasks.drawing.example_stream import ExampleStream, StreamPlace
from swarmnode.types import Example, ExampleKey

# ---- examples that others ask for help with ----

EVERY = 2
"""Wanted examples are at most one in this many."""

MAX_WAITING = 256
"""Most wanted examples that wait for their turn; new ones replace the oldest."""

MAX_ANSWERED = 4096
"""Most examples that are remembered as wanted before."""


class WantedExamples(Iterator[Example]):
    """A stream's examples with wanted examples in between."""

    def __init__(self, stream: ExampleStream) -> None:
        self._stream = stream
        self._waiting: deque[Example] = deque(maxlen=MAX_WAITING)
        self._known = BoundedDict[ExampleKey, None](MAX_ANSWERED)
        self._since_wanted = 0

    @property
    def place(self) -> StreamPlace:
        """The place of the stream. Wanted examples do not count."""
        return self._stream.place

    def want(self, examples: Iterable[Example]) -> None:
        """Queues these examples to be answered soon, except those that were wanted before."""
        for example in examples:
            if example.key in self._known:
                continue
            self._known[example.key] = None
            self._waiting.append(example)

    def __next__(self) -> Example:
        if self._waiting and self._since_wanted + 1 >= EVERY:
            self._since_wanted = 0
            return self._waiting.popleft()
        self._since_wanted += 1
        return next(self._stream)
