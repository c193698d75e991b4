"""Attempts at micro-batches: the input of a stage, and the gradient sums over those that passed it.

stage_worker.py -> [micro_batches] -> averaging among the replicas of a stage, optimizer step

A stage that paths skip sees only some of the micro-batches. So its gradients are kept as sums with the tokens
and visits that are inside, and become the gradient of a step only at its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.attention import PackedLayout

StagePath = tuple[int, ...]
"""Stages in order of visit. The data stage, 0, comes first; the others at most once, in any order."""


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchAttempt:
    """One attempt to bring a micro-batch along its path. Of one agent's attempts, the later is the
    greater."""

    agent: int
    """The slot of a data node that the micro-batch started from."""
    iteration: int
    """Optimizer steps taken before it."""
    wave: int
    """Number of the micro-batch among those of the agent in this iteration, from 0."""
    number: int = 0
    """Number of the attempt, raised each time the micro-batch is sent again by another path or to another
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
    """Tokens, or answers, that are learned from: the weight of the micro-batch against others."""
    layout: PackedLayout | None = None
    """Layout of packed sequences. None: rows padded on the right."""


def is_same_input(one: StageInput, other: StageInput) -> bool:
    """Return True if two attempts bring exactly the same micro-batch."""
    if one.attempt.micro_batch != other.attempt.micro_batch or one.tokens != other.tokens:
        return False
    return _runs(one) == _runs(other) and torch.equal(one.values, other.values)


def _runs(item: StageInput) -> tuple[object, object] | None:
    return None if item.layout is None else (item.layout.lengths, item.layout.prompts)


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Gradients of a stage, summed over the micro-batches that really passed it."""

    tensors: Mapping[str, Tensor]
    """Sums in float32 by global name. A parameter that no micro-batch passed is absent."""
    tokens: int
    visits: int

    def of_step(self, step_tokens: int) -> dict[str, Tensor]:
        """Return the stage's gradient of a step of `step_tokens` tokens, scaled from the tokens that passed
        it.

        Losses are divided by the size of the whole step. Without skips this is the sum; where a stage saw
        only some of the tokens, each counts as many times more, as if those others were like them.

        >>> GradientSum({"w": torch.ones(1)}, tokens=50, visits=1).of_step(100)
        {'w': tensor([2.])}
        """
        if not self.tokens:
            # What a head has got of micro-batches that never came back has no share to be divided by.
            return {}
        if self.tokens == step_tokens:
            return dict(self.tensors)
        return {name: tensor * (step_tokens / self.tokens) for name, tensor in self.tensors.items()}


class GradientAccumulator:
    """The gradient sums of the running iteration. A micro-batch is included once, whatever its attempts.

    What an attempt brought is kept apart until it is known whether it counts. A data stage adds twice: what
    its head gets with the loss, what its layers get at the end of the way back. The latter counts the tokens.
    Should a micro-batch be lost between the two, its part in the head's gradient stays, which only full
    training has.
    """

    def __init__(self, most_kept: int) -> None:
        """`most_kept`: undecided attempts at once, each with memory for all gradients of the stage. Beyond it
        the oldest is dropped: an attempt that is undecided for so long is not to count."""
        self._most_kept = most_kept
        self._kept: dict[MicroBatchAttempt, tuple[Mapping[str, Tensor], int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._tokens = 0
        self._visits = 0
        self._inside: set[tuple[tuple[int, int, int], str]] = set()

    def holds(self, attempt: MicroBatchAttempt, part: str) -> bool:
        """Return True if this micro-batch's gradients of "head" or "layers" are included, by any of its
        attempts."""
        return (attempt.micro_batch, part) in self._inside

    def add(
        self, gradients: Mapping[str, Tensor], attempt: MicroBatchAttempt, part: str, *, tokens: int
    ) -> None:
        """Add gradients of which `holds` returns False. `tokens`: 0 if another part counts them."""
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
        """Keep gradients of the layers that may come to count."""
        self._kept[attempt] = gradients, tokens
        if len(self._kept) > self._most_kept:
            del self._kept[next(iter(self._kept))]

    def commit(self, attempt: MicroBatchAttempt) -> None:
        """Add the kept gradients of this attempt, unless another attempt at its micro-batch is included."""
        gradients, tokens = self._kept.pop(attempt, ({}, 0))
        if tokens and not self.holds(attempt, "layers"):
            self.add(gradients, attempt, "layers", tokens=tokens)

    def discard(self, attempt: MicroBatchAttempt) -> None:
        """Drop the kept gradients of this attempt."""
        self._kept.pop(attempt, None)

    def sums(self) -> GradientSum:
        return GradientSum(self._tensors, self._tokens, self._visits)
