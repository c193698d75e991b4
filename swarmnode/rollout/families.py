"""Which families our own decode loop runs, known without torch.

config.json -> [refuse_at_sight] -> assemble.py (in a second: torch and transformers take several)
                        |
                        v  decode/family.py, where each family is one record
"""

from collections.abc import Mapping
from typing import Any

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.family import FAMILIES

USE_AUTO = "use --engine auto: it takes what can run this model"


def refuse_at_sight(engine: str, config: Mapping[str, Any] | None, quantization: str) -> None:
    """Raises EngineError for the embedded engine where config.json is of a model that it cannot run (None: it
    is not on this disk). What this lets through may be refused when the whole configuration is read.

    >>> refuse_at_sight("auto", {"model_type": "gpt2"}, "none")
    """
    if engine != "embedded" or config is None:
        return
    family = config.get("model_type")
    reason = None
    if family not in FAMILIES:
        reason = unknown_family(family)
    elif quantization != "none" or config.get("quantization_config") is not None:
        reason = "its weights are quantized"
    if reason is not None:
        raise EngineError(f"the embedded engine cannot run this model: {reason}", hint=USE_AUTO)


def unknown_family(family: object) -> str:
    """The reason for a `model_type` that is none of the known ones."""
    return f"{family} is not one of {', '.join(FAMILIES)}"
