"""Attempts at micro-batches: the input of a stage, and the gradient sums of the micro-batches that passed it.

stage_worker.py -> [micro_batches] -> averaging among the replicas of a stage, optimizer step

A stage that paths may skip sees only some of the micro-batches. So its gradients are stored as sums, together
with the numbers of tokens and visits in them, and become the gradient of a step only at the end of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.attention import PackedLayout

StagePath = tuple[int, ...]
"""Stages in order of visit. The data stage, 0, comes first. The others occur at most once, in any order."""


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchAttempt:
    """One attempt to send a micro-batch along its path. Among an agent's attempts, later ones compare as
    greater."""

    agent: int
    """The slot of the data node in which the micro-batch started."""
    iteration: int
    """Number of optimizer steps taken before it."""
    wave: int
    """Number of the micro-batch among those of its agent in this iteration, from 0."""
    number: int = 0
    """Number of the attempt, raised each time the micro-batch is sent again along another path or to another
    replica."""

    @property
    def micro_batch(self) -> tuple[int, int, int]:
        return self.agent, self.iteration, self.wave


@dataclass(frozen=True, slots=True)
class StageInput:
    """The input of a stage in one attempt at a micro-batch."""

    attempt: MicroBatchAttempt
    values: Tensor
    """Hidden states [B, T, D], or token ids [B, T] at the start of the path."""
    tokens: int
    """Tokens, or answers, that are learned from: the weight of this micro-batch relative to others."""
    layout: PackedLayout | None = None
    """Layout of packed sequences. None: rows are padded on the right."""


def is_same_input(one: StageInput, other: StageInput) -> bool:
    """Return True if both attempts have exactly the same micro-batch as input."""
    if one.attempt.micro_batch != other.attempt.micro_batch or one.tokens != other.tokens:
        return False
    return _runs(one) == _runs(other) and torch.equal(one.values, other.values)


def _runs(item: StageInput) -> tuple[object, object] | None:
    return None if item.layout is None else (item.layout.lengths, item.layout.prompts)


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Gradients of a stage, summed over the micro-batches that passed it."""

    tensors: Mapping[str, Tensor]
    """Sums in float32 by global name. Parameters that no micro-batch passed are missing."""
    tokens: int
    visits: int

    def of_step(self, step_tokens: int) -> dict[str, Tensor]:
        """Return the stage's gradient for a step of `step_tokens` tokens, scaled up from the tokens that
        passed the stage.

        Losses are divided by the size of the whole step. Without skips the result is the sum itself. If the
        stage saw only some of the tokens, each counts for more, as if the missing tokens were like them.

        >>> GradientSum({"w": torch.ones(1)}, tokens=50, visits=1).of_step(100)
        {'w': tensor([2.])}
        """
        if not self.tokens:
            # Gradients of a head, of micro-batches that never came back: no tokens to divide by.
            return {}
        if self.tokens == step_tokens:
            return dict(self.tensors)
        return {name: tensor * (step_tokens / self.tokens) for name, tensor in self.tensors.items()}


class GradientAccumulator:
    """The gradient sums of the running iteration. Each micro-batch counts once, whatever its attempts.

    Gradients of an attempt are kept separately until it is known if they count. A data stage adds two parts:
    its head's gradients with the loss, and its layers' at the end of the way back. The layers' part counts
    the tokens. If a micro-batch is lost between the two, its part of the head's gradient stays; only full
    training has such gradients.
    """

    def __init__(self, most_kept: int) -> None:
        """`most_kept`: largest number of undecided attempts, each with memory for all gradients of the stage.
        If there are more, the oldest is dropped: an attempt that is undecided for that long will not
        count."""
        self._most_kept = most_kept
        self._kept: dict[MicroBatchAttempt, tuple[Mapping[str, Tensor], int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._tokens = 0
        self._visits = 0
        self._inside: set[tuple[tuple[int, int, int], str]] = set()

    def holds(self, attempt: MicroBatchAttempt, part: str) -> bool:
        """Return True if this micro-batch's gradients of "head" or "layers" are included, from any of its
        attempts."""
        return (attempt.micro_batch, part) in self._inside

    def add(
        self, gradients: Mapping[str, Tensor], attempt: MicroBatchAttempt, part: str, *, tokens: int
    ) -> None:
        """Add gradients for which `holds` returns False. `tokens`: 0 if another part counts them."""
        self._inside.add((attempt.micro_batch, part))
        self._tokens += tokens
        self._visits += tokens > 0
        for name, gradient in gradients.items():
            if name in self._tensors:
                self._tensors[name].add_(gradient)
            else:
                self._tensors[name] = gradient.to(torch.float32, copy=True)

    @property
    def micro_batches(self) -> frozenset[tuple[int, int, int]]:
        """Micro-batches whose layers' gradients are included."""
        return frozenset(micro_batch for micro_batch, part in self._inside if part == "layers")

    def keep(self, gradients: Mapping[str, Tensor], attempt: MicroBatchAttempt, *, tokens: int) -> None:
        """Keep gradients of the layers that may count later."""
        self._kept[attempt] = gradients, tokens
        if len(self._kept) > self._most_kept:
            del self._kept[next(iter(self._kept))]

    def commit(self, attempt: MicroBatchAttempt) -> None:
        """Add the kept gradients of this attempt, unless another attempt at the micro-batch is included."""
        gradients, tokens = self._kept.pop(attempt, ({}, 0))
        if tokens and not self.holds(attempt, "layers"):
            self.add(gradients, attempt, "layers", tokens=tokens)

    def discard(self, attempt: MicroBatchAttempt) -> None:
        """Drop the kept gradients of this attempt."""
        self._kept.pop(attempt, None)

    def sums(self) -> GradientSum:
        return GradientSum(self._tensors, self._tokens, self._visits)
