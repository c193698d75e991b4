"""Whether what strangers teach goes our way: their part of a round's gradient against that of our own reward.

together.py (own micro-batches, then others') -> [RoundAgreement] -> TrainReport.agreement -> sharing_gauge.py

The groups that our policy sampled in a round estimate the gradient of our own expected reward. What strangers
add to a step is a gradient of its own, and to first order it changes our reward by the inner product of the
two. Their noise is independent, as other people drew other answers, so the product has no bias, and its mean
over rounds says whether what we learn from others helps us or works against us. Answers of our own that are
replayed belong to neither part: they are no sample of today's policy.

Both parts are there anyway. Own samples go first and those of strangers after them, in micro-batches of their
own, and the adapter's gradients are looked at in between: two copies of them, and no pass over the model. The
product is taken in the metric in which Adam steps, and its cosine can be compared between rounds, policies
and sizes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from swarmnode.training.adam import ADAM_BETAS

Source = Literal["own", "foreign", "recalled"]
"""Who a training sample comes from: our policy in this round, a stranger, or the book of our own answers."""

SOURCES: tuple[Source, ...] = ("own", "foreign", "recalled")
"""In the order in which they are trained on within a step."""

EPSILON = 1e-8
"""Adam's own: of a parameter that no gradient ever reached."""


class RoundAgreement:
    """Own against foreign gradients of one policy, summed over the optimizer steps of a round.

    `part_ends` after the micro-batches of each source, then `taken`, or `forget` where the step is skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[nn.Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._own_D: Tensor | None = None
        self._foreign_D: Tensor | None = None
        self._own_foreign = self._own_own = self._foreign_foreign = 0.0

    @torch.no_grad()
    def part_ends(self, source: Source) -> None:
        """The gradients hold the sum of everything up to the samples of `source`, these included."""
        if source == "own":
            self._own_D = self._gradient()
        if source == "foreign" and self._own_D is not None:
            self._foreign_D = self._gradient() - self._own_D

    @torch.no_grad()
    def taken(self, scale: float) -> None:
        """The optimizer is about to take the step that was computed, its gradient times `scale`."""
        if self._own_D is None or self._foreign_D is None:
            return  # A step with one source alone.
        own_D, foreign_D = self._own_D * scale, self._foreign_D * scale
        metric_D = self._metric(own_D, foreign_D)
        weighted_D = foreign_D * metric_D
        self._own_foreign += float(own_D @ weighted_D)
        self._own_own += float(own_D @ (own_D * metric_D))
        self._foreign_foreign += float(foreign_D @ weighted_D)
        self.forget()

    def forget(self) -> None:
        """The step that was computed is not taken, or is computed again."""
        self._own_D = self._foreign_D = None

    @property
    def cosine(self) -> float | None:
        """From -1 to 1, over the steps that were taken. None: there was nothing to compare."""
        lengths = self._own_own * self._foreign_foreign
        return self._own_foreign / lengths**0.5 if lengths > 0 else None

    def _metric(self, own_D: Tensor, foreign_D: Tensor) -> Tensor:
        """What Adam divides by in this step, inverted, up to a factor that all parameters share.

        As if the two parts stood at right angles: whether they agree must not change how they are measured.
        """
        moments_D = _flat([self._optimizer.state[parameter]["exp_avg_sq"] for parameter in self._parameters])
        newest_D = own_D.square() + foreign_D.square()
        return 1 / (moments_D.lerp(newest_D, 1 - ADAM_BETAS[1]).sqrt() + EPSILON)

    def _gradient(self) -> Tensor:
        return _flat([_or_zeros(parameter) for parameter in self._parameters])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _or_zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
