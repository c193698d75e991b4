"""Requests and policies that the vLLM engine refuses, with advice, before anything has changed.

vllm_record.py -> unsupported_reason
vllm_engine.py (start, submit, set_policy) -> [limits] -> EngineError
"""

from collections.abc import Collection, Iterable

from transformers import PreTrainedModel

from swarmnode.errors import EngineError, RequestRefused
from swarmnode.extensions.vllm.vllm_driver import head_size
from swarmnode.extensions.vllm.vllm_policies import LoadedPolicy, linear_weights
from swarmnode.families.family import USE_AUTO
from swarmnode.rollout.engine import BASE_VERSION, Request

TEMPERATURES = (0.01, 2.0)
"""Temperatures, besides 0, at which vLLM samples. It silently raises lower ones and refuses higher ones."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes for which vLLM has CPU code. On CUDA it has code for other sizes too."""

RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers, by their names in configurations, that have a state instead of keys and values."""


def unsupported_reason(base: PreTrainedModel, on_cpu: bool) -> str | None:
    """Returns the reason why vLLM cannot hold this model with our policies, or None if it can."""
    family, weights = base.config.model_type, linear_weights(base)
    if not weights:
        return f"vLLM finds no linear layers in {family} that a policy could change"
    if not all(weight.is_floating_point() for weight in weights.values()):
        return "vLLM cannot take policies over quantized weights"
    if _is_recurrent(base):
        return f"{family} is recurrent, and the vLLM engine is for keys and values"
    return _cpu_reason(base) if on_cpu else None


def refuse_model(base: PreTrainedModel, on_cpu: bool) -> None:
    """Raises EngineError for a model that vLLM cannot hold."""
    if (reason := unsupported_reason(base, on_cpu)) is not None:
        raise EngineError(f"the vLLM engine cannot run this model: {reason}", hint=USE_AUTO)


def refuse_temperatures(requests: Iterable[Request]) -> None:
    """Raises EngineError for a temperature that vLLM would change or refuse."""
    coldest, hottest = TEMPERATURES
    for request in requests:
        temperature = request.sampling.temperature
        if temperature and not coldest <= temperature <= hottest:
            raise RequestRefused(
                f"request {request.request_id}: vLLM cannot sample at temperature {temperature}",
                hint=f"use 0 (greedy), or {coldest} to {hottest}",
            )


def refuse_base(versions: Iterable[int | None]) -> None:
    """Raises EngineError if the bare base is asked for while a policy is merged into it."""
    if BASE_VERSION in versions:
        raise EngineError(
            "the base is not live while a policy is merged into it", hint='start vLLM with weights="lora"'
        )


def refuse_versions(staying: Iterable[LoadedPolicy], asked: Collection[int], new: int, most: int) -> None:
    """Raises EngineError if more than `most` policies would be live: the new one, those of running rows, and
    those that waiting requests ask for."""
    in_use = {policy.serial: policy.version for policy in staying if policy.version != BASE_VERSION}
    live = 1 + len(in_use) + len(set(asked) - {new, *in_use.values()})
    if live > most:
        raise EngineError(
            f"{live} policy versions would be live, but this engine holds {most}",
            hint='use "keep", or wait until requests with a version of their own are done',
        )


def _is_recurrent(base: PreTrainedModel) -> bool:
    """Returns True if a model is recurrent. Pure families say so themselves; mixed ones name such layers."""
    layers = base.config.get_text_config().to_dict().get("layer_types") or ()
    return base._is_stateful or any(layer in RECURRENT_LAYERS for layer in layers)


def _cpu_reason(base: PreTrainedModel) -> str | None:
    try:
        size = head_size(base)
    except AttributeError:
        return f"{base.config.model_type} does not say how many attention heads it has"
    return None if size in CPU_HEAD_SIZES else f"vLLM has no attention on a CPU for heads of {size}"
