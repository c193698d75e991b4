"""The policy a node owns: a frozen causal LM, its tokenizer, and one LoRA adapter that training moves.

models folder or hub -> [policy] -> rollout engine (PolicyUpdate), trainer (parameters), checkpoint (adapter)

PEFT is the container and the file format; nothing that a stranger wrote is ever run (`trust_remote_code` is
off and only safetensors weights are read).
"""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import PolicyConfig
from swarmnode.errors import CheckpointError, ModelError
from swarmnode.models import ModelCard, find_model
from swarmnode.rollout.engine import PolicyUpdate

FINGERPRINT_VALUES = 64
"""Leading values of each tensor that enter the fingerprint: enough to tell two trainings apart."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM as loaded, before an adapter is put on it."""

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str
    """Tells apart base models that an adapter could be mistaken for (names, shapes and leading weights)."""

    @property
    def family(self) -> str:
        return str(self.model.config.model_type)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def card(self) -> ModelCard | None:
        """What its memory depends on; None for an architecture without attention heads."""
        config = self.model.config.get_text_config()
        try:
            heads, hidden, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
        except AttributeError:
            return None
        # Models without grouped-query attention do not name these two.
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        return ModelCard(self.name, self.parameters, layers, hidden, kv_heads, head_dim, config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model was made for; None for models without such a bound (ALiBi)."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence, and those the model's generation config adds (chat models do)."""
        extra = self.model.generation_config.eos_token_id
        listed = [] if extra is None else [extra] if isinstance(extra, int) else list(extra)
        return tuple(dict.fromkeys([self.tokenizer.eos_token_id, *listed]))


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


def load_base_model(spec: str, config: PolicyConfig) -> LoadedModel:
    """Load a folder or a hub name as a causal LM with its tokenizer.

    Raises ModelError that says which of the two could not be found or loaded, and what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    # Its bars count tensors, not minutes; the hub's own bars for downloads stay.
    transformers_logging.disable_progress_bar()
    source = find_model(spec)
    device = _device(config.device)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=_dtype(config.dtype, device), trust_remote_code=False, use_safetensors=True
        )
        model.to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"{spec} does not fit into memory: {error}", hint="choose a smaller --model"
        ) from error
    except Exception as error:
        raise ModelError(
            f"cannot load {spec} as a causal LM: {_first_line(error)}", hint=_advice(spec)
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {spec} has no end-of-sequence token", hint="choose another --model"
        )
    model.eval()
    return LoadedModel(spec, model, tokenizer, _fingerprint(model))


def _advice(spec: str) -> str:
    if Path(spec).expanduser().is_dir():
        return "the folder must hold config.json, tokenizer files and safetensors weights"
    return "check the name and the connection (private models need `hf auth login`), or try --model tiny"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ModelError(
                f"policy.device = {name} cannot be used: {_first_line(error)}",
                hint="see `swarmnode doctor`, or use auto",
            ) from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def _fingerprint(model: Any) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        head = parameter.detach().flatten()[:FINGERPRINT_VALUES].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode() + head.numpy().tobytes())
    return digest.hexdigest()[:16]
