"""The model that a policy starts from: a causal LM as it was published, with its tokenizer.

models folder or hub -> [base_model] -> policy.py (adapter), rollout/select.py (engine)

Nothing that a stranger wrote is ever run: `trust_remote_code` is off and only safetensors weights are read.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import PolicyConfig
from swarmnode.errors import ModelError
from swarmnode.models import ModelCard, find_model

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
