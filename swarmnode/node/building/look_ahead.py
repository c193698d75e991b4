"""The choices for a model that is not loaded yet, made from its configuration alone.

outline (base_model.py), settings -> [look_ahead] -> local_policy.py, before the weights; diagnosis.py
"""

from dataclasses import dataclass

from swarmnode.families.family import longest_sequence_of
from swarmnode.model.base_model import load_outline
from swarmnode.model.policy import LoraTargets, find_targets
from swarmnode.models import find_model
from swarmnode.rollout.engine_choice import EngineChoice, choose
from swarmnode.settings.config import Config


@dataclass(frozen=True, slots=True)
class LookAhead:
    """The engine and the layers chosen for a model that is not loaded yet."""

    engine: EngineChoice
    targets: LoraTargets
    max_positions: int | None
    """Longest sequence that the model is run with. None: unbounded."""


def look_ahead(config: Config, source: str, *, policies: int = 1) -> LookAhead | None:
    """Returns the engine and the LoRA layers for a model that is not loaded yet, or None if its structure is
    known only after loading. Raises EngineError or ModelError, with advice, for settings that do not suit
    this model."""
    outline = load_outline(source, config.policy)
    if outline is None:
        return None
    engine = choose(
        config.rollout.engine,
        outline.model,
        outline.device,
        find_model(source),
        policies=policies,
        quantized=outline.is_quantized,
    )
    targets = find_targets(outline.model, config.policy.lora_targets)
    return LookAhead(engine, targets, longest_sequence_of(outline.model.config))
