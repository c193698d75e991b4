"""The losses by name, one record each: the clip, the credit of each answer, and what the mean is over.

scored groups -> [loss_of] -> Loss.advantage -> [group_advantages] -> packing.py -> forward.py
              -> objective.py (a weight for each token) -> [policy_loss] -> backward

Each loss is a sum over tokens of weight * surrogate * share, defined completely by a `Loss`. A token's share
depends only on its own answer and on the size of the whole optimizer step, never on its micro-batch: however
a step is split between answers, the gradients of the parts add up to the same one. Your own loss is a `Loss`
in any importable module: `training.loss = "mymodule:loss"` (configs/README.md).

theta is the policy being trained, prox the one before the round's first update. The weight of a token
(objective.py) accounts for the policy that sampled it: with k = prox / mu as weight, grpo, dapo and dr_grpo
are decoupled PPO (Hilton et al. 2022), with min(k, cap) truncated importance sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from swarmnode.errors import ConfigError
from swarmnode.registry import find
from swarmnode.settings.config import TrainingConfig
from swarmnode.types import has_gradient, spread_of

EPSILON = 1e-4
"""Keeps the division finite. Small compared to the spread of 0/1 rewards (at least 0.04 in a group of
512)."""

MAX_LOG_RATIO = 20.0
"""Bound of every log-ratio before it is exponentiated. exp(20) = 5e8 is far beyond any clip, and its square,
which a gradient norm needs, is still finite in float32."""

Advantage = Callable[[Sequence[float]], Sequence[float]]
"""Maps the rewards of a group, at least two and not all equal, to as many advantages."""

MeanOver = Literal["tokens", "answers", "answer_sums", "answers_at_full_length"]
"""The items that a loss is averaged over: all tokens of the step; or its answers, each counted as the mean of
its tokens, as their sum, or as their sum divided by the longest answer that the sampler allows."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N completion tokens of whole answers, one answer after another. All values are finite."""

    logprobs_N: Tensor
    """Log-probabilities under theta, with gradient."""
    prox_N: Tensor
    """Log-probabilities under the policy before the round's first update, without gradient."""
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of a token in every term: 1, a correction for the sampling policy, or 0 to leave it out."""
    entropy_N: Tensor | None
    """Entropy of the next-token distribution, for measurement only. None: unknown."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, without gradient. None: not needed."""
    lengths: Sequence[int]
    """Tokens per answer; they add up to N."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a whole optimizer step, not of a micro-batch: the loss is divided by it."""

    sequences: int
    tokens: int
    max_tokens: int
    """The longest answer that the sampler allows (`rollout.max_tokens`)."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss to call backward on, and measurements without gradient. All are scalars that can be summed."""

    loss: Tensor
    clipped: Tensor
    """Number of tokens that were clipped: their gradient is removed or, with cispo, bounded."""
    kl: Tensor | None
    """Sum over tokens of the estimated KL divergence to the base, in nats. None: no reference."""
    entropy: Tensor | None
    """Sum over tokens of the entropy, in nats. None: not measured."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Ratios are clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def __call__(self, ratio_N: Tensor) -> Tensor:
        return ratio_N.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The objective of each of N tokens, to be maximised, before it is weighted and averaged."""

    values_N: Tensor
    clipped_N: Tensor
    """True where the token was clipped."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One value of `training.loss`. Everything specific to a loss is in this record.

    >>> reinforce = Loss(
    ...     surrogate=lambda batch, clip: Surrogate(
    ...         batch.advantages_N * batch.logprobs_N, torch.zeros_like(batch.advantages_N, dtype=torch.bool)
    ...     ),
    ...     advantage=centred,
    ...     mean_over="answer_sums",
    ... )
    >>> reinforce.counted(answers=8, tokens=100)
    8
    """

    surrogate: Callable[[TokenBatch, Clip], Surrogate]
    """Returns the objective of each token. It may use only the token's own answer: the other answers in the
    micro-batch are arbitrary."""
    advantage: Advantage
    """Maps the rewards of a group's answers to their credit."""
    mean_over: MeanOver
    clip: Clip = Clip(0.2, 0.28)
    """The clip passed to `surrogate`: wider above than below, as in DAPO."""

    def counted(self, *, answers: int, tokens: int) -> int:
        """Returns the contribution of a step, or any part of it, to the mean's denominator: its tokens or its
        answers."""
        return tokens if self.mean_over == "tokens" else answers

    def share_N(self, batch: TokenBatch, step: StepSize) -> Tensor:
        """Returns each token's share in the mean over a step of size `step`. [N]"""
        counted = self.counted(answers=step.sequences, tokens=step.tokens)
        match self.mean_over:
            case "tokens" | "answer_sums":
                return _constant(batch, 1 / counted)
            case "answers":
                return _per_answer(batch, counted)
            case "answers_at_full_length":
                return _constant(batch, 1 / (counted * step.max_tokens))


def policy_loss(batch: TokenBatch, step: StepSize, config: TrainingConfig) -> LossOutput:
    """Returns the loss of one micro-batch of an optimizer step of size `step`, by `config.loss`.

    The loss is minus the objective, plus `kl_coef` times the KL divergence to the base, which is weighted and
    averaged like the objective. Raises ValueError if `kl_coef` needs values that the batch does not have.
    """
    loss = loss_of(config.loss)
    surrogate = loss.surrogate(batch, loss.clip)
    terms_N = -surrogate.values_N
    kl_N = None if batch.reference_N is None else kl_to_reference(batch.logprobs_N, batch.reference_N)
    if config.kl_coef > 0:
        if kl_N is None:
            raise ValueError("training.kl_coef needs reference_N")
        terms_N = terms_N + config.kl_coef * kl_N
    return LossOutput(
        loss=(batch.weights_N * terms_N * loss.share_N(batch, step)).sum(),
        clipped=surrogate.clipped_N.sum(),
        kl=None if kl_N is None else kl_N.detach().sum(),
        entropy=None if batch.entropy_N is None else batch.entropy_N.detach().sum(),
    )


def kl_to_reference(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimates KL(theta || base) per token as q - 1 - log q with q = base / theta (Schulman 2020, k3). [N]

    Never negative, and its mean over tokens of theta is the divergence. Its gradient is not that of this
    divergence: the mean of (1 - q) grad log theta over tokens of theta is the gradient of KL(base || theta),
    which makes theta cover everything that the base does. GRPO descends it (Shao et al. 2024, equation 4).
    """
    log_ratio_N = (reference_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return log_ratio_N.expm1() - log_ratio_N


def _per_answer(batch: TokenBatch, sequences: int) -> Tensor:
    """Returns shares that count each answer as 1 / sequences, and its tokens equally. [N]"""
    lengths_B = _lengths(batch)
    return (1 / (sequences * lengths_B.to(batch.logprobs_N.dtype))).repeat_interleave(lengths_B)


def _constant(batch: TokenBatch, share: float) -> Tensor:
    return torch.full_like(batch.logprobs_N, share)


def _lengths(batch: TokenBatch) -> Tensor:
    return torch.tensor(batch.lengths, device=batch.logprobs_N.device)


# ---- the objective of each token ----


def by_token(batch: TokenBatch, clip: Clip) -> Surrogate:
    """PPO's clipped surrogate of the ratio of each token."""
    return _clipped(batch, _ratio(batch, _log_ratio(batch)), clip)


def by_geometric_mean(batch: TokenBatch, clip: Clip) -> Surrogate:
    """PPO's clipped surrogate of one ratio per answer, the geometric mean of the ratios of its tokens.

    Zheng et al. 2025 (GSPO), equations 5 and 7, in the form of GSPO-token (section 4.3), which has the same
    value and gradient and lets single tokens carry weights. Such a ratio moves far less than that of a token:
    with the clip of the other losses it is hardly ever clipped. The paper uses 3e-4 and 4e-4.
    """
    mean_N = _over_answers(batch, _log_ratio(batch), torch.mean)
    return _clipped(batch, _ratio(batch, mean_N), clip)


def by_clipped_weight(batch: TokenBatch, clip: Clip) -> Surrogate:
    """REINFORCE with the ratio of a token as a clipped weight: no token loses its gradient.

    MiniMax 2025 (MiniMax-M1), section 3.1, equations 4 and 5: sg(clip(ratio)) * advantage * log-probability.
    As in the paper's runs, only the upper clip is used: a lower one would raise the weights of tokens that
    the policy has already moved away from.
    """
    ratio_N = _log_ratio(batch).clamp(max=MAX_LOG_RATIO).exp()
    weight_N = ratio_N.clamp(max=1 + clip.high)
    return Surrogate(weight_N * batch.advantages_N * batch.logprobs_N, weight_N < ratio_N)


def by_product(batch: TokenBatch, clip: Clip) -> Surrogate:
    """REINFORCE on whole answers: an answer is one action, its log-probability the sum over its tokens.

    Ahmadian et al. 2024 (Back to basics), the RLOO estimator: the mean over answers of advantage * grad
    log-probability, with the mean reward of the others as baseline. This is the gradient while theta is prox.
    Later optimizer steps of a round importance-sample it: they multiply by the ratio of the whole answer, the
    product of its tokens' ratios, under PPO's clip. The longer the answer, the more the product moves, so an
    answer of hundreds of tokens is soon clipped: give this loss large steps.

    The surrogate has the value of the whole answer at each of its tokens; its gradient is the stated one.
    """
    sum_N = _over_answers(batch, _log_ratio(batch), torch.sum)
    return _clipped(batch, _ratio(batch, sum_N), clip)


def _clipped(batch: TokenBatch, ratio_N: Tensor, clip: Clip) -> Surrogate:
    """min(r A, clip(r) A): PPO's surrogate (Schulman et al. 2017, equation 7)."""
    free_N = ratio_N * batch.advantages_N
    bounded_N = clip(ratio_N) * batch.advantages_N
    return Surrogate(torch.minimum(free_N, bounded_N), bounded_N.detach() < free_N.detach())


def _log_ratio(batch: TokenBatch) -> Tensor:
    """log theta - log prox, without gradient. [N]"""
    return batch.logprobs_N.detach() - batch.prox_N


def _ratio(batch: TokenBatch, log_ratio_N: Tensor) -> Tensor:
    """Returns exp(log_ratio), whose gradient at a token is itself times that of the token's log-probability.
    [N]

    For the ratio of a token, this is its gradient. For the ratio of a whole answer, it is the token's part of
    it. The bound keeps the gradient's direction: a bad token that became far too likely is still pushed down.
    """
    value_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value_N * (batch.logprobs_N - batch.logprobs_N.detach()).exp()


def _over_answers(batch: TokenBatch, values_N: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the sum or mean over each answer, at every token of it. [N]"""
    reduced_B = torch.stack([reduce(answer) for answer in values_N.split(list(batch.lengths))])
    return reduced_B.repeat_interleave(_lengths(batch))


# ---- credit: how much better than its own group a completion was ----


def group_advantages(rewards: Sequence[float | None], advantage: Advantage) -> list[float | None] | None:
    """Returns one advantage per completion of a group.

    Unscored completions (None) stay out of every mean and get None. Returns None for the whole group if fewer
    than two were scored or all scored rewards are equal: a zero-advantage group has no gradient. Raises
    ConfigError if `advantage`, which may be a user's, does not return as many finite numbers.

    >>> group_advantages([1.0, 0.0, None, 1.0, 0.0], standardised)
    [0.9998000399920016, -0.9998000399920016, None, 0.9998000399920016, -0.9998000399920016]
    >>> group_advantages([1.0, 0.0, 0.0, 0.0], centred)
    [0.75, -0.25, -0.25, -0.25]
    """
    if not has_gradient(rewards):
        return None
    scored = [reward for reward in rewards if reward is not None]
    made = advantage(scored)
    try:
        given = [float(one) for one in made]
    except (TypeError, ValueError):
        given = []
    if len(given) != len(scored) or not all(map(isfinite, given)):
        raise ConfigError(
            f"the advantage of training.loss returned {made!r:.80} for {len(scored)} rewards",
            hint="it takes the rewards of a group, a list of floats, and must return as many finite floats",
        )
    credit = iter(given)
    return [None if reward is None else next(credit) for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + EPSILON): GRPO (Shao et al. 2024, section 4.1.2).

    >>> [round(advantage, 3) for advantage in standardised([2.0, 0.0])]
    [1.0, -1.0]
    """
    mean, spread = fmean(rewards), spread_of(rewards)
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    """reward - mean: Dr. GRPO (Liu et al. 2025, section 3.2). Dividing by the standard deviation would give
    more weight to questions that are nearly always or nearly never answered right.

    >>> centred([2.0, 0.0])
    [1.0, -1.0]
    """
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def against_the_others(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others' rewards: RLOO (Kool et al. 2019; Ahmadian et al. 2024, section 3.3).

    The baseline does not depend on the answer it judges, so the policy gradient stays unbiased. It equals
    `centred` times G / (G - 1).

    >>> against_the_others([2.0, 0.0, 0.0])
    [2.0, -1.0, -1.0]
    """
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


# ---- the losses by name ----

GRPO = Loss(by_token, standardised, "answers", Clip(0.2, 0.2))
"""Shao et al. 2024 (DeepSeekMath), section 4.1.1, equation 3, with PPO's clip. The paper averages over the
answers of one group; with groups of one size, the mean over all answers of a step is the same."""

DR_GRPO = Loss(by_token, centred, "answers_at_full_length", Clip(0.2, 0.2))
"""GRPO without its bias for short right and long wrong answers: every token counts 1 / max_tokens, and the
advantage is not divided by the standard deviation. Liu et al. 2025 (Understanding R1-Zero-like training),
section 3.2."""

DAPO = Loss(by_token, standardised, "tokens")
"""A long answer counts as much as its tokens do. Yu et al. 2025 (DAPO), equation 8 with section 3.1 (an upper
clip wider than the lower one leaves room for unlikely tokens) and section 3.3 (token mean)."""

GSPO = Loss(by_geometric_mean, standardised, "answers", Clip(3e-4, 4e-4))
"""Zheng et al. 2025 (GSPO), as in `by_geometric_mean`, with the clip of the paper."""

CISPO = Loss(by_clipped_weight, standardised, "tokens")
"""MiniMax 2025 (MiniMax-M1), as in `by_clipped_weight`."""

RLOO = Loss(by_product, against_the_others, "answer_sums")
"""Ahmadian et al. 2024 (Back to basics), as in `by_product`: an answer is one action."""


def loss_of(name: str) -> Loss:
    """Returns the record that `training.loss` names: a built-in one (registry.py), or a user's own.

    >>> loss_of("grpo") is loss_of("swarmnode.training.losses:GRPO")
    True

    Raises ConfigError if there is none.
    """
    found = find("loss", name)
    if not isinstance(found, Loss):
        called = name.partition(":")[2]
        raise ConfigError(
            f"training.loss = {name!r} is a {type(found).__name__}, not a Loss",
            hint=f"write {called} = Loss(surrogate, advantage, mean_over), from swarmnode.training.losses",
        )
    return found
