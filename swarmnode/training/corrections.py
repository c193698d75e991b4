"""How much a token counts that another policy sampled: the off-policy corrections, by name.

logprob -> [corrections] -> loss

Three policies: mu sampled the token and its log-probability was recorded then; prox is the trainer's before
the round's first update; theta is being trained. PPO's clip bounds theta / prox. The weight here, a function
of k = prox / mu, corrects for mu, and carries no gradient. mu may be an older version, several versions in
one completion, or stale keys and values: its record is that of the process that sampled, so k is exact.
Only the token is weighted, not how likely its prefix was: that product would have no bounded variance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of M own tokens."""

    values_M: Tensor
    corrected_M: Tensor
    """True where k was truncated or masked."""


def token_weights(log_ratio_M: Tensor, config: TrainingConfig) -> TokenWeights:
    """Weights by the configured correction, from log k = log prox - log mu."""
    ratio_M = log_ratio_M.detach().exp()
    match config.correction:
        case "none":
            return uncorrected(ratio_M)
        case "tis":
            return truncated(ratio_M, config.correction_cap)
        case "icepop":
            return icepop(ratio_M, config.correction_low, config.correction_high)
        case "decoupled":
            return decoupled(ratio_M, config.correction_high)


def uncorrected(ratio_M: Tensor) -> TokenWeights:
    """Weight 1: plain PPO, as if prox had sampled everything (Schulman et al. 2017)."""
    return TokenWeights(torch.ones_like(ratio_M), torch.zeros_like(ratio_M, dtype=torch.bool))


def truncated(ratio_M: Tensor, cap: float) -> TokenWeights:
    """min(k, cap): truncated importance sampling (TIS, Yao et al. 2025). Less variance for some bias.

    >>> truncated(torch.tensor([0.5, 8.0]), cap=2.0).values_M
    tensor([0.5000, 2.0000])
    """
    return TokenWeights(ratio_M.clamp(max=cap), ratio_M > cap)


def icepop(ratio_M: Tensor, low: float, high: float) -> TokenWeights:
    """k where low <= k <= high, else 0: IcePop's two-sided mask (Ling team 2025).

    >>> icepop(torch.tensor([0.25, 0.5, 8.0]), low=0.5, high=5.0).values_M
    tensor([0.0000, 0.5000, 0.0000])
    """
    kept_M = (ratio_M >= low) & (ratio_M <= high)
    return TokenWeights(ratio_M.where(kept_M, 0.0), ~kept_M)


def decoupled(ratio_M: Tensor, high: float) -> TokenWeights:
    """k where k <= high, else 0: decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025, section 5).

    PPO's objective on theta / prox, times prox / mu. Without a bound that is the on-policy gradient of each
    token in expectation; the bound leaves out tokens that mu found all but impossible.
    """
    return icepop(ratio_M, 0.0, high)
