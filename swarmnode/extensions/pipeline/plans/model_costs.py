"""Computes the costs of a model's layers from its shapes, before any weight is loaded.

models.py (ModelCard), settings -> [model_costs] -> ModelCosts -> partition.py, planning.py

The arithmetic is that of memory_plan.py, for one layer at a time. Times are for a reference device of one
fixed speed. The members' real times are measured; only the proportions between layers and ends matter here.
"""

from dataclasses import dataclass
from typing import Literal

from swarmnode.extensions.pipeline.plans.plan_settings import LayerCost, ModelCosts
from swarmnode.machine.memory_plan import (
    ADAPTER_BYTES,
    MOMENT_BYTES,
    ModelCard,
    Workload,
    activation_bytes,
    adapter_parameters,
    in_flight_bytes,
    layer_bytes,
    logprob_bytes,
)

REFERENCE_FLOPS = 1e12
"""FLOP/s of the device whose speed is 1."""

STEP_BYTES = 4 + 4 + 4 + 12
"""Bytes that a step needs for each trained number, in addition to the number and its moments: its gradient in
float32 as a sum, as the share of a step and as input of the optimizer; and a copy of the number and its
moments while they are sent to other members."""


@dataclass(frozen=True, slots=True)
class StageTraining:
    """The parts of the training settings that affect memory."""

    trainable: Literal["lora", "full"]
    rank: int
    number_bytes: int
    """Bytes of a weight and of an activation."""
    micro_batch_tokens: int
    recomputed: bool = False
    """True if a stage keeps only its inputs, and all activations of just one micro-batch at a time, during
    that one's backward pass."""


def model_costs(card: ModelCard, training: StageTraining) -> ModelCosts:
    """Return the costs of the model for partition.py.

    >>> card = ModelCard("m", 3.2e6, 4, 256, 512, 4, 4, 64, vocabulary=258)
    >>> costs = model_costs(card, StageTraining("lora", 16, 4, 1024))
    >>> costs.layers, costs.ends.activation_bytes
    (4, 3072)
    """
    work = Workload(
        rank=training.rank,
        slots=0,
        sequence_tokens=0,
        micro_batch_tokens=training.micro_batch_tokens,
        number_bytes=training.number_bytes,
    )
    numbers = card.linear_parameters / card.layers
    kept, again = layer_bytes(card, work), 0
    if training.recomputed:
        kept, again = card.hidden * training.number_bytes, kept * training.micro_batch_tokens
    layer = LayerCost(
        held_bytes=_held_bytes(numbers, adapter_parameters(card, training.rank) / card.layers, training)
        + again,
        forward_s=2 * numbers / REFERENCE_FLOPS,
        activation_bytes=kept,
    )
    return ModelCosts(layer, card.layers, _ends(card, training, work))


def _ends(card: ModelCard, training: StageTraining, work: Workload) -> LayerCost:
    """Return the costs of embedding, final norm, head and loss. A chunk of logits and the gradients of one
    layer exist only for a while; they are counted once, as held bytes."""
    numbers = card.parameters - card.linear_parameters
    passing = logprob_bytes(card, training.micro_batch_tokens) + in_flight_bytes(card, work)
    # The head's backward pass belongs to the loss, right after the head's forward pass.
    products = 3 if training.trainable == "full" else 2
    return LayerCost(
        held_bytes=_held_bytes(numbers, 0, training) + passing,
        forward_s=2 * products * card.vocabulary * card.hidden / REFERENCE_FLOPS,
        activation_bytes=activation_bytes(card, work) - card.layers * layer_bytes(card, work),
    )


def _held_bytes(numbers: float, adapter: float, training: StageTraining) -> int:
    """Return the bytes of weights and of their training, or of an adapter's on top of them: gradient and
    Adam's moments."""
    trained = numbers if training.trainable == "full" else adapter
    extra = STEP_BYTES + MOMENT_BYTES + (0 if training.trainable == "full" else ADAPTER_BYTES)
    return round(numbers * training.number_bytes + trained * extra)
