"""The objective of a micro-batch: the loss to call backward on, and what is measured of its tokens.

trainer.py, extensions/pipeline/stages/objectives.py -> [objective] -> [token_weights] -> losses.py ->
    LossOutput
                                                 |
                                                 +-> MeasuredTokens -> [with_off_policy] -> TrainReport

Here is all that is true of a token's part in learning, wherever its log-probabilities were computed: whoever
sampled it is accounted for by its weight, and what lies too far back counts nothing. Tokens of several
policies may share the micro-batch; each policy's objective sees its own `Share`.

Three policies: mu sampled the token and its log-probability was recorded then; prox is the trainer's before
the round's first update; theta is being trained. The clip bounds theta / prox. The weight, a function of
k = prox / mu, corrects for mu (off-policy corrections, by name) and carries no gradient. mu may be an older
version, several versions in one completion, or stale keys and values: its record is that of the process that
sampled, so k is exact. All three are what tokens are drawn from: tempered, and with top-p each cut to its own
nucleus and renormalised (model/nucleus.py), so that on policy k is 1. A token that is outside prox's counts
as its least likely member. Only the token is weighted, not how likely its prefix was: that product would have
no bounded variance.

Who sampled the tokens of a stranger, or of an answer that is replayed, is not known: they count in full, or
are shaped by how likely they are to prox. They are not measured either: a stranger's come without
log-probabilities, and their versions cannot be compared with ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from swarmnode.model.head import TokenLogprobs
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import LossOutput, StepSize, TokenBatch, policy_loss
from swarmnode.training.packing import MicroBatch, completion_tokens
from swarmnode.training.records import TrainReport

SHAPING = 0.1
"""LUFFY's gamma."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The N completion tokens of a micro-batch with all the log-probabilities that a loss may ask for."""

    current: TokenLogprobs
    """Log-probabilities and entropies under the policy being trained, with gradient."""
    prox_N: Tensor
    """Log-probabilities under the policy before the round's first update, without gradient."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, without gradient. None: not wanted."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a micro-batch that belongs to one policy."""

    policy: int
    completion_lengths: Sequence[int]
    tokens: slice
    """Its places among the N completion tokens."""
    own: slice
    """Its places among the M of them that our engine sampled."""


@dataclass(frozen=True, slots=True)
class MeasuredTokens:
    """M own tokens of a round, on the CPU."""

    log_ratio_M: Tensor
    """log k, float64."""
    age_M: Tensor
    """Versions between the one that sampled the token and the newest at the start of the round."""
    stale_M: Tensor
    """True for tokens that were sampled with keys and values of an older version."""
    corrected_M: Tensor
    """True for tokens whose weight was truncated or masked."""


def objective(
    batch: MicroBatch,
    share: Share,
    scored: ScoredTokens,
    step: StepSize,
    config: TrainingConfig,
    *,
    version: int,
) -> tuple[LossOutput, MeasuredTokens]:
    """One policy's loss of a micro-batch, and what is measured of the tokens that its engine sampled.

    `step` is the size of the policy's whole optimizer step; `version` its newest at the start of the round,
    from which the age of a token counts.
    """
    prox_N, own_mask_N = scored.prox_N[share.tokens], batch.own.mask_N[share.tokens]
    log_ratio_M = prox_N[own_mask_N] - batch.own.logprobs_M[share.own]
    age_M = version - batch.own.versions_M[share.own]
    weights = token_weights(log_ratio_M, config)
    shaped_N = None if batch.shaped_N is None else batch.shaped_N[share.tokens]
    tokens = TokenBatch(
        logprobs_N=scored.current.logprobs_N[share.tokens],
        prox_N=prox_N,
        advantages_N=batch.advantages_N[share.tokens],
        weights_N=batch_weights(prox_N, own_mask_N, weights.values_M, shaped_N),
        entropy_N=scored.current.entropy_N[share.tokens],
        reference_N=None if scored.reference_N is None else scored.reference_N[share.tokens],
        lengths=share.completion_lengths,
    )
    measured = MeasuredTokens(
        log_ratio_M=log_ratio_M.detach().cpu().double(),
        age_M=age_M,
        stale_M=batch.own.stale_M[share.own],
        corrected_M=weights.corrected_M.cpu(),
    )
    return policy_loss(tokens, step, config), measured


def shares_of(batch: MicroBatch) -> Iterator[Share]:
    """One share per policy, in the batch's order: samples of one policy are neighbours, so its tokens are."""
    tokens = own = 0
    for policy, members in groupby(batch.samples, key=lambda sample: sample.policy):
        samples = list(members)
        more = completion_tokens(samples)
        more_own = completion_tokens([s for s in samples if s.behaviour_logprobs is not None])
        lengths = [len(sample.learned) for sample in samples]
        yield Share(policy, lengths, slice(tokens, tokens + more), slice(own, own + more_own))
        tokens, own = tokens + more, own + more_own


# ---- how much a token counts that another policy sampled ----


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of M own tokens. A token is marked by at most one of the two masks."""

    values_M: Tensor
    corrected_M: Tensor
    """True where k was truncated or masked."""

    @property
    def corrected(self) -> int:
        return int(self.corrected_M.sum())


CORRECTION_CAP = 2.0
"""Largest weight of a token with tis."""

CORRECTION_LOW, CORRECTION_HIGH = 0.5, 5.0
"""Bounds of a weight: icepop leaves out tokens beyond either, decoupled those above."""


def token_weights(log_ratio_M: Tensor, config: TrainingConfig) -> TokenWeights:
    """Weights by the configured correction, from log k = log prox - log mu."""
    ratio_M = log_ratio_M.detach().exp()
    match config.correction:
        case "none":
            return uncorrected(ratio_M)
        case "tis":
            return truncated(ratio_M, CORRECTION_CAP)
        case "icepop":
            return icepop(ratio_M, CORRECTION_LOW, CORRECTION_HIGH)
        case "decoupled":
            return decoupled(ratio_M, CORRECTION_HIGH)


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
    certain count less. As a whole it makes less of them: a rule that shapes may replay with more.

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


def _weights(values_M: Tensor, corrected_M: Tensor) -> TokenWeights:
    return TokenWeights(values_M, corrected_M)


# ---- how far the tokens of a round were from the policy they trained ----


def with_off_policy(report: TrainReport, parts: Sequence[MeasuredTokens]) -> TrainReport:
    """The report with its off-policy fields over the tokens of all parts. Without tokens they stay None."""
    if not any(len(part.log_ratio_M) for part in parts):
        return report
    tokens = _joined(parts)
    # Here engine and trainer hold the same weights and keys: what differs is their arithmetic alone.
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
    """(sum k)^2 / (M sum k^2): the share of on-policy tokens that would estimate as well (Kish 1965)."""
    # A common factor of all k cancels; without it the largest is 1 and nothing overflows.
    ratio_M = (log_ratio_M - log_ratio_M.max()).exp()
    return float(ratio_M.sum() ** 2 / (len(ratio_M) * ratio_M.square().sum()))


def kl_estimate(log_ratio_M: Tensor) -> float | None:
    """Estimate of KL(mu || prox) from tokens that mu sampled: mean of k - 1 - log k (Schulman 2020, k3).

    Unbiased, because E_mu[-log k] is KL(mu || prox) and E_mu[k] = sum of prox = 1; and no token adds less
    than zero, so a small divergence is not lost in noise of both signs. None without tokens.

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
