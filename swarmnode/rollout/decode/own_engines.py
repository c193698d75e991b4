"""The records of the engines that need nothing but torch: our decode loop, and transformers' own.

registry.py -> [EMBEDDED, GENERATE] -> decode/embedded.py | decode/fallback.py
"""

from typing import Any

from swarmnode.engine_record import EngineOptions, EngineRecord
from swarmnode.machine.memory_plan import (
    EMBEDDED_MEMORY,
    ModelCard,
    Workload,
    adapter_bytes,
    weight_bytes,
)
from swarmnode.rollout.engine import Engine


def _make_embedded(options: EngineOptions) -> Engine:
    from swarmnode.rollout.decode.embedded import EmbeddedEngine

    return EmbeddedEngine(
        options.base,
        options.eos_token_ids,
        options.max_slots,
        options.max_length,
        options.device,
        options.max_versions,
    )


def _embedded_refuses(base: Any, device: str, source: str | None) -> str | None:
    from swarmnode.rollout.decode.weights import unsupported_reason

    return unsupported_reason(base)


EMBEDDED = EngineRecord(
    "embedded",
    EMBEDDED_MEMORY.weights,
    EMBEDDED_MEMORY.growth,
    make=_make_embedded,
    fastest_on={"cpu": "{family} runs in our own decode loop, at least as fast as vLLM on a CPU"},
    instead="{family} runs in our own decode loop",
    refuses=_embedded_refuses,
    several_policies=True,
)


def _make_generate(options: EngineOptions) -> Engine:
    from swarmnode.rollout.decode.fallback import GenerateEngine

    return GenerateEngine(
        options.base, options.eos_token_ids, options.max_slots, options.max_length, options.device
    )


def _generate_bytes(card: ModelCard, work: Workload) -> float:
    """A copy of the model, and of the linear layers one more, to merge from; a base in 4 bits it shares, and
    has the adapter beside it."""
    if work.nf4:
        return adapter_bytes(card, work)
    return weight_bytes(card, work) + _merged_later(card, work)


def _merged_later(card: ModelCard, work: Workload) -> float:
    return 0.0 if work.nf4 else card.linear_parameters * work.number_bytes


GENERATE = EngineRecord(
    "generate",
    _generate_bytes,
    _merged_later,
    make=_make_generate,
    instead="one batch at a time",
    takes_quantized=True,
    last_resort=True,
)
