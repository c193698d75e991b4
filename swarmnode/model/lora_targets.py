"""Which layers of a model LoRA changes, decided from its structure alone.

outline.py (a model without weights), base_model -> [find_targets] -> policy.py

A model with experts has three kinds of layers: dense ones (attention, shared MLP), experts, of which a token
sees a few, and routers, which choose those. Only dense ones are changed unless somebody says more: what an
expert learns from a handful of tokens, or a router that moves under the engine, is not what GRPO measured.
transformers 5 keeps the experts of most families as one stacked weight, which is no linear layer at all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from swarmnode.errors import ModelError
from swarmnode.rollout.decode.adapter import linear_modules

AUTO, ALL_LINEAR = "auto", "all-linear"
"""What `policy.lora_targets` may say besides names."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of layers that choose experts, as transformers' families have them."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """What PEFT is told, and what was left alone."""

    names: tuple[str, ...]
    """Module names as PEFT's `target_modules` takes them: last names, or whole ones where the last is not
    unique."""
    left_out: tuple[str, ...] = ()
    """Kinds of layers that the adapter could not change, or should not: experts, routers, ..."""

    def describe(self) -> str:
        """The layers in one line.

        >>> LoraTargets(("q_proj", "v_proj"), ("experts",)).describe()
        'q_proj, v_proj; experts are left out'
        """
        shown = ", ".join(sorted({name.rpartition(".")[2] for name in self.names}))
        return f"{shown}; {', '.join(self.left_out)} are left out" if self.left_out else shown


def find_targets(model: nn.Module, wanted: Sequence[str] = (AUTO,)) -> LoraTargets:
    """The layers that `policy.lora_targets` means in this model, which may be without weights.

    Raises ModelError where that is none, or a name is not of a layer that LoRA can change here.

    >>> find_targets(model, ["auto"]).describe()                                      # doctest: +SKIP
    'k_proj, o_proj, q_proj, v_proj; experts, routers are left out'
    """
    family = str(model.config.model_type)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    linear = list(linear_modules(model))  # pyright: ignore[reportArgumentType]
    modules = [name for name, _ in model.named_modules()]
    has_experts = any(_is_expert(name) for name in modules)
    open_to_lora = [name for name in linear if not _means_experts(model, _last(name))]
    if tuple(wanted) not in ((AUTO,), (ALL_LINEAR,)):
        return LoraTargets(_shortened(_named(open_to_lora, wanted, family), modules))
    kept = open_to_lora
    if tuple(wanted) == (AUTO,) and has_experts:
        kept = [name for name in kept if not _is_expert(name) and _last(name) not in ROUTERS]
    if not kept:
        raise ModelError(
            f"{family} has no linear layer that LoRA could change",
            hint="set policy.lora_targets to names of its layers, or choose another --model",
        )
    return LoraTargets(_shortened(kept, modules), _left_out(model, kept, linear) if has_experts else ())


def _named(linear: Collection[str], wanted: Sequence[str], family: str) -> list[str]:
    """The layers that these names mean, read as PEFT reads them: the end of a layer's name."""
    found: list[str] = []
    for name in wanted:
        meant = [layer for layer in linear if layer == name or layer.endswith(f".{name}")]
        if not meant:
            known = ", ".join(sorted({_last(layer) for layer in linear})) or "none"
            raise ModelError(
                f"policy.lora_targets: {family} has no linear layer {name} that LoRA could change",
                hint=f"there are {known}; auto takes those that suit",
            )
        found += [layer for layer in meant if layer not in found]
    return found


def _shortened(layers: Collection[str], modules: Collection[str]) -> tuple[str, ...]:
    """Last names, as everybody writes them, unless another module has the same."""
    others = {_last(name) for name in modules if name not in set(layers)}
    return tuple(sorted({name if _last(name) in others else _last(name) for name in layers}))


def _left_out(model: nn.Module, kept: Collection[str], linear: Collection[str]) -> tuple[str, ...]:
    """What LoRA leaves out, in words, for a model with experts."""
    kinds: Mapping[str, bool] = {
        "experts": True,
        "routers": True,
        "dense and shared MLPs": any(
            not _is_expert(name) and _last(name) not in ROUTERS for name in set(linear) - set(kept)
        ),
    }
    changed = {"experts": any(map(_is_expert, kept)), "routers": any(_last(name) in ROUTERS for name in kept)}
    return tuple(kind for kind, there in kinds.items() if there and not changed.get(kind, False))


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _means_experts(model: Any, name: str) -> bool:
    """Whether PEFT reads this last name as that of an expert's layer, from the time when experts were
    modules, and so changes the stacked weight instead. No engine samples from that, and a dense layer of the
    same name can then not be changed at all."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:
        return True  # One of two that are stacked together.
    return bool(config.target_parameters)
