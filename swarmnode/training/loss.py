"""The objective: PPO's clipped surrogate with GRPO advantages, averaged over tokens.

logprob, corrections -> [loss] -> trainer
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a scalar with gradient; `clipped` counts the tokens whose gradient the clip removed."""

    loss: Tensor
    clipped: Tensor


def clipped_policy_loss(
    logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    normaliser: float,
) -> LossOutput:
    """Sum over tokens of -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), divided by `normaliser`.

    r = exp(logprobs - prox_logprobs); no KL term. The asymmetric clip is DAPO's clip-higher (Yu et al. 2025,
    section 3.1), as SAPO trains (section 4). w is the off-policy correction (see corrections.py).
    `normaliser` is the number of completion tokens of the whole optimizer step: dividing by the same number
    in every micro-batch makes the gradient independent of how the step was cut into micro-batches.
    """
    ratio_N = (logprobs_N - prox_logprobs_N).exp()
    clipped_ratio_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    clipped = (clipped_ratio_N * advantages_N < ratio_N * advantages_N).sum()
    return LossOutput(-(weights_N * surrogate_N).sum() / normaliser, clipped)
