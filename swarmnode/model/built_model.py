"""Models that an extension builds on this machine, such as the tiny policy.

--model tiny -> [source_of] -> registry.py -> a folder; any other name is a folder or a name on the hub
"""

from collections.abc import Callable
from pathlib import Path

from swarmnode.registry import find

BUILT = "tiny"
"""The model that is built on request."""

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, name of the work)."""


def source_of(model: str, models: Path, progress: Progress) -> str:
    """Returns the folder or hub name that a model is loaded from. `models`: the folder in which models are
    built. Raises ConfigError if no extension builds it."""
    return str(find("model", model)(models, progress=progress)) if model == BUILT else model
