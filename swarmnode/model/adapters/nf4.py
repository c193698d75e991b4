"""Frozen weights in 4 bits: the arguments for transformers, and protection from bitsandbytes' later
rearranging."""

import logging
from importlib.util import find_spec
from typing import Any

import torch

from swarmnode.errors import ModelError
from swarmnode.machine.installing import how_to_install

logger = logging.getLogger(__name__)

DEVICES = ("cuda", "cpu")
"""Devices on which bitsandbytes has been seen to train; `cuda` is also torch's name for a ROCm card."""


def nf4_arguments(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that load a model in 4 bits. Raises ModelError if 4 bits are
    unavailable."""
    missing = [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]
    if device.type not in DEVICES or missing:
        reason = f"{' and '.join(missing)} is not installed"
        if device.type not in DEVICES:
            reason = f"it needs a CUDA card or a CPU, not {device.type}"
        raise ModelError(
            f"policy.quantization = nf4 is unavailable: {reason}",
            hint=f"{how_to_install('quant')}, or --set policy.quantization=none",
        )
    if device.type == "cpu":
        logger.warning(
            "4-bit weights on a CPU are only worthwhile for models that would not fit otherwise: weights are"
            " unpacked for every product, which makes sampling two to three times as slow"
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_differentiable(model: Any) -> None:
    """Keeps 4-bit weights of `model` in the one format that gradients flow through. Call it before any
    forward pass.

    On a CPU with AVX512-BF16, bitsandbytes rearranges them in place in the first forward pass without
    gradients (and rounds their scales to bfloat16), and products with the result have no backward: once an
    engine had sampled, training would silently continue with wrong gradients.
    """
    if find_spec("bitsandbytes") is None:
        return  # Then no module here has 4-bit weights.
    from bitsandbytes.nn import Linear4bit  # pyright: ignore

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
