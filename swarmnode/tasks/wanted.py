"""Examples that somebody else solved, put between those that a round draws anyway.

training/rescue.py (wanted) -> [WantedExamples] <- rounds.py (the stream) ;  -> rollout

Who wants to learn from a stranger's answer to an example has to answer it first. Strangers choose those
examples, so they are at most every second one that we answer, and each is answered once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from swarmnode.tasks.rounds import ExampleStream, StreamPlace
from swarmnode.types import Example, ExampleKey

EVERY = 2
"""Wanted examples are at most every second one."""

MAX_WAITING = 256
"""Wanted examples that wait for their turn; the oldest are given up for new ones."""

MAX_ANSWERED = 4096
"""Examples that are remembered to have been wanted before."""


class WantedExamples(Iterator[Example]):
    """A stream's examples, and those that were wanted between them."""

    def __init__(self, stream: ExampleStream) -> None:
        self._stream = stream
        self._waiting: deque[Example] = deque(maxlen=MAX_WAITING)
        self._known: OrderedDict[ExampleKey, None] = OrderedDict()
        self._since_wanted = 0

    @property
    def place(self) -> StreamPlace:
        """Where the stream is. Wanted examples are no part of it."""
        return self._stream.place

    def want(self, examples: Iterable[Example]) -> None:
        """Answer these soon, unless they were wanted before."""
        for example in examples:
            if example.key in self._known:
                continue
            self._known[example.key] = None
            if len(self._known) > MAX_ANSWERED:
                self._known.popitem(last=False)
            self._waiting.append(example)

    def __next__(self) -> Example:
        if self._waiting and self._since_wanted + 1 >= EVERY:
            self._since_wanted = 0
            return self._waiting.popleft()
        self._since_wanted += 1
        return next(self._stream)
