"""A LoRA merged into a rounded weight so that the update is not rounded away.

adapter.py -> LoraPair -> [merging] -> weights.py | model_lora.py | vllm/policies.py

A change smaller than half the step between two numbers of a type rounds to nothing, and the weights of a base
lie on such numbers: after one optimizer step in bfloat16, three quarters of the entries of base + delta are
those of the base, and a third to a half of the policy's change is gone. So the change is stretched before it
is rounded, by the factor c with which what arrives has the wanted length along it:

    <round(base + c * delta) - base, delta> = <delta, delta>

Entries that are near a step take it, in place of those that are far from one. Against plain rounding, and
against stochastic rounding (which loses nothing either, but adds noise), the logits are nearest to those of
the exact policy: benchmarks/cold_start.py. Once changes are larger than steps, c is 1 and this is rounding.
"""

import torch
from torch import Tensor

from swarmnode.rollout.decode.adapter import LoraPair

SAMPLED_NUMBERS = 1 << 14
"""So many entries of a weight, in whole rows spread over it, say what c is, within a few hundredths."""

NEGLIGIBLE_LOSS = 0.002
"""Share of an update that plain rounding may lose."""

LARGEST_STRETCH = 4096.0
"""A change that is smaller still than the step of bfloat16 is left to be lost: its entries would be few."""

HALVINGS = 6
"""Of the interval in which c lies, by its logarithm: to a hundredth of c."""


@torch.no_grad()
def merged_weight(weight: Tensor, pair: LoraPair, dtype: torch.dtype | None = None) -> Tensor:
    """`weight + scaling * B @ A`, rounded once, to `dtype` or to the weight's own. Both are [out, in]."""
    rounded_to = weight.dtype if dtype is None else dtype
    delta, exact = pair.delta().to(weight.device), weight.float()
    if rounded_to.itemsize < exact.dtype.itemsize:
        rows = _spread_rows(delta)
        delta.mul_(stretch(exact[rows], delta[rows], rounded_to))
    return delta.add_(exact).to(rounded_to)


def lost_share(base: Tensor, delta: Tensor, merged: Tensor) -> float:
    """The share of `delta` that `merged - base` does not have along it: 0 nothing is lost, 1 all is.

    >>> base, delta = torch.ones(2), torch.tensor([0.001, 0.01])
    >>> round(lost_share(base, delta, (base + delta).bfloat16()), 3)
    0.226
    """
    wanted = delta.double().square().sum()
    arrived = ((merged.double() - base.double()) * delta.double()).sum()
    return 0.0 if wanted == 0 else float(1 - arrived / wanted)


def stretch(base: Tensor, delta: Tensor, dtype: torch.dtype) -> float:
    """c: by how much to multiply `delta` before `base + delta` is rounded to `dtype`."""
    wanted = float(delta.square().sum())

    def lost(factor: float) -> float:
        merged = torch.add(base, delta, alpha=factor).to(dtype).float()
        return 1 - float(merged.sub_(base).mul_(delta).sum()) / wanted

    if wanted == 0 or lost(1.0) <= NEGLIGIBLE_LOSS:
        return 1.0
    # What arrives never shrinks as c grows, since no entry's rounding does.
    high = 2.0
    while lost(high) > 0:
        if high >= LARGEST_STRETCH:
            return 1.0
        high *= 2
    low = high / 2
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if lost(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def _spread_rows(matrix: Tensor) -> slice:
    rows, columns = matrix.shape
    return slice(None, None, max(1, rows * columns // SAMPLED_NUMBERS))
