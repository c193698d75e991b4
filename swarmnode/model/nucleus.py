"""What top-p leaves of a distribution: the tokens that the sampler would have drawn from.

logits over the temperature -> [outside_nucleus] -> head.py

The sampler records a token's log-probability under the renormalised nucleus. What that is compared with has
to be one of the same kind: over the whole vocabulary, theta and prox would be too low by the logarithm of the
nucleus's mass, a tenth at top-p 0.9, at every token and on policy too.
"""

import torch
from torch import Tensor

from swarmnode.rollout.decode.sampler import keep_likely

FAR_BELOW = -1e30
"""The logit of a token outside the nucleus. Its probability is 0, and unlike -inf, so is 0 times this."""


def outside_nucleus(logits_RV: Tensor, targets_R: Tensor, top_p: float) -> Tensor:
    """True where the sampler would not have gone: all but the fewest tokens with `top_p` of the mass. [R, V]

    By the sampler's own rule, so that both mean the same tokens. The target is never outside: where it was
    sampled by another policy, or a rounding lies between, it is taken in. So is what is not finite: it has to
    show.

    >>> outside_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([2]), top_p=0.7)
    tensor([[False, False, False]])
    >>> outside_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0]), top_p=0.7)
    tensor([[False, False,  True]])
    """
    logits_RV = logits_RV.detach()
    ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    share, all_tokens = (logits_RV.new_full((1, 1), value) for value in (top_p, len(ranks_V)))
    kept_RV = keep_likely(logits_RV, share, all_tokens, ranks_V)
    return (kept_RV.isneginf() & ~logits_RV.isneginf()).scatter_(1, targets_R[:, None], False)
