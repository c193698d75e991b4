"""The weight of each token in a loss, by the policy that sampled it.

objective.py -> [own_weights, token_weights] -> losses.py (TokenBatch.weights_N)

A token that our engine sampled is weighted by the truncated ratio k = prox / mu between the trainer's policy
before the round and the policy that sampled it. A token of unknown origin, a stranger's or a replayed one,
counts in full, or is shaped by its likelihood.
"""

import torch
from torch import Tensor

LARGEST_WEIGHT = 2.0
"""The upper bound of k."""

SHAPING = 0.1
"""LUFFY's gamma."""


def own_weights(log_ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """Returns min(k, cap) from log k, and True for tokens whose k was above the cap: truncated importance
    sampling (TIS, Yao et al. 2025), which trades some bias for less variance.

    >>> own_weights(torch.tensor([0.5, 8.0]).log())
    (tensor([0.5000, 2.0000]), tensor([False,  True]))
    """
    ratio_M = log_ratio_M.detach().exp()
    return ratio_M.clamp(max=LARGEST_WEIGHT), ratio_M > LARGEST_WEIGHT


def token_weights(
    prox_N: Tensor, own_mask_N: Tensor, own_weights_M: Tensor, shaped_N: Tensor | None
) -> Tensor:
    """Returns the weights of all N tokens of a batch: own ones as given, shaped ones by `shaped_weights`, and
    1 for the others."""
    weights_N = torch.ones_like(prox_N).masked_scatter(own_mask_N, own_weights_M)
    return weights_N if shaped_N is None else torch.where(shaped_N, shaped_weights(prox_N), weights_N)


def shaped_weights(prox_N: Tensor) -> Tensor:
    """Returns p f'(p) with f(p) = p / (p + SHAPING), where p is the probability of a token under prox:
    LUFFY's policy shaping (Yan et al. 2025, section 3.2), whose objective f(p) has this times grad log p as
    its gradient.

    The weight peaks at 1/4 for tokens with p = SHAPING; tokens that are nearly impossible or nearly certain
    count less. Shaping reduces the overall weight, so a rule that shapes may replay more.

    >>> shaped_weights(torch.tensor([0.001, 0.1, 0.9]).log())
    tensor([0.0098, 0.2500, 0.0900])
    """
    probability_N = prox_N.detach().exp()
    return SHAPING * probability_N / (probability_N + SHAPING).square()
