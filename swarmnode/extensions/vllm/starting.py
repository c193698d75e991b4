"""Prepares the start of vLLM for a model: its device, process, memory and policies."""

from typing import Literal

import psutil
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.extensions.vllm.compat import require_vllm, runs_on_cpu, starting_vllm
from swarmnode.extensions.vllm.vllm_driver import (
    CPU_BLOCK_TOKENS,
    TORCH_DTYPES,
    Driver,
    DriverSettings,
    head_size,
)
from swarmnode.extensions.vllm.vllm_policies import LoraPolicies, MergedPolicies, Policies, linear_weights
from swarmnode.rollout.engine import Capabilities

Weights = Literal["auto", "lora", "merged"]
"""Form of a policy: an adapter beside the base, or merged into it. auto: the faster one on the device."""

KV_SHARE = 0.25
"""Largest default share of free memory for keys and values on a machine without a GPU."""


def computes_on_cpu() -> bool:
    """Returns True if the installed vLLM computes on the CPU. Raises EngineError if it cannot be used."""
    require_vllm()
    with starting_vllm(in_process=False):
        return runs_on_cpu()


def placement(weights: Weights, in_process: bool | None, on_cpu: bool) -> tuple[bool, bool]:
    """Returns (policies are merged, vLLM runs in another process). Raises EngineError if both would be
    True."""
    merged = weights == "merged" or (weights == "auto" and on_cpu)
    beside = not on_cpu if in_process is None else not in_process
    if merged and beside:
        raise EngineError("merged weights need vLLM in this process", hint='use weights="lora"')
    return merged, beside


def lora_modules(base: PreTrainedModel) -> tuple[str, ...]:
    """Returns the last parts of the names of all modules that adapters may change."""
    return tuple(sorted({module.rpartition(".")[2] for module in linear_weights(base)}))


def kv_room(base: PreTrainedModel, settings: DriverSettings) -> int:
    """Returns the bytes for keys and values of `max_slots` longest sequences, or else a share of free
    memory."""
    layers = base.config.get_text_config().num_hidden_layers
    itemsize = TORCH_DTYPES[settings.dtype].itemsize
    per_token = 2 * layers * _key_heads(base) * head_size(base) * itemsize
    # Sequences occupy whole blocks, and one block stays empty.
    longest = settings.max_length + CPU_BLOCK_TOKENS
    wanted = (settings.max_slots + 1) * longest * per_token
    return min(wanted, int(psutil.virtual_memory().available * KV_SHARE))


def start_policies(
    driver: Driver, base: PreTrainedModel, settings: DriverSettings, merged: bool, max_versions: int
) -> Policies:
    """Returns the holder of the policies, either merged into the weights or as adapters."""
    if merged:
        return MergedPolicies(driver, base, TORCH_DTYPES[settings.dtype])
    return LoraPolicies(driver, base, settings.lora_rank, max_versions)


def capabilities(policies: Policies, settings: DriverSettings) -> Capabilities:
    """Returns the engine's capabilities."""
    return Capabilities(
        name="vllm",
        inflight=frozenset({"keep", "recompute"}),
        max_versions=policies.max_versions,
        max_running=settings.max_slots,
        max_length=settings.max_length,
        exact_resume=False,
        reserves_kv=True,
    )


def _key_heads(base: PreTrainedModel) -> int:
    """Returns the number of heads with their own keys and values. If a family does not state it, one per
    query head is assumed, so the room may be too large."""
    config = base.config.get_text_config()
    return config.to_dict().get("num_key_value_heads") or config.num_attention_heads
