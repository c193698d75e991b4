"""The policy a node owns: a frozen causal LM, its tokenizer, and one LoRA adapter that training moves.

base_model -> [policy] -> rollout engine (PolicyUpdate), trainer (parameters), checkpoint (adapter)

PEFT is the container and the file format.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import PolicyConfig
from swarmnode.errors import CheckpointError
from swarmnode.rollout.engine import PolicyUpdate
from swarmnode.training.base_model import LoadedModel


class Policy:
    """A base model with a LoRA adapter. `version` counts the optimizer rounds it has been through."""

    def __init__(self, base: LoadedModel, config: PolicyConfig, seed: int) -> None:
        from peft import LoraConfig, get_peft_model

        self.base = base
        self.version = 0
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft 0.21 asks transformers 5 under a deprecated name; users can do nothing about it.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            self.peft_model: Any = get_peft_model(base.model, lora)
        self.peft_model.base_model_name_or_path = base.name
        self.scaling = config.lora_alpha / config.lora_rank

    @property
    def model(self) -> Any:
        """The transformers model with the LoRA layers in place."""
        return self.peft_model.get_base_model()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Adapter parameters by name, in a stable order."""
        return {n: p for n, p in sorted(self.peft_model.named_parameters()) if p.requires_grad}

    def update(self) -> PolicyUpdate:
        """A copy of the adapter for the engine: training goes on without disturbing it."""
        return PolicyUpdate(self.version, self._adapter(), self.scaling)

    def save_adapter(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json as PEFT does; vLLM and the Hub read them.

        Raises OSError: whoever writes a folder decides what a full disk means.
        """
        from safetensors.torch import save

        folder.mkdir(parents=True, exist_ok=True)
        self.peft_model.peft_config["default"].save_pretrained(str(folder))
        (folder / "adapter_model.safetensors").write_bytes(save(self._adapter(), metadata={"format": "pt"}))

    def load_adapter(self, folder: Path) -> None:
        """Read an adapter written by `save_adapter`. Raises CheckpointError when it does not fit."""
        from peft import set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(folder / "adapter_model.safetensors"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the adapter in {folder} cannot be read: {error}") from error
        ours = self._adapter()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in ours.items()}:
            raise CheckpointError(
                f"the adapter in {folder} has other layers or another rank than this policy",
                hint="start over with --fresh (nothing is deleted) or use the settings it was trained with",
            )
        set_peft_model_state_dict(self.peft_model, tensors)

    def _adapter(self) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        return {name: tensor.detach().clone() for name, tensor in state.items()}
