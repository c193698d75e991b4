"""Asks the model hub once, with a deadline, before its client begins to retry."""

from functools import cache
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.tasks.hub_access import trouble_with_hub


@cache
def only_from_disk(source: str) -> bool:
    """Returns True if a model is read without asking the hub: a folder, or a cached model while the hub does
    not answer. Raises ModelError if it is in neither place."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(source).is_dir():
        return True
    if constants.HF_HUB_OFFLINE or (trouble := trouble_with_hub(source, "config.json")) is None:
        return False
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return True
    raise ModelError(
        f"{source} is not on this disk, and the hub cannot be reached: {trouble}",
        hint="check the name and the connection (over a slow one: `hf download` first), or try --model tiny",
    )
