"""A model without its weights: what is wrong for it is said before they are loaded, or downloaded.

config.json of a folder or the hub -> [load_outline] -> node/before_loading.py (engine, LoRA targets)
"""

from dataclasses import dataclass
from typing import Any

import torch

from swarmnode.config import PolicyConfig
from swarmnode.model.base_model import (
    attention_arguments,
    cannot_load,
    find_device,
    find_dtype,
    hidden_size,
    read_config,
)
from swarmnode.models import find_model


@dataclass(frozen=True, slots=True)
class Outline:
    """The structure of a causal LM as it would be loaded."""

    model: Any
    """The transformers model on the device "meta": layers and shapes, no numbers."""
    device: torch.device
    """Where the real one will lie."""
    is_quantized: bool
    """The real one has packed weights, of which this one shows nothing."""


def load_outline(spec: str, policy: PolicyConfig) -> Outline | None:
    """An outline of the model from its configuration alone, in well under a second. None: transformers builds
    this family with weights only, and everything is found out later. Raises ModelError where there is no such
    causal LM."""
    from transformers import AutoModelForCausalLM

    config = read_config(spec, find_model(spec))
    device = find_device(policy.device)
    packed = policy.quantization == "nf4" or getattr(config, "quantization_config", None) is not None
    hidden = 0 if policy.quantization == "nf4" else hidden_size(config)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=find_dtype(policy.dtype, device, hidden),
                trust_remote_code=False,
                **attention_arguments(config),
            )
    except (NotImplementedError, RuntimeError):
        return None
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise cannot_load(spec, error) from error
    return Outline(model.eval(), device, packed)
