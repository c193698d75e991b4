"""Asking the model hub, once and with a deadline, before its client begins to retry."""

from concurrent.futures import TimeoutError as NotDone
from functools import cache
from pathlib import Path

from swarmnode.errors import ModelError

PATIENCE_S = 4.0
"""Seconds for name, connection, encryption and one answer without content: a fraction of a second on most
nets."""


@cache
def only_from_disk(source: str) -> bool:
    """Returns True if a model is read without asking the hub: a folder, or one in the cache while the hub
    does not answer. Raises ModelError if it is in neither place."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(source).is_dir():
        return True
    if constants.HF_HUB_OFFLINE or (trouble := _trouble(source)) is None:
        return False
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return True
    raise ModelError(
        f"{source} is not on this disk, and the hub cannot be asked for it: {trouble}",
        hint="check the name and the connection (over a slow one: `hf download` first), or try --model tiny",
    )


def _trouble(source: str) -> str | None:
    """Returns the reason why the hub does not answer. None: it answers, even if it refuses this model."""
    from huggingface_hub import get_session, hf_hub_url

    from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread

    # In a thread: looking a name up heeds no deadline.
    asked = in_daemon_thread(
        lambda: get_session().head(hf_hub_url(source, "config.json"), timeout=PATIENCE_S)
    )
    try:
        error = asked.exception(PATIENCE_S)
    except NotDone:
        return f"no answer within {PATIENCE_S:g} s"
    return None if error is None else str(error) or type(error).__name__
