"""The record of the engine for any other model: what is known of it before torch is imported.

registry.py -> [GENERATE] -> generate_engine.py
"""

from swarmnode.engine_record import EngineOptions, EngineRecord
from swarmnode.machine.memory_plan import ADAPTER_BYTES, ModelCard, Workload, adapter_parameters, weight_bytes
from swarmnode.rollout.engine import Engine


def _make(options: EngineOptions) -> Engine:
    from swarmnode.extensions.generate.generate_engine import GenerateEngine

    return GenerateEngine(
        options.base, options.eos_token_ids, options.max_slots, options.max_length, options.device
    )


def _bytes(card: ModelCard, work: Workload) -> float:
    """A copy of the model, and of the linear layers one more, to merge from; a base in 4 bits it shares, and
    has the adapter beside it."""
    if work.nf4:
        return ADAPTER_BYTES * adapter_parameters(card, work.rank)
    return weight_bytes(card, work) + _merged_later(card, work)


def _merged_later(card: ModelCard, work: Workload) -> float:
    return 0.0 if work.nf4 else card.linear_parameters * work.number_bytes


GENERATE = EngineRecord(
    "generate",
    _bytes,
    _merged_later,
    make=_make,
    instead="one batch at a time",
    takes_quantized=True,
    last_resort=True,
)
