"""The seam between a node and its learning half: policy, engine, trainer, tasks, checkpoints.

node.py (asyncio) -> worker thread -> [Learner] -> policy_learner.py | testing.FakeLearner

Every call blocks and belongs in the node's one worker thread; only `interrupt` may come from elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.training.records import Counters, Evaluation, TrainReport
from swarmnode.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class RoundRollouts:
    """What one round of generation gave. `complete` is False when it was interrupted."""

    groups: tuple[RolloutGroup, ...]
    tokens: int
    seconds: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint brought back: where the numbers continue, and the exchange's waiting groups."""

    counters: Counters
    exchange: bytes


class Learner(Protocol):
    """What a node needs of its learning half."""

    @property
    def policy_version(self) -> int: ...

    def resume(self) -> Resumed | None:
        """Go on from the newest sound checkpoint, if there is one."""
        ...

    def rollouts(self, number: int) -> RoundRollouts:
        """Draw the examples of a round, answer and score them. Depends on the seed and `number` alone."""
        ...

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        """One round of learning; what is generated next comes from the new policy version."""
        ...

    def evaluate(self) -> Evaluation | None:
        """Reward on held-out draws; None when it was interrupted."""
        ...

    def save(self, counters: Counters, exchange: bytes) -> str:
        """Write a checkpoint and return its name. Raises StorageError, leaving earlier ones as they are."""
        ...

    def interrupt(self) -> None:
        """Let `rollouts` and `evaluate` return as soon as they can, for good. Thread-safe."""
        ...
