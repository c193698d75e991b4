"""The nucleus that top-p leaves of a distribution: the tokens that the sampler would have drawn from."""

import torch
from torch import Tensor

from swarmnode.rollout.decode.sampler import keep_likely

FAR_BELOW = -1e30
"""Logit of a token outside the nucleus. Its probability is 0 and, unlike with -inf, so is 0 times this
logit."""


def outside_nucleus(logits_RV: Tensor, targets_R: Tensor, top_p: float) -> Tensor:
    """Returns True for the tokens that the sampler would not draw: all except the smallest set with `top_p`
    of the mass. [R, V]

    Uses the sampler's own rule, so that both select the same tokens. The target is never outside: if another
    policy sampled it, or rounding differs, it is included. So are values that are not finite: they must not
    be hidden.

    >>> outside_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([2]), top_p=0.7)
    tensor([[False, False, False]])
    >>> outside_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0]), top_p=0.7)
    tensor([[False, False,  True]])
    """
    logits_RV = logits_RV.detach()
    share = torch.full((1, 1), top_p, dtype=logits_RV.dtype, device=logits_RV.device)
    kept_RV = keep_likely(logits_RV, share)
    return (kept_RV.isneginf() & ~logits_RV.isneginf()).scatter_(1, targets_R[:, None], False)
