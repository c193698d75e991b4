"""The objective of a micro-batch: the loss to call backward on, and measurements of its tokens.

trainer.py, pipeline stages -> [objective] -> token_weights.py -> losses.py -> LossOutput
                                    |
                                    +-> off_policy.py (MeasuredTokens) -> TrainReport

This module defines a token's part in learning, wherever its log-probabilities were computed: its weight
accounts for the policy that sampled it. Tokens of several policies may share the micro-batch; each policy's
objective sees its own `Share`.

Three policies: mu sampled the token, and its log-probability was recorded then; prox is the trainer's before
the round's first update; theta is being trained. The clip bounds theta / prox. The weight, a function of k =
prox / mu, corrects for mu (token_weights.py) and carries no gradient. mu may be an older version, several
versions in one completion, or stale keys and values: the sampling process made the record, so k is exact. All
three are the distributions that tokens are drawn from: tempered and, with top-p, each cut to its own nucleus
and renormalised (model/nucleus.py), so k is 1 on policy. A token outside prox's nucleus counts as its least
likely member. The weight covers only the token, not the likelihood of its prefix: that product would have no
bounded variance.

Nobody knows which policy sampled the tokens of a stranger or of a replayed answer: they count in full, or are
shaped by their likelihood under prox. They are not measured either: a stranger's tokens have no
log-probabilities, and their versions cannot be compared with ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from swarmnode.model.head import TokenLogprobs
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.losses import LossOutput, StepSize, TokenBatch, policy_loss
from swarmnode.training.off_policy import MeasuredTokens
from swarmnode.training.packing import MicroBatch, completion_tokens
from swarmnode.training.token_weights import own_weights, token_weights


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The N completion tokens of a micro-batch with all the log-probabilities that a loss may need."""

    current: TokenLogprobs
    """Log-probabilities and entropies under the policy being trained, with gradient."""
    prox_N: Tensor
    """Log-probabilities under the policy before the round's first update, without gradient."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, without gradient. None: not needed."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a micro-batch that belongs to one policy."""

    policy: int
    completion_lengths: Sequence[int]
    tokens: slice
    """The policy's places among the N completion tokens."""
    own: slice
    """The policy's places among the M of them that our engine sampled."""


def objective(
    batch: MicroBatch,
    share: Share,
    scored: ScoredTokens,
    step: StepSize,
    config: TrainingConfig,
    *,
    version: int,
) -> tuple[LossOutput, MeasuredTokens]:
    """Returns one policy's loss of a micro-batch, and measurements of the tokens that its engine sampled.

    `step` is the size of the policy's whole optimizer step; `version` is its newest at the start of the
    round, from which the age of a token is counted.
    """
    prox_N, own_mask_N = scored.prox_N[share.tokens], batch.own.mask_N[share.tokens]
    log_ratio_M = prox_N[own_mask_N] - batch.own.logprobs_M[share.own]
    age_M = version - batch.own.versions_M[share.own]
    weights_M, corrected_M = own_weights(log_ratio_M)
    shaped_N = None if batch.shaped_N is None else batch.shaped_N[share.tokens]
    tokens = TokenBatch(
        logprobs_N=scored.current.logprobs_N[share.tokens],
        prox_N=prox_N,
        advantages_N=batch.advantages_N[share.tokens],
        weights_N=token_weights(prox_N, own_mask_N, weights_M, shaped_N),
        entropy_N=scored.current.entropy_N[share.tokens],
        reference_N=None if scored.reference_N is None else scored.reference_N[share.tokens],
        lengths=share.completion_lengths,
    )
    measured = MeasuredTokens(
        log_ratio_M=log_ratio_M.detach().cpu().double(),
        age_M=age_M,
        stale_M=batch.own.stale_M[share.own],
        corrected_M=corrected_M.cpu(),
    )
    return policy_loss(tokens, step, config), measured


def shares_of(batch: MicroBatch) -> Iterator[Share]:
    """Yields one share per policy, in the batch's order: samples of one policy, and so its tokens, are
    contiguous."""
    tokens = own = 0
    for policy, members in groupby(batch.samples, key=lambda sample: sample.policy):
        samples = list(members)
        more = completion_tokens(samples)
        more_own = completion_tokens([s for s in samples if s.behaviour_logprobs is not None])
        lengths = [len(sample.learned) for sample in samples]
        yield Share(policy, lengths, slice(tokens, tokens + more), slice(own, own + more_own))
        tokens, own = tokens + more, own + more_own
