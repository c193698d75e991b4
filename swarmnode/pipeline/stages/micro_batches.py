"""Attempts at micro-batches: what comes to a stage with one, and what is added up over those that came.

stage.py -> [micro_batches] -> averaging among the replicas of a stage, optimizer step

A stage that paths skip sees only some of the micro-batches. So its gradients are kept as sums with the tokens
and visits that are inside, and become the gradient of a step only at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.attention import PackedLayout
from swarmnode.pipeline.wire.messages import Refusal
from swarmnode.training.losses import LossOutput

StagePath = tuple[int, ...]
"""Stages in order of visit. The data stage, 0, comes first; the others at most once, in any order."""


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchAttempt:
    """One attempt to bring a micro-batch along its path. Of one agent's the later is the greater."""

    agent: int
    """The slot of a data node that the micro-batch started from."""
    iteration: int
    """Optimizer steps taken before it."""
    wave: int
    """The agent's how-manieth micro-batch of the iteration."""
    number: int = 0
    """Raised each time the micro-batch is sent again, by another path or to another replica."""

    @property
    def micro_batch(self) -> tuple[int, int, int]:
        return self.agent, self.iteration, self.wave


@dataclass(frozen=True, slots=True)
class StageInput:
    """What comes in with an attempt."""

    attempt: MicroBatchAttempt
    values: Tensor
    """Hidden states [B, T, D]; token ids [B, T] where the path begins."""
    tokens: int
    """What is learned from in it, tokens or answers: its weight against others."""
    layout: PackedLayout | None = None
    """Where packed sequences lie. None: rows padded on the right."""


@dataclass(frozen=True, slots=True)
class LossGradient:
    """The loss of one micro-batch and its gradient, back at the data stage."""

    output: LossOutput
    """Measurements; its loss has no graph any more."""
    gradient_BTD: Tensor
    """Gradient with respect to the hidden states that came back."""


def is_same_input(one: StageInput, other: StageInput) -> bool:
    """Whether two attempts bring the very same micro-batch."""
    if one.attempt.micro_batch != other.attempt.micro_batch or one.tokens != other.tokens:
        return False
    return _runs(one) == _runs(other) and torch.equal(one.values, other.values)


def _runs(item: StageInput) -> tuple[object, object] | None:
    return None if item.layout is None else (item.layout.lengths, item.layout.prompts)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an input is not taken."""

    reason: Refusal
    detail: str


def fault_of(
    item: StageInput, hidden_size: int, vocabulary: int | None, *, max_tokens: int, packs: bool
) -> Fault | None:
    """What is wrong with an input, or None. `vocabulary`: token ids may come in, and their number; None:
    hidden states only, of which no number is looked at. `packs`: the model takes packed rows."""
    values, shape = item.values, item.values.shape
    are_ids = vocabulary is not None and values.dtype == torch.long
    if len(shape) != (2 if are_ids else 3) or not (are_ids or values.is_floating_point()):
        return Fault(Refusal.WRONG_SHAPE, f"{values.dtype} {list(shape)}")
    if not are_ids and shape[2] != hidden_size:
        return Fault(Refusal.WRONG_SHAPE, f"width {shape[2]}, here it is {hidden_size}")
    tokens = shape[0] * shape[1]
    if not 0 < tokens <= max_tokens:
        return Fault(Refusal.TOO_LARGE, f"{tokens} tokens, at most {max_tokens}")
    if not 0 < item.tokens <= tokens:
        return Fault(Refusal.WRONG_SHAPE, f"{item.tokens} of {tokens} tokens are learned from")
    if item.layout is not None and not packs:
        return Fault(Refusal.WRONG_SHAPE, "this model takes no packed rows")
    if item.layout is not None and (shape[0] != 1 or sum(item.layout.lengths) != tokens):
        return Fault(Refusal.WRONG_SHAPE, f"{sum(item.layout.lengths)} packed tokens in {list(shape)}")
    if are_ids and not 0 <= int(values.min()) <= int(values.max()) < (vocabulary or 0):
        return Fault(Refusal.WRONG_SHAPE, f"a token id beyond the vocabulary of {vocabulary}")
    return None


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Gradients of a stage, summed over the micro-batches that really passed it."""

    tensors: Mapping[str, Tensor]
    """Sums in float32 by global name. A parameter that no micro-batch passed is absent."""
    tokens: int
    visits: int

    def of_step(self, step_tokens: int) -> dict[str, Tensor]:
        """The stage's gradient of a step of `step_tokens` tokens, from the share of them that passed it.

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


def sum_of_replicas(sums: Sequence[GradientSum]) -> GradientSum:
    """What one member would have summed that had seen all micro-batches of these replicas of a stage."""
    total: dict[str, Tensor] = {}
    for one in sums:
        for name, tensor in one.tensors.items():
            total[name] = total[name] + tensor if name in total else tensor
    return GradientSum(total, sum(one.tokens for one in sums), sum(one.visits for one in sums))


class GradientAccumulator:
    """The sums of an iteration that runs. A micro-batch is in them once, whatever its attempts.

    What an attempt brought is kept apart until it is known whether it counts. A data stage adds twice: what
    its head gets with the loss, what its layers get at the end of the way back. The latter counts the tokens.
    Should a micro-batch be lost between the two, its part in the head's gradient stays, which only full
    training has."""

    def __init__(self, most_kept: int) -> None:
        """`most_kept`: attempts that may be undecided at once, each with memory for all gradients of the
        stage. Beyond, the oldest is forgotten: whose fate is open for so long is not to count."""
        self._most_kept = most_kept
        self._kept: dict[MicroBatchAttempt, tuple[Mapping[str, Tensor], int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._tokens = 0
        self._visits = 0
        self._inside: set[tuple[tuple[int, int, int], str]] = set()

    def holds(self, attempt: MicroBatchAttempt, part: str) -> bool:
        """Whether this micro-batch's gradients of "head" or "layers" are inside, by whichever attempt."""
        return (attempt.micro_batch, part) in self._inside

    def add(
        self, gradients: Mapping[str, Tensor], attempt: MicroBatchAttempt, part: str, *, tokens: int
    ) -> None:
        """Gradients that `holds` says are not inside. `tokens`: 0 where another part counts them."""
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
        """Those whose layers' gradients are inside."""
        return frozenset(micro_batch for micro_batch, part in self._inside if part == "layers")

    def keep(self, gradients: Mapping[str, Tensor], attempt: MicroBatchAttempt, *, tokens: int) -> None:
        """Gradients of the layers that may come to count."""
        self._kept[attempt] = gradients, tokens
        if len(self._kept) > self._most_kept:
            del self._kept[next(iter(self._kept))]

    def commit(self, attempt: MicroBatchAttempt) -> None:
        """Add what is kept of this attempt, unless another attempt at its micro-batch is inside."""
        gradients, tokens = self._kept.pop(attempt, ({}, 0))
        if tokens and not self.holds(attempt, "layers"):
            self.add(gradients, attempt, "layers", tokens=tokens)

    def discard(self, attempt: MicroBatchAttempt) -> None:
        """Forget what is kept of this attempt."""
        self._kept.pop(attempt, None)

    def sums(self) -> GradientSum:
        return GradientSum(self._tensors, self._tokens, self._visits)
