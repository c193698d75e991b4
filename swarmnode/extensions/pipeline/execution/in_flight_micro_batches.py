"""A data node's micro-batches in flight, one attempt at each, and what became of them.

iteration_driver.py (an attempt begins) -> [InFlightMicroBatch] <- iteration_driver.py (messages that come
    home)
                                 [IterationOutcome] -> step_barrier.py (report_of), IterationReport
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.extensions.pipeline.execution.member_records import LossSums, RoundTrip
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt
from swarmnode.extensions.pipeline.wire.hop_messages import Hop, Trouble
from swarmnode.training.losses import LossOutput


@dataclass(frozen=True, slots=True)
class HopFailure:
    """The reason why an attempt did not come back."""

    position: int
    """Position on the path of the node at fault; 0 is our own."""
    trouble: Trouble


@dataclass(slots=True, eq=False)
class InFlightMicroBatch:
    """One attempt at a micro-batch of ours, sent along its path and not back yet."""

    attempt: MicroBatchAttempt
    micro_batch: int
    path: tuple[int, ...]
    shape: torch.Size
    """Shape of the hidden states."""
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


@dataclass(slots=True)
class IterationOutcome:
    """The results of a data node's micro-batches in one iteration."""

    began_s: float
    ended_s: float = 0.0
    back: dict[int, InFlightMicroBatch] = field(default_factory=dict[int, InFlightMicroBatch])
    """The attempt that came back, by micro-batch number."""
    tokens: int = 0
    outputs: list[LossOutput] = field(default_factory=list[LossOutput])
    retried: int = 0
    given_up: int = 0
    skipped: Counter[int] = field(default_factory=Counter[int])
    lost: set[int] = field(default_factory=set[int])
    round_trips: list[RoundTrip] = field(default_factory=list[RoundTrip])

    @property
    def sums(self) -> LossSums:
        """Undivided loss sums over the micro-batches that came back."""
        kl = [output.kl.item() for output in self.outputs if output.kl is not None]
        entropy = [output.entropy.item() for output in self.outputs if output.entropy is not None]
        return LossSums(
            loss=sum(output.loss.item() for output in self.outputs),
            clipped=sum(int(output.clipped.item()) for output in self.outputs),
            kl=sum(kl) if kl else None,
            entropy=sum(entropy) if entropy else None,
        )
