"""The policy a node owns: a frozen causal LM, its tokenizer, and one LoRA adapter that training moves.

base_model -> [policy] -> rollout engine (PolicyUpdate), trainer (parameters), checkpoint (adapter)

PEFT is the container and the file format.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import PolicyConfig
from swarmnode.errors import CheckpointError, ModelError
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.dense_patch import fuse_layers
from swarmnode.model.lora import LoraGemm
from swarmnode.model.lora_patch import FusedLora
from swarmnode.model.lora_targets import LoraTargets, find_targets
from swarmnode.rollout.engine import PolicyUpdate

FIRST_ADAPTER = "default"
"""PEFT's own name for an adapter that stands alone."""


class Policy:
    """A base model with a LoRA adapter. `version` counts the optimizer rounds it has been through.

    Several policies may stand on one base: each is one more adapter on the same PEFT model.
    """

    def __init__(
        self, base: LoadedModel, config: PolicyConfig, seed: int, *, beside: "Policy | None" = None
    ) -> None:
        """`beside`: a policy on the same loaded base, whose PEFT model gets one adapter more."""
        self.base = base
        self.version = 0
        self.number = 0 if beside is None else len(beside.peft_model.peft_config)
        """Tells the policies on one base apart, counted from 0."""
        self.adapter_name = FIRST_ADAPTER if beside is None else f"policy-{self.number}"
        self.scaling = config.lora_alpha / config.lora_rank
        self.targets = find_targets(base.model, config.lora_targets) if beside is None else beside.targets
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft 0.21 asks transformers 5 under a deprecated name; users can do nothing about it.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            # peft 0.21 finds by itself that Conv1D stores its weight transposed, and says so each time.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
            lora = lora_config(config, self.targets)
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
        """Adapter parameters by name, in a stable order. Names are those of PEFT's files: the adapter's own
        name is not in them, so what is saved of one policy fits any other."""
        return dict(self._trainable)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The same without names."""
        return list(self._trainable.values())

    def wake(self) -> None:
        """Let gradients reach this adapter: PEFT takes them from all but the one it was last told of."""
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def fuse(self, kernel: LoraGemm | None = None) -> FusedLora:
        """Our arithmetic in the LoRA layers and the decoder layers, once for all policies on this base."""
        if not self._fused:
            self._fused.append(FusedLora(self.peft_model, kernel))
            fuse_layers(self.model)
        elif kernel is not None:
            raise ModelError("the LoRA layers of this base have their arithmetic already")
        return self._fused[0]

    def update(self) -> PolicyUpdate:
        """A copy of the adapter for the engine: training goes on without disturbing it."""
        return PolicyUpdate(self.version, self.adapter(), self.scaling)

    def adapter(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter under the names that PEFT's files have."""
        return {name: parameter.detach().clone() for name, parameter in self._trainable.items()}

    def load_adapter(self, folder: Path) -> None:
        """Read an adapter in a folder as PEFT writes it. Raises CheckpointError when it does not fit."""
        from peft import set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(folder / "adapter_model.safetensors"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the adapter in {folder} cannot be read: {error}") from error
        ours = self.adapter()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in ours.items()}:
            raise CheckpointError(
                f"the adapter in {folder} has other layers or another rank than this policy",
                hint="start over with --fresh (nothing is deleted) or use the settings it was trained with",
            )
        set_peft_model_state_dict(self.peft_model, tensors, adapter_name=self.adapter_name)

    def _find_trainable(self) -> dict[str, torch.nn.Parameter]:
        mark = f".{self.adapter_name}."
        named = self.peft_model.named_parameters()
        return {name.replace(mark, "."): p for name, p in sorted(named) if ".lora_" in name and mark in name}


def lora_config(config: PolicyConfig, targets: LoraTargets) -> Any:
    """PEFT's description of a policy's adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(targets.names),
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
            f"PEFT puts no adapter on {base.name} ({base.family}): {error}",
            hint="set policy.lora_targets to other layers, or choose another --model",
        ) from error
    return beside.peft_model
