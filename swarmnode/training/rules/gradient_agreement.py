"""Agreement of strangers' part of each step with the gradient of our own reward.

trainer.py (own micro-batches, then others') -> [Agreement] -> TrainReport.agreement -> sharing_gauge.py

The groups that our policy sampled in a round estimate the gradient of our own expected reward. A step of Adam
follows its momentum, and a part of that is strangers' doing: what their answers asked for in this step and,
fading, in those before. To first order that part of the step changes our reward by its inner product with the
gradient. Their noise is independent, as other people drew other answers, so the product has no bias, and its
mean over rounds says whether what we learn from others helps us or works against us. That the momentum
remembers matters: a lesson on what we cannot do yet does not show in the rewards of the same round, and one
that only disturbs is seen by what we have to undo afterwards. Answers of our own that are replayed belong to
neither part: they are no sample of today's policy.

Nothing is computed for it. In the first step of a round own samples go first and those of strangers after
them, in micro-batches of their own, and the adapter's gradients are looked at in between. It takes three
times the memory of a gradient. The product is taken in the metric in which Adam steps; its cosine can be
compared between rounds and sizes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from swarmnode.training.adam import ADAM_BETAS

Source = Literal["own", "foreign", "recalled"]
"""Who a training sample comes from: our policy in this round, a stranger, or the book of our own answers."""

SOURCES: tuple[Source, ...] = ("own", "foreign", "recalled")
"""Sources of groups in the order in which they are trained on within a step."""

EPSILON = 1e-8
"""Adam's own: of a parameter that no gradient ever reached."""


class Agreement:
    """Own gradient against the foreign part of the momentum, of one policy, round by round.

    In a step that is compared, `part_ends` after the micro-batches of each source; after every step `taken`,
    or `forget` where it is skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[nn.Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._own_D: Tensor | None = None
        self._foreign_D: Tensor | None = None
        self._pull_D: Tensor | None = None
        """The foreign part of the momentum, up to a factor. None: strangers had none yet."""
        self._own_pull = self._own_own = self._pull_pull = 0.0

    def begin_round(self) -> None:
        self.forget()
        self._own_pull = self._own_own = self._pull_pull = 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the round, from -1 to 1, over what was compared. None: there was nothing to
        compare."""
        lengths = self._own_own * self._pull_pull
        return self._own_pull / lengths**0.5 if lengths > 0 else None

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
        if self._pull_D is not None:
            self._pull_D *= ADAM_BETAS[0]
        if self._own_D is not None and self._foreign_D is not None:
            self._compare(self._own_D * scale, self._foreign_D * scale)
        self.forget()

    def forget(self) -> None:
        """The step that was computed is not taken, or is computed again."""
        self._own_D = self._foreign_D = None

    def _compare(self, own_D: Tensor, foreign_D: Tensor) -> None:
        metric_D = self._metric(own_D, foreign_D)
        self._pull_D = foreign_D if self._pull_D is None else self._pull_D.add_(foreign_D)
        weighted_D = self._pull_D * metric_D
        self._own_pull += float(own_D @ weighted_D)
        self._own_own += float(own_D @ (own_D * metric_D))
        self._pull_pull += float(self._pull_D @ weighted_D)

    def _metric(self, own_D: Tensor, foreign_D: Tensor) -> Tensor:
        """Returns the inverse of Adam's divisor in this step, up to a factor that all parameters share.

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
