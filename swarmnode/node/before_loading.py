"""What a model's configuration alone decides: which engine will run it, and which layers LoRA changes.

outline.py, settings -> [look_ahead] -> assemble.py (refuses before weights are loaded), doctor.py
"""

from dataclasses import dataclass
from functools import partial

from swarmnode.config import Config
from swarmnode.model.lora_targets import LoraTargets, find_targets
from swarmnode.model.outline import load_outline
from swarmnode.models import find_model
from swarmnode.rollout.select import Choice, choose, missing_reason


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What will be taken for a model that is not loaded yet."""

    engine: Choice
    targets: LoraTargets


def look_ahead(config: Config, source: str, *, policies: int = 1) -> LookAhead | None:
    """Raises EngineError or ModelError, which say what to do instead, for what the settings ask for and this
    model cannot have. None: its structure shows only once it is loaded."""
    outline = load_outline(source, config.policy)
    if outline is None:
        return None
    engine = choose(
        config.rollout.engine,
        outline.model,
        outline.device,
        find_model(source),
        partial(missing_reason, outline.device.type),
        policies=policies,
        quantized=outline.is_quantized,
    )
    return LookAhead(engine, find_targets(outline.model, config.policy.lora_targets))
