"""A data node's micro-batches in flight, one attempt at each.

iteration_driver.py (an attempt begins) -> [InFlightMicroBatch] <- iteration_driver.py (messages that come
    home)
"""

import asyncio
from dataclasses import dataclass

from torch import Tensor

from swarmnode.extensions.pipeline.wire.hop_messages import ForwardHop, Hop, Trouble


@dataclass(frozen=True, slots=True)
class HopFailure:
    """The reason why an attempt did not come back."""

    position: int
    """Position on the path of the node at fault; 0 is our own."""
    trouble: Trouble
    told_by: int | None = None
    """The neighbour on the path that says so, which may be wrong. None: we have seen it ourselves."""


@dataclass(slots=True, eq=False)
class InFlightMicroBatch:
    """One attempt at a micro-batch of ours, sent along its path and not back yet."""

    hop: ForwardHop
    """Its first message. The tensor in it has the shape of the hidden states, and no type yet."""
    awaits: type[Hop] | None = None
    """Kind of the message that has to come next."""
    arrival: "asyncio.Future[Tensor | HopFailure] | None" = None

    def expect(self, kind: type[Hop]) -> "asyncio.Future[Tensor | HopFailure]":
        """Return a future for the next message, which must be of this kind."""
        self.awaits = kind
        self.arrival = asyncio.get_running_loop().create_future()
        return self.arrival

    def settle(self, outcome: Tensor | HopFailure) -> None:
        """Resolve the awaited message with a tensor or a failure. Only the first call counts."""
        if self.arrival is not None and not self.arrival.done():
            self.awaits = None
            self.arrival.set_result(outcome)
