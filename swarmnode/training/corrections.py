"""How much a token counts that another policy sampled: the off-policy corrections, by name.

logprob -> [corrections] -> losses

Three policies: mu sampled the token and its log-probability was recorded then; prox is the trainer's before
the round's first update; theta is being trained. The clip bounds theta / prox. The weight here, a function
of k = prox / mu, corrects for mu, and carries no gradient. mu may be an older version, several versions in
one completion, or stale keys and values: its record is that of the process that sampled, so k is exact.
All three are what tokens are drawn from: tempered, and with top-p each cut to its own nucleus and
renormalised (nucleus.py). A token that is outside prox's counts as its least likely member.
Only the token is weighted, not how likely its prefix was: that product would have no bounded variance.

Who sampled the tokens of a stranger, or of an answer that is replayed, is not known: they count in full, or
are shaped by how likely they are to prox.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarmnode.config import TrainingConfig

SHAPING = 0.1
"""LUFFY's gamma."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of M own tokens. A token is marked by at most one of the two masks."""

    values_M: Tensor
    corrected_M: Tensor
    """True where k was truncated or masked."""
    too_old_M: Tensor
    """True where the token was left out, weight 0, because its version is older than `max_policy_lag`."""

    @property
    def corrected(self) -> int:
        return int(self.corrected_M.sum())

    @property
    def too_old(self) -> int:
        return int(self.too_old_M.sum())


def token_weights(log_ratio_M: Tensor, config: TrainingConfig, age_M: Tensor | None = None) -> TokenWeights:
    """Weights by the configured correction, from log k = log prox - log mu.

    `age_M` are the policy versions between the one that sampled the token and the newest at the start of the
    round. Where it exceeds `config.max_policy_lag` the token is left out, and so is no other of its answer.
    """
    ratio_M = log_ratio_M.detach().exp()
    match config.correction:
        case "none":
            weights = uncorrected(ratio_M)
        case "tis":
            weights = truncated(ratio_M, config.correction_cap)
        case "icepop":
            weights = icepop(ratio_M, config.correction_low, config.correction_high)
        case "decoupled":
            weights = decoupled(ratio_M, config.correction_high)
    if age_M is None or config.max_policy_lag is None:
        return weights
    return without_older(weights, age_M.to(ratio_M.device), config.max_policy_lag)


def batch_weights(
    prox_N: Tensor, own_mask_N: Tensor, own_weights_M: Tensor, shaped_N: Tensor | None
) -> Tensor:
    """Weights of all N tokens of a batch: own ones as given, shaped ones by `shaped_weights`, others 1."""
    weights_N = torch.ones_like(prox_N).masked_scatter(own_mask_N, own_weights_M)
    return weights_N if shaped_N is None else torch.where(shaped_N, shaped_weights(prox_N), weights_N)


def shaped_weights(prox_N: Tensor) -> Tensor:
    """p f'(p) with f(p) = p / (p + SHAPING), p the probability of a token under prox: LUFFY's policy shaping
    (Yan et al. 2025, section 3.2), whose objective f(p) has this times grad log p as its gradient.

    Most for tokens with p = SHAPING, where it is 1/4; tokens that are all but impossible and those that are
    certain count less. As a whole it makes less of them: raise exchange.book_weight with it.

    >>> shaped_weights(torch.tensor([0.001, 0.1, 0.9]).log())
    tensor([0.0098, 0.2500, 0.0900])
    """
    probability_N = prox_N.detach().exp()
    return SHAPING * probability_N / (probability_N + SHAPING).square()


def uncorrected(ratio_M: Tensor) -> TokenWeights:
    """Weight 1: plain PPO, as if prox had sampled everything (Schulman et al. 2017)."""
    return _weights(torch.ones_like(ratio_M), torch.zeros_like(ratio_M, dtype=torch.bool))


def truncated(ratio_M: Tensor, cap: float) -> TokenWeights:
    """min(k, cap): truncated importance sampling (TIS, Yao et al. 2025). Less variance for some bias.

    >>> truncated(torch.tensor([0.5, 8.0]), cap=2.0).values_M
    tensor([0.5000, 2.0000])
    """
    return _weights(ratio_M.clamp(max=cap), ratio_M > cap)


def icepop(ratio_M: Tensor, low: float, high: float) -> TokenWeights:
    """k where low <= k <= high, else 0: IcePop's two-sided mask (Ling team 2025).

    >>> icepop(torch.tensor([0.25, 0.5, 8.0]), low=0.5, high=5.0).values_M
    tensor([0.0000, 0.5000, 0.0000])
    """
    kept_M = (ratio_M >= low) & (ratio_M <= high)
    return _weights(ratio_M.where(kept_M, 0.0), ~kept_M)


def decoupled(ratio_M: Tensor, high: float) -> TokenWeights:
    """k where k <= high, else 0: decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025, section 5).

    PPO's objective on theta / prox, times prox / mu. Without a bound that is the on-policy gradient of each
    token in expectation; the bound leaves out tokens that mu found all but impossible.
    """
    return icepop(ratio_M, 0.0, high)


def without_older(weights: TokenWeights, age_M: Tensor, max_lag: int) -> TokenWeights:
    """Weight 0 for tokens that lie more than `max_lag` versions back, whatever their k.

    >>> without_older(uncorrected(torch.ones(3)), torch.tensor([0, 2, 3]), max_lag=2).values_M
    tensor([1., 1., 0.])
    """
    too_old_M = age_M > max_lag
    return replace(
        weights,
        values_M=weights.values_M.masked_fill(too_old_M, 0.0),
        corrected_M=weights.corrected_M & ~too_old_M,
        too_old_M=too_old_M,
    )


def _weights(values_M: Tensor, corrected_M: Tensor) -> TokenWeights:
    return TokenWeights(values_M, corrected_M, torch.zeros_like(corrected_M))
