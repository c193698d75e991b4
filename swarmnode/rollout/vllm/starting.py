"""How vLLM is started for a model: on which device, beside us or within, with how much room, which policies.

engine.py -> [starting] -> inprocess.py | separate.py, policies.py -> engine.py
"""

from typing import Literal

import psutil
from transformers import PreTrainedModel

from swarmnode.errors import EngineError
from swarmnode.rollout.engine import Capabilities
from swarmnode.rollout.vllm.compat import require_vllm, runs_on_cpu, starting_vllm
from swarmnode.rollout.vllm.driver import (
    CPU_BLOCK_TOKENS,
    SCORED_AT_ONCE,
    TORCH_DTYPES,
    Driver,
    DriverSettings,
    head_size,
)
from swarmnode.rollout.vllm.inprocess import InProcessDriver
from swarmnode.rollout.vllm.policies import LoraPolicies, MergedPolicies, Policies, linear_weights
from swarmnode.rollout.vllm.separate import AsyncDriver

Weights = Literal["auto", "lora", "merged"]
"""How a policy is held: as an adapter beside the base, or merged into it. auto: what is faster there."""

KV_SHARE = 0.25
"""Most of the free memory of a machine without a GPU that keys and values take unless somebody says more."""


def computes_on_cpu() -> bool:
    """Whether the vLLM that is installed does. Raises EngineError where it cannot be used."""
    require_vllm()
    with starting_vllm(in_process=False):
        return runs_on_cpu()


def placement(weights: Weights, in_process: bool | None, on_cpu: bool) -> tuple[bool, bool]:
    """Whether policies are merged, and whether vLLM runs beside this process."""
    merged = weights == "merged" or (weights == "auto" and on_cpu)
    beside = not on_cpu if in_process is None else not in_process
    if merged and beside:
        raise EngineError("merged weights need vLLM in this process", hint='use weights="lora"')
    return merged, beside


def lora_modules(base: PreTrainedModel) -> tuple[str, ...]:
    """Last parts of the names of the modules that adapters may change."""
    return tuple(sorted({module.rpartition(".")[2] for module in linear_weights(base)}))


def kv_room(base: PreTrainedModel, settings: DriverSettings) -> int:
    """Bytes for keys and values of `max_slots` longest sequences, or a share of what memory is free."""
    layers = base.config.get_text_config().num_hidden_layers
    itemsize = TORCH_DTYPES[settings.dtype].itemsize
    per_token = 2 * layers * _key_heads(base) * head_size(base) * itemsize
    # Sequences take whole blocks, and one block stays empty.
    longest = settings.max_length + 1 + CPU_BLOCK_TOKENS
    wanted = (settings.max_slots + SCORED_AT_ONCE + 1) * longest * per_token
    return min(wanted, int(psutil.virtual_memory().available * KV_SHARE))


def start_driver(settings: DriverSettings, beside: bool) -> Driver:
    """vLLM itself, in a process of its own or in this one."""
    return AsyncDriver(settings) if beside else InProcessDriver(settings)


def start_policies(
    driver: Driver, base: PreTrainedModel, settings: DriverSettings, merged: bool, max_versions: int
) -> Policies:
    """Who keeps the policies: merged into the weights, or as adapters."""
    if merged:
        return MergedPolicies(driver, base, TORCH_DTYPES[settings.dtype])
    return LoraPolicies(driver, base, settings.lora_rank, max_versions)


def capabilities(policies: Policies, settings: DriverSettings) -> Capabilities:
    """What the engine says of itself."""
    return Capabilities(
        name="vllm",
        inflight=policies.inflight,
        max_versions=policies.max_versions,
        max_running=settings.max_slots,
        max_length=settings.max_length,
        exact_resume=False,
        reserves_kv=True,
    )


def _key_heads(base: PreTrainedModel) -> int:
    """Heads that have keys and values of their own. A family that does not say has one per query head, or
    fewer and we reserve too much."""
    config = base.config.get_text_config()
    return config.to_dict().get("num_key_value_heads") or config.num_attention_heads
