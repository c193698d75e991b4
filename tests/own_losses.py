"""A module of a user's with losses of its own, named in `training.loss` by import path.

One of each kind of mean: where the pipeline guessed what a loss is a mean over, one of these would tell.
"""

import math
from dataclasses import replace

import torch

from swarmnode.training.losses import (
    DAPO,
    GRPO,
    GSPO,
    Clip,
    Loss,
    Surrogate,
    TokenBatch,
    centred,
    standardised,
)


def log_likelihood(batch: TokenBatch, clip: Clip) -> Surrogate:
    """REINFORCE without a ratio: nothing is clipped."""
    nothing_N = torch.zeros_like(batch.advantages_N, dtype=torch.bool)
    return Surrogate(batch.advantages_N * batch.logprobs_N, nothing_N)


def undefined(batch: TokenBatch, clip: Clip) -> Surrogate:
    """An objective that is no number, as of a bug."""
    return Surrogate(batch.logprobs_N * math.nan, torch.zeros_like(batch.advantages_N, dtype=torch.bool))


another_grpo = GRPO
wide_gspo = replace(GSPO, clip=DAPO.clip)
nowhere_finite = replace(GRPO, surrogate=undefined)
by_tokens = Loss(log_likelihood, standardised, "tokens")
by_answers = Loss(log_likelihood, standardised, "answers")
by_sums = Loss(log_likelihood, centred, "answer_sums")
by_full_length = Loss(log_likelihood, centred, "answers_at_full_length")
no_loss = log_likelihood

OWN_LOSSES = tuple(
    f"{__name__}:{name}" for name in ("another_grpo", "by_tokens", "by_answers", "by_sums", "by_full_length")
)
