"""The policy that a node owns: a frozen causal LM, its tokenizer, and one trained LoRA adapter.

base_model -> [Policy] -> rollout engine (PolicyUpdate), trainer (parameters), checkpoint (adapter)
                 ^
                 +-- [find_targets] (which layers LoRA changes)

PEFT is the container and the file format.

The layers that LoRA changes follow from the model's structure alone. A model with experts has three kinds of
layers: dense ones (attention, shared MLP), experts, of which a token uses a few, and routers, which choose
those. Only dense ones are changed unless the settings say otherwise: GRPO was not measured on an expert that
learns from a handful of tokens, or on a router that moves under the engine. transformers 5 keeps the experts
of most families as one stacked weight, which is not a linear layer.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmnode.errors import CheckpointError, ModelError
from swarmnode.model.adapters.lora_patch import FusedLora
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.dense_patch import fuse_layers
from swarmnode.rollout.decode.adapters.adapter import linear_modules
from swarmnode.rollout.engine import PolicyUpdate
from swarmnode.settings.config import PolicyConfig

FIRST_ADAPTER = "default"
"""PEFT's own name for a single adapter."""


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """The layers that get LoRA, and those that do not."""

    names: tuple[str, ...]
    """Module names in the form of PEFT's `target_modules`: last names, or whole ones if the last is not
    unique."""
    left_out: tuple[str, ...] = ()
    """Kinds of layers that the adapter cannot or should not change: experts, routers, ..."""

    def describe(self) -> str:
        """Returns the layers in one line.

        >>> LoraTargets(("q_proj", "v_proj"), ("experts",)).describe()
        'q_proj, v_proj; experts are left out'
        """
        shown = ", ".join(sorted({name.rpartition(".")[2] for name in self.names}))
        return f"{shown}; {', '.join(self.left_out)} are left out" if self.left_out else shown


class Policy:
    """A base model with a LoRA adapter. `version` counts the optimizer rounds it has been through.

    Several policies may share one base: each is one more adapter on the same PEFT model.
    """

    def __init__(
        self, base: LoadedModel, config: PolicyConfig, seed: int, *, beside: "Policy | None" = None
    ) -> None:
        """`beside`: a policy on the same loaded base, whose PEFT model gets one more adapter."""
        self.base = base
        self.version = 0
        self.number = 0 if beside is None else len(beside.peft_model.peft_config)
        """Distinguishes the policies on one base, counted from 0."""
        self.adapter_name = FIRST_ADAPTER if beside is None else f"policy-{self.number}"
        self.scaling = config.lora_alpha / config.lora_rank
        self.targets = find_targets(base.model, config.lora_targets) if beside is None else beside.targets
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft 0.21 asks transformers 5 under a deprecated name, which users cannot change.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            # peft 0.21 detects that Conv1D stores its weight transposed, and warns each time.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
            lora = lora_config(config, self.targets.names)
            self.peft_model: Any = _with_adapter(base, lora, self.adapter_name, beside)
        self.peft_model.base_model_name_or_path = base.name
        self._fused: list[FusedLora] = [] if beside is None else beside._fused
        self._trainable = self._find_trainable()
        self.wake()

    @property
    def model(self) -> Any:
        """The transformers model with the LoRA layers in place."""
        return self.peft_model.get_base_model()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Returns the adapter's parameters by name, in a stable order. The names are those of PEFT's files,
        without the adapter's own name, so that the saved weights of one policy fit any other."""
        return dict(self._trainable)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the adapter, in the order of `trainable`."""
        return list(self._trainable.values())

    def wake(self) -> None:
        """Enables gradients of this adapter: PEFT disables those of all adapters except the active one."""
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def fuse(self) -> FusedLora:
        """Switches LoRA layers and decoder layers to our arithmetic, once for all policies on this base."""
        if not self._fused:
            self._fused.append(FusedLora(self.peft_model))
            fuse_layers(self.model)
        return self._fused[0]

    def update(self) -> PolicyUpdate:
        """Returns a copy of the adapter for the engine, unaffected by further training."""
        return PolicyUpdate(self.version, self.adapter(), self.scaling)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the adapter under the names of PEFT's files."""
        return {name: parameter.detach().clone() for name, parameter in self._trainable.items()}

    def load_adapter(self, folder: Path) -> None:
        """Loads an adapter from a folder in PEFT's format. Raises CheckpointError if it does not fit."""
        from peft import set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(folder / "adapter_model.safetensors"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the adapter in {folder}: {error}") from error
        ours = self.adapter()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in ours.items()}:
            raise CheckpointError(
                f"the adapter in {folder} has different layers or another rank than this policy",
                hint="use the settings it was trained with, start another run (--run NAME), or start over"
                " with --fresh (nothing is deleted)",
            )
        set_peft_model_state_dict(self.peft_model, tensors, adapter_name=self.adapter_name)

    def _find_trainable(self) -> dict[str, torch.nn.Parameter]:
        mark = f".{self.adapter_name}."
        named = self.peft_model.named_parameters()
        return {name.replace(mark, "."): p for name, p in sorted(named) if ".lora_" in name and mark in name}


def lora_config(config: PolicyConfig, modules: Collection[str]) -> Any:
    """Returns PEFT's description of a policy's adapter of these modules."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(modules),
        task_type="CAUSAL_LM",
    )


def _with_adapter(base: LoadedModel, lora: Any, name: str, beside: Policy | None) -> Any:
    from peft import get_peft_model

    try:
        if beside is None:
            return get_peft_model(base.model, lora, adapter_name=name)
        beside.peft_model.add_adapter(name, lora)
    except ValueError as error:
        raise ModelError(
            f"PEFT cannot add an adapter to {base.name} ({base.family}): {error}",
            hint="set policy.lora_targets to other layers, or choose another --model",
        ) from error
    return beside.peft_model


# ---- the layers of a model that LoRA changes ----

AUTO, ALL_LINEAR = "auto", "all-linear"
"""Values of `policy.lora_targets` that are not layer names."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of layers that choose experts, in transformers' families."""


def find_targets(model: nn.Module, wanted: Sequence[str] = (AUTO,)) -> LoraTargets:
    """Returns the layers that `policy.lora_targets` selects in this model, which may be without weights.

    Raises ModelError if there are none, or if a name is not a layer that LoRA can change here.

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
    """Returns the layers with these names, matched as PEFT does: against the end of a layer's name."""
    found: list[str] = []
    for name in wanted:
        meant = [layer for layer in linear if layer == name or layer.endswith(f".{name}")]
        if not meant:
            known = ", ".join(sorted({_last(layer) for layer in linear})) or "none"
            raise ModelError(
                f"policy.lora_targets: {family} has no linear layer {name} that LoRA could change",
                hint=f"it has {known}; auto selects suitable ones",
            )
        found += [layer for layer in meant if layer not in found]
    return found


def _shortened(layers: Collection[str], modules: Collection[str]) -> tuple[str, ...]:
    """Returns last names, as is usual, for layers whose last name no other module has."""
    others = {_last(name) for name in modules if name not in set(layers)}
    return tuple(sorted({name if _last(name) in others else _last(name) for name in layers}))


def _left_out(model: nn.Module, kept: Collection[str], linear: Collection[str]) -> tuple[str, ...]:
    """Returns the kinds of layers that LoRA leaves out, in words, for a model with experts."""
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
    """Returns True if PEFT takes this last name for an expert's layer, from the time when experts were
    modules, and would change the stacked weight instead. No engine samples from that, and a dense layer of
    the same name can then not be changed at all."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:
        return True  # One of two that are stacked together.
    return bool(config.target_parameters)
