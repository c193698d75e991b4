"""The record of vLLM: what is known about it without installing it, and before torch is imported.

registry.py -> [VLLM] -> compat.py (is it here), vllm_limits.py (can it hold the model), vllm_engine.py
"""

from typing import Any

from swarmnode.engine_record import EngineOptions, EngineRecord
from swarmnode.extensions.vllm import compat
from swarmnode.machine.memory_plan import ModelCard, Workload, adapter_parameters
from swarmnode.rollout.engine import Engine


def _make(options: EngineOptions) -> Engine:
    import torch

    from swarmnode.extensions.vllm.vllm_engine import VllmEngine

    assert options.source is not None, "refused without one"
    return VllmEngine(
        options.source,
        options.base,
        options.eos_token_ids,
        options.max_slots,
        options.max_length,
        lora_rank=options.lora_rank,
        dtype="bfloat16" if options.base.dtype == torch.bfloat16 else "float32",
        # Merged weights can hold only one policy.
        weights="auto" if options.policies == 1 else "lora",
        max_versions=options.max_versions,
        card=options.device.index,
    )


def _refuses(base: Any, device: str, source: str | None) -> str | None:
    if device not in compat.BUILDS.values():
        return f"vLLM does not run on {device}"
    if source is None:
        return "vLLM loads a model by its folder or name, and this one has none"
    from swarmnode.extensions.vllm.vllm_limits import unsupported_reason

    return unsupported_reason(base, on_cpu=device == "cpu")


def _bytes(card: ModelCard, work: Workload) -> float:
    """Returns the bytes of the whole model in another process, and of the adapters."""
    return (card.parameters + adapter_parameters(card, work.rank) * work.policies) * work.number_bytes


VLLM = EngineRecord(
    "vllm",
    _bytes,
    card_share=compat.GPU_MEMORY_SHARE,
    make=_make,
    fastest_on={"cuda": "it is the fastest on a CUDA card"},
    instead="our own decode loop cannot run this model",
    missing=lambda device: compat.missing_reason(device),
    install=compat.INSTALL_VLLM,
    refuses=_refuses,
    several_policies=True,
)
