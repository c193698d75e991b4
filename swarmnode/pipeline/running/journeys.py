"""The attempts at a data node's micro-batches while they are under way, and what became of them.

driver.py (an attempt begins) -> [Journey] <- driver.py (messages that come home)
                                 [Drive] -> closing.py (report_of), IterationReport
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.pipeline.running.seat import LossSums, Passage
from swarmnode.pipeline.stages.visits import Visit
from swarmnode.pipeline.wire.messages import Hop, Trouble
from swarmnode.training.losses import LossOutput


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt did not come back."""

    position: int
    """Of the node on the path that is at fault; 0: we are."""
    trouble: Trouble


@dataclass(slots=True, eq=False)
class Journey:
    """One attempt at a micro-batch, under way."""

    visit: Visit
    micro_batch: int
    path: tuple[int, ...]
    shape: torch.Size
    """Of the hidden states."""
    awaits: type[Hop] | None = None
    """What has to come next."""
    arrival: "asyncio.Future[Tensor | Failure] | None" = None

    def expect(self, kind: type[Hop]) -> "asyncio.Future[Tensor | Failure]":
        """A message of this kind comes next."""
        self.awaits = kind
        self.arrival = asyncio.get_running_loop().create_future()
        return self.arrival

    def settle(self, outcome: Tensor | Failure) -> None:
        """What was awaited is here, or will not come. The first word counts."""
        if self.arrival is not None and not self.arrival.done():
            self.awaits = None
            self.arrival.set_result(outcome)


@dataclass(slots=True)
class Drive:
    """What became of the micro-batches of an iteration."""

    began_s: float
    ended_s: float = 0.0
    back: dict[int, Journey] = field(default_factory=dict[int, Journey])
    """By micro-batch."""
    tokens: int = 0
    outputs: list[LossOutput] = field(default_factory=list[LossOutput])
    retried: int = 0
    given_up: int = 0
    skipped: Counter[int] = field(default_factory=Counter[int])
    lost: set[int] = field(default_factory=set[int])
    passages: list[Passage] = field(default_factory=list[Passage])

    @property
    def sums(self) -> LossSums:
        """Over what came back."""
        kl = [output.kl.item() for output in self.outputs if output.kl is not None]
        entropy = [output.entropy.item() for output in self.outputs if output.entropy is not None]
        return LossSums(
            loss=sum(output.loss.item() for output in self.outputs),
            clipped=sum(int(output.clipped.item()) for output in self.outputs),
            kl=sum(kl) if kl else None,
            entropy=sum(entropy) if entropy else None,
        )
