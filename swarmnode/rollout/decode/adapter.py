"""The LoRA tensors of a policy update, checked against the weights they are for.

trainer -> PolicyUpdate -> [adapter] -> weights.py (embedded engine) | fallback.py (any other model)

A policy that diverged is refused here, before an engine samples from it: every later token would be noise.
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
"""What PEFT puts before the name of a module in a saved adapter."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two factors of one weight's change: A [r, in] and B [out, r]."""

    a: Tensor
    b: Tensor
    scaling: float

    def delta(self) -> Tensor:
        """`scaling * B @ A`, a new tensor in float32."""
        return (self.b.float() @ self.a.float()).mul_(self.scaling)


def lora_pairs(update: PolicyUpdate, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraPair]:
    """Pairs by module name. `shapes` holds (out, in) of every module that may carry LoRA.

    Raises EngineError for a name, a shape or a number that cannot be right.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in update.tensors.items():
        module, kind = _split_name(name)
        if module not in shapes:
            raise EngineError(
                f"policy {update.version} changes {name}, which this engine cannot change",
                hint=f"LoRA may target {', '.join(sorted({m.rpartition('.')[2] for m in shapes}))}",
            )
        factors.setdefault(module, {})[kind] = tensor
    return {module: _pair(update, module, found, shapes[module]) for module, found in factors.items()}


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Modules that a policy may change. Not the head: it may be the embedding as well."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _split_name(name: str) -> tuple[str, str]:
    """`base_model.model.<module>.lora_A.weight` -> (`<module>`, `lora_A`)."""
    module, _, kind = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
    if kind not in ("lora_A", "lora_B") or not name.endswith(".weight"):
        raise EngineError(
            f"{name} is no LoRA factor", hint="save plain LoRA: no DoRA, bias or trained module"
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
