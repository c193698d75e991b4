"""Checks the LoRA tensors of a policy update against their weights, and merges them.

trainer -> PolicyUpdate -> [lora_pairs] -> weights.py (embedded engine) | generate_engine.py
                               |
                               v  LoraPair -> [merged_weight] -> weights.py | model_lora.py | vllm_policies.py

A diverged policy is refused here, before an engine samples from it: every later token would be noise.

Merging a LoRA into a rounded weight must not round the update away. A change smaller than half the step
between two numbers of a type rounds to nothing, and the weights of a base lie on such numbers: after one
optimizer step in bfloat16, three quarters of the entries of base + delta are those of the base, and a third
to a half of the policy's change is gone. So the change is stretched before rounding, by the factor c that
gives the rounded change the wanted length along delta:

    <round(base + c * delta) - base, delta> = <delta, delta>

Entries close to a step take it, in place of those that are far from one. Compared to plain rounding, and to
stochastic rounding (which loses nothing either, but adds noise), the logits are closest to those of the exact
policy: benchmarks/cold_start.py. Once changes are larger than steps, c is 1 and this is plain rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import PolicyUpdate

PEFT_PREFIX = "base_model.model."
"""Prefix of a module's name in an adapter that PEFT saved."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two factors of one weight's change: A [r, in] and B [out, r]."""

    a: Tensor
    b: Tensor
    scaling: float

    def delta(self) -> Tensor:
        """Returns `scaling * B @ A`, a new tensor in float32."""
        return (self.b.float() @ self.a.float()).mul_(self.scaling)


def lora_pairs(update: PolicyUpdate, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraPair]:
    """Returns the pairs by module name. `shapes` holds (out, in) of every module that may have LoRA.

    Raises EngineError for an invalid name, shape or number.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in update.tensors.items():
        module, kind = _split_name(name)
        if module not in shapes:
            raise EngineError(
                f"policy {update.version} changes {name}, which this engine does not support",
                hint=f"LoRA may target {', '.join(sorted({m.rpartition('.')[2] for m in shapes}))}",
            )
        factors.setdefault(module, {})[kind] = tensor
    return {module: _pair(update, module, found, shapes[module]) for module, found in factors.items()}


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Returns the modules that a policy may change, by name. The head is excluded: it may be the embedding as
    well."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _split_name(name: str) -> tuple[str, str]:
    """Splits `base_model.model.<module>.lora_A.weight` into (`<module>`, `lora_A`)."""
    module, _, kind = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
    if kind not in ("lora_A", "lora_B") or not name.endswith(".weight"):
        raise EngineError(
            f"{name} is not a LoRA factor", hint="save plain LoRA: no DoRA, bias or trained module"
        )
    return module, kind


def _pair(
    update: PolicyUpdate, module: str, factors: Mapping[str, Tensor], shape: tuple[int, int]
) -> LoraPair:
    if set(factors) != {"lora_A", "lora_B"}:
        raise EngineError(f"policy {update.version} has only {', '.join(factors)} of {module}")
    a, b = factors["lora_A"].detach(), factors["lora_B"].detach()
    if (b.shape[0], a.shape[1]) != shape or b.shape[1] != a.shape[0]:
        raise EngineError(
            f"LoRA of {module} is B {tuple(b.shape)} @ A {tuple(a.shape)}, its weight is {shape}",
            hint="this adapter belongs to another model",
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise EngineError(f"policy {update.version} has NaN or infinite numbers in {module}")
    return LoraPair(a, b, update.scaling)


# ---- merging into a rounded weight ----

SAMPLED_NUMBERS = 1 << 14
"""Number of entries of a weight, in whole rows spread over it, that determine c to within a few
hundredths."""

NEGLIGIBLE_LOSS = 0.002
"""Share of an update that plain rounding may lose."""

LARGEST_STRETCH = 4096.0
"""The largest c. A change so small that bfloat16's step needs more is dropped on purpose: few of its entries
would remain."""

HALVINGS = 6
"""Halvings of the logarithmic interval that contains c: to a hundredth of c."""


@torch.no_grad()
def merged_weight(weight: Tensor, pair: LoraPair, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `weight + scaling * B @ A`, rounded once, to `dtype` or to the weight's own. Both are [out,
    in]."""
    rounded_to = weight.dtype if dtype is None else dtype
    delta, exact = pair.delta().to(weight.device), weight.float()
    if rounded_to.itemsize < exact.dtype.itemsize:
        rows = _spread_rows(delta)
        delta.mul_(stretch(exact[rows], delta[rows], rounded_to))
    return delta.add_(exact).to(rounded_to)


def lost_share(base: Tensor, delta: Tensor, merged: Tensor) -> float:
    """Returns the share of `delta` that is missing from `merged - base`, measured along `delta`: 0 for none,
    1 for all of it.

    >>> base, delta = torch.ones(2), torch.tensor([0.001, 0.01])
    >>> round(lost_share(base, delta, (base + delta).bfloat16()), 3)
    0.226
    """
    wanted = delta.double().square().sum()
    arrived = ((merged.double() - base.double()) * delta.double()).sum()
    return 0.0 if wanted == 0 else float(1 - arrived / wanted)


def stretch(base: Tensor, delta: Tensor, dtype: torch.dtype) -> float:
    """Returns c, the factor to apply to `delta` before `base + delta` is rounded to `dtype`."""
    wanted = float(delta.square().sum())

    def lost(factor: float) -> float:
        merged = torch.add(base, delta, alpha=factor).to(dtype).float()
        return 1 - float(merged.sub_(base).mul_(delta).sum()) / wanted

    if wanted == 0 or lost(1.0) <= NEGLIGIBLE_LOSS:
        return 1.0
    # The rounded change never shrinks as c grows, since no entry's rounding does.
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
