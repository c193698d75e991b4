"""Chooses the engine that runs a model, and gives the reason.

node, cli -> [make_engine] -> EngineRecord.make -> decode/embedded.py | those of extensions/
                 ^
  choose(outline) before the weights are loaded: what cannot be had is refused then

An engine is imported once it is chosen; before that, only its record is used (engine_record.py).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from swarmnode.engine_record import EngineOptions, EngineRecord, by_preference, record_of
from swarmnode.errors import EngineError, ModelError
from swarmnode.families.family import USE_AUTO
from swarmnode.registry import made, ours
from swarmnode.rollout.engine import Engine
from swarmnode.rollout.shared_engine import versions_needed

logger = logging.getLogger(__name__)


class EngineChoice(NamedTuple):
    """An engine, and the reason for choosing it."""

    record: EngineRecord
    reason: str


def make_engine(
    model: PreTrainedModel | PeftModel,
    eos_token_ids: Sequence[int],
    max_slots: int = 256,
    max_length: int | None = None,
    *,
    kind: str = "auto",
    source: str | None = None,
    lora_rank: int,
    policies: int = 1,
) -> tuple[Engine, str]:
    """Returns the fastest engine that can run `model`, or the requested one, and one sentence with the
    reason.

    LoRA layers that PEFT put into the model are not sampled from: an engine starts from the base, and
    `set_policy` gives it the rest. `source` is the folder or name by which another process can load the same
    model, and `lora_rank` the largest rank it will be given. With several `policies` it keeps enough versions
    live for a SharedEngine over it. Raises EngineError if `kind` is unavailable, or unavailable for several
    policies, and ConfigError for something that is not an Engine. A failure to start is an error only if the
    engine was requested, or is the last one.

    >>> engine, reason = make_engine(model, eos_token_ids=(0,), lora_rank=8)  # doctest: +SKIP
    >>> reason                                                                # doctest: +SKIP
    'embedded engine: qwen2 runs in our own decode loop, at least as fast as vLLM on a CPU.'
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    place: torch.device = base.device
    versions = versions_needed(policies)
    options = EngineOptions(
        base, eos_token_ids, max_slots, max_length, place, source, lora_rank, policies, versions
    )
    broken: dict[str, str] = {}
    while True:
        record, reason = choose(kind, base, place, source, policies=policies, broken=broken)
        try:
            name = record.name if kind == "auto" else kind
            engine: Engine = made("engine", name, partial(record.make, options), Engine)
            return engine, f"{record.name} engine: {reason}."
        except (EngineError, ModelError) as error:
            if kind != "auto" or record is by_preference(place.type)[-1]:
                raise
            first_line = error.message.strip().partition("\n")[0].rstrip(".: ")
            broken[record.name] = failure = f"{record.name} does not start here ({first_line})"
            logger.warning(
                "%s; using another engine (--engine %s shows the whole error)",
                failure,
                record.name,
            )


def choose(
    kind: str,
    base: PreTrainedModel,
    place: torch.device,
    source: str | None,
    *,
    policies: int = 1,
    quantized: bool = False,
    broken: Mapping[str, str] | None = None,
) -> EngineChoice:
    """Returns the engine and the reason. `broken`: engines that did not start, each with a sentence.

    `base` may be without weights (device "meta"); `quantized` then tells if the real model's are packed.
    Raises EngineError if `kind` is unavailable, or if the engine cannot serve several policies.
    """

    def refuses(record: EngineRecord) -> str | None:
        """Returns the reason against this engine that no installation would change, or None."""
        packed = quantized and not record.takes_quantized
        return record.refuses(base, place.type, source) or ("its weights are quantized" if packed else None)

    if kind == "auto":
        chosen = _fastest(place.type, base.config.model_type, refuses, dict(broken or {}))
    else:
        record = record_of(kind)
        if (problem := refuses(record)) is not None:
            raise EngineError(f"the {record.name} engine cannot run this model: {problem}", hint=USE_AUTO)
        if (missing := record.missing(place.type)) is not None:
            raise EngineError(f"the {record.name} engine is unavailable: {missing}", hint=record.install)
        chosen = EngineChoice(record, "as requested")
    if policies > 1 and not chosen.record.several_policies:
        raise EngineError(
            f"{policies} policies cannot share an engine for one ({chosen.record.name}: {chosen.reason})",
            hint="run a separate `swarmnode join` for each, without --policies and with its own --home",
        )
    return chosen


def _fastest(
    device: str, family: str, refuses: Callable[[EngineRecord], str | None], against: dict[str, str]
) -> EngineChoice:
    """Returns the first of our engines that nothing rules out. `against`: known reasons by name, to be
    extended."""
    for record in by_preference(device):
        problem = against.get(record.name) or refuses(record) or record.missing(device)
        if problem is not None:
            against[record.name] = problem
        elif device in record.fastest_on:
            return EngineChoice(record, record.fastest_on[device].format(family=family))
        else:
            others = f", as {_and(against)}" if against else ""
            return EngineChoice(record, record.instead.format(family=family) + others)
    raise EngineError(f"no engine can run this model: {_and(against)}")


def _and(against: Mapping[str, str]) -> str:
    return " and ".join(against[name] for name in ours("engine") if name in against)
