"""The choice of an engine for a model, with its reason."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from swarmnode.errors import EngineError, ModelError
from swarmnode.rollout.decode import weights
from swarmnode.rollout.decode.family import USE_AUTO
from swarmnode.rollout.engine import Engine

logger = logging.getLogger(__name__)

EngineKind = Literal["auto", "embedded", "vllm"]

ONE_POLICY_VERSIONS = 4
"""Live versions that one policy needs: the newest, and those that requests in flight are pinned to."""

Choice = tuple[Literal["embedded", "vllm", "generate"], str]
"""An engine, and the reason for its choice."""


def missing_reason(device: str) -> str | None:
    """Returns the reason why there is no vLLM for this type of device, or None if there is one."""
    from swarmnode.rollout.vllm import compat

    return compat.missing_reason(device)


def make_engine(
    model: PreTrainedModel | PeftModel,
    eos_token_ids: Sequence[int],
    max_slots: int = 256,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    *,
    kind: EngineKind = "auto",
    source: str | None = None,
    lora_rank: int,
    policies: int = 1,
) -> tuple[Engine, str]:
    """Returns the fastest engine that can run `model`, or the one asked for, and one sentence with the
    reason.

    LoRA layers that PEFT put into the model are not sampled from: an engine starts from the base, and gets
    adapters by `set_policy`. `source` is the folder or name by which vLLM can load the same model, and
    `lora_rank` the largest rank it will be given. With several `policies` it keeps enough versions live for a
    SharedEngine over it. Raises EngineError if `kind` cannot be had, or not for several policies; a vLLM that
    does not start is an error only where vLLM was asked for.

    >>> engine, reason = make_engine(model, eos_token_ids=(0,), lora_rank=8)  # doctest: +SKIP
    >>> reason                                                                # doctest: +SKIP
    'embedded engine: qwen2 runs in our own decode loop, at least as fast as vLLM on a CPU.'
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    place = torch.device(device) if device is not None else base.device
    no_vllm = partial(missing_reason, place.type)
    chosen, reason = choose(kind, base, place, source, no_vllm, policies=policies)
    versions = _versions(policies)
    if chosen == "vllm":
        assert source is not None
        try:
            engine = _start_vllm(
                source, base, place, eos_token_ids, max_slots, max_length, lora_rank, policies, versions
            )
        except (EngineError, ModelError) as error:
            if kind == "vllm":
                raise
            failure = f"vLLM does not start here ({_first_line(error.message)})"
            logger.warning(
                "%s: another engine takes its place; --engine vllm ends with the whole error", failure
            )
            chosen, reason = choose(kind, base, place, source, lambda: failure, policies=policies)
        else:
            return engine, f"vllm engine: {reason}."
    if chosen == "embedded":
        from swarmnode.rollout.decode.embedded import EmbeddedEngine

        engine = EmbeddedEngine(base, eos_token_ids, max_slots, max_length, place, versions)
    else:
        from swarmnode.rollout.decode.fallback import GenerateEngine

        engine = GenerateEngine(base, eos_token_ids, max_slots, max_length, place)
    return engine, f"{chosen} engine: {reason}."


def _versions(policies: int) -> int:
    if policies == 1:
        return ONE_POLICY_VERSIONS
    from swarmnode.rollout.shared import versions_needed

    return versions_needed(policies)


def _start_vllm(
    source: str,
    base: Any,
    place: torch.device,
    eos_token_ids: Sequence[int],
    max_slots: int,
    max_length: int | None,
    lora_rank: int,
    policies: int,
    versions: int,
) -> Engine:
    from swarmnode.rollout.vllm.engine import VllmEngine

    return VllmEngine(
        source,
        base,
        eos_token_ids,
        max_slots,
        max_length,
        lora_rank=lora_rank,
        dtype="bfloat16" if base.dtype == torch.bfloat16 else "float32",
        # Merged weights are those of one policy.
        weights="auto" if policies == 1 else "lora",
        max_versions=versions,
        card=place.index,
    )


def choose(
    kind: EngineKind,
    base: PreTrainedModel,
    place: torch.device,
    source: str | None,
    no_vllm: Callable[[], str | None],
    *,
    policies: int = 1,
    quantized: bool = False,
) -> Choice:
    """Returns the engine and the reason. `no_vllm` says why there is no vLLM for this place; None: there is.
    It is only called if the answer counts.

    `base` may be without weights (device "meta"); `quantized` then says that the real one's are packed.
    Raises EngineError if `kind` cannot be had, or nothing for several policies.
    """
    no_embedded = weights.unsupported_reason(base)
    if quantized:
        no_embedded = no_embedded or "its weights are quantized"
    if kind == "embedded":
        return _asked_for("embedded", no_embedded)
    own_loop = f"{base.config.model_type} runs in our own decode loop"
    if kind == "auto" and no_embedded is None and place.type == "cpu":
        return "embedded", f"{own_loop}, at least as fast as vLLM on a CPU"
    not_for_vllm = _not_for_vllm(base, place, source)
    if quantized:
        not_for_vllm = not_for_vllm or "vLLM cannot take policies over quantized weights"
    if kind == "vllm":
        return _asked_for_vllm(not_for_vllm, no_vllm)
    chosen, reason = _fastest(own_loop, place, not_for_vllm or no_vllm(), no_embedded)
    if chosen == "generate" and policies > 1:
        raise EngineError(
            f"{policies} policies cannot share an engine that generates {reason}",
            hint="run a `swarmnode join` for each, without --policies and with a --home of its own",
        )
    return chosen, reason


def _asked_for(kind: Literal["embedded", "vllm"], problem: str | None) -> Choice:
    if problem is not None:
        raise EngineError(f"the {kind} engine cannot run this model: {problem}", hint=USE_AUTO)
    return kind, "it was asked for"


def _asked_for_vllm(not_for_vllm: str | None, no_vllm: Callable[[], str | None]) -> Choice:
    if not_for_vllm is None and (missing := no_vllm()) is not None:
        from swarmnode.rollout.vllm.compat import INSTALL_VLLM

        raise EngineError(f"the vLLM engine cannot be had: {missing}", hint=INSTALL_VLLM)
    return _asked_for("vllm", not_for_vllm)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".: ")


def _fastest(own_loop: str, place: torch.device, no_vllm: str | None, no_embedded: str | None) -> Choice:
    if no_vllm is None and place.type == "cuda":
        return "vllm", "it is the fastest on a CUDA card"
    if no_embedded is None:
        return "embedded", f"{own_loop}, as {no_vllm}"
    if no_vllm is None:
        return "vllm", f"our own decode loop cannot run this model, as {no_embedded}"
    return "generate", f"one batch at a time, as {no_embedded} and {no_vllm}"


def _not_for_vllm(base: PreTrainedModel, place: torch.device, source: str | None) -> str | None:
    """Returns the reason why vLLM cannot run this model whatever is installed, or None."""
    if place.type not in ("cuda", "cpu"):
        return f"vLLM does not run on {place.type}"
    if source is None:
        return "vLLM loads a model by its folder or name, and this one has none"
    from swarmnode.rollout.vllm import limits

    return limits.unsupported_reason(base, on_cpu=place.type == "cpu")
