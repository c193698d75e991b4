"""A data node's micro-batches in flight: one record for each attempt.

iteration_driver.py (an attempt begins) -> [InFlightMicroBatch] <- iteration_driver.py (messages that come
    home)
"""

import asyncio
from dataclasses import dataclass

from torch import Tensor

from swarmnode.extensions.pipeline.wire.hop_messages import ForwardHop, Hop, Trouble


@dataclass(frozen=True, slots=True)
class HopFailure:
    """The reason why an attempt failed."""

    position: int
    """Position on the path of the node at fault; 0 is our own node."""
    trouble: Trouble
    told_by: int | None = None
    """The neighbour on the path that reported this; the report may be wrong. None: we saw it ourselves."""


@dataclass(slots=True, eq=False)
class InFlightMicroBatch:
    """One attempt at one of our micro-batches, sent along its path and not back yet."""

    hop: ForwardHop
    """Its first message. Its tensor header has the shape of the hidden states, but not the final dtype."""
    awaits: type[Hop] | None = None
    """Kind of the next message to arrive."""
    arrival: "asyncio.Future[Tensor | HopFailure] | None" = None

    def expect(self, kind: type[Hop]) -> "asyncio.Future[Tensor | HopFailure]":
        """Return a future for the next message, which must be of this kind."""
        self.awaits = kind
        self.arrival = asyncio.get_running_loop().create_future()
        return self.arrival

    def settle(self, outcome: Tensor | HopFailure) -> None:
        """Resolve the awaited message with a tensor or a failure. Calls after the first have no effect."""
        if self.arrival is not None and not self.arrival.done():
            self.awaits = None
            self.arrival.set_result(outcome)
