"""Measures the distance between the tokens of a round and the policy that they trained.

objective.py -> [MeasuredTokens] -> [with_off_policy] -> TrainReport
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from swarmnode.training.records import TrainReport


@dataclass(frozen=True, slots=True)
class MeasuredTokens:
    """M of our own tokens of a round, on the CPU."""

    log_ratio_M: Tensor
    """log k, float64."""
    age_M: Tensor
    """Number of versions between the one that sampled the token and the newest at the start of the round."""
    stale_M: Tensor
    """True for tokens that were sampled with keys and values of an older version."""
    corrected_M: Tensor
    """True for tokens whose weight was truncated or masked."""


def with_off_policy(report: TrainReport, parts: Sequence[MeasuredTokens]) -> TrainReport:
    """Returns the report with its off-policy fields over the tokens of all parts. Without tokens they stay
    None."""
    if not any(len(part.log_ratio_M) for part in parts):
        return report
    tokens = _joined(parts)
    # Here engine and trainer hold the same weights and keys: only their arithmetic differs.
    same_policy_M = (tokens.age_M == 0) & ~tokens.stale_M
    engine_ratio_M = tokens.log_ratio_M[same_policy_M]
    return msgspec.structs.replace(
        report,
        off_policy_share=_mean(tokens.age_M != 0),
        mean_age=_mean(tokens.age_M),
        max_age=int(tokens.age_M.max()),
        stale_kv_share=_mean(tokens.stale_M),
        corrected_share=_mean(tokens.corrected_M),
        effective_sample_size=effective_sample_size(tokens.log_ratio_M),
        behaviour_kl=kl_estimate(tokens.log_ratio_M),
        engine_kl=kl_estimate(engine_ratio_M),
        engine_gap=_mean(engine_ratio_M.abs()),
    )


def effective_sample_size(log_ratio_M: Tensor) -> float:
    """(sum k)^2 / (M sum k^2): the share of on-policy tokens that would estimate equally well (Kish 1965)."""
    # A common factor of all k cancels; dividing by the largest keeps everything finite.
    ratio_M = (log_ratio_M - log_ratio_M.max()).exp()
    return float(ratio_M.sum() ** 2 / (len(ratio_M) * ratio_M.square().sum()))


def kl_estimate(log_ratio_M: Tensor) -> float | None:
    """Estimates KL(mu || prox) from tokens that mu sampled: mean of k - 1 - log k (Schulman 2020, k3).

    Unbiased, because E_mu[-log k] is KL(mu || prox) and E_mu[k] = sum of prox = 1. No token adds less than
    zero, so a small divergence is not lost in noise of both signs. None without tokens.

    >>> kl_estimate(torch.zeros(3))
    0.0
    """
    return _mean(log_ratio_M.expm1() - log_ratio_M)


def _joined(parts: Sequence[MeasuredTokens]) -> MeasuredTokens:
    return MeasuredTokens(
        log_ratio_M=torch.cat([part.log_ratio_M for part in parts]),
        age_M=torch.cat([part.age_M for part in parts]),
        stale_M=torch.cat([part.stale_M for part in parts]),
        corrected_M=torch.cat([part.corrected_M for part in parts]),
    )


def _mean(values_M: Tensor) -> float | None:
    return float(values_M.double().mean()) if len(values_M) else None
