"""The record of our own decode loop, the engine that needs only torch.

registry.py -> [EMBEDDED] -> decode/embedded.py
"""

from typing import Any

from swarmnode.engine_record import EngineOptions, EngineRecord
from swarmnode.machine.memory_plan import EMBEDDED_MEMORY
from swarmnode.rollout.engine import Engine


def _make(options: EngineOptions) -> Engine:
    from swarmnode.rollout.decode.embedded import EmbeddedEngine

    return EmbeddedEngine(
        options.base,
        options.eos_token_ids,
        options.max_slots,
        options.max_length,
        options.device,
        options.max_versions,
    )


def _refuses(base: Any, device: str, source: str | None) -> str | None:
    from swarmnode.rollout.decode.weights import unsupported_reason

    return unsupported_reason(base)


EMBEDDED = EngineRecord(
    "embedded",
    EMBEDDED_MEMORY.weights,
    EMBEDDED_MEMORY.growth,
    make=_make,
    fastest_on={"cpu": "{family} runs in our own decode loop, at least as fast as vLLM on a CPU"},
    instead="{family} runs in our own decode loop",
    refuses=_refuses,
    several_policies=True,
)
