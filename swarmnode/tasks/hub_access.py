"""Asks the hub of models and data sets once, with a deadline, before its client begins to retry.

hub_datasets.py, model/model_hub.py -> [trouble_with_hub]
"""

from concurrent.futures import TimeoutError as NotDone

from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread

PATIENCE_S = 4.0
"""Seconds for DNS, connection, encryption and one answer without content, which take a fraction of a second
on most networks."""


def trouble_with_hub(repo: str, file: str, *, repo_type: str | None = None) -> str | None:
    """Returns the reason why the hub does not answer about a file. None: it answers, even if it refuses.
    `repo_type`: dataset; None: a model."""
    from huggingface_hub import constants, get_session, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = hf_hub_url(repo, file, repo_type=repo_type)
    # In a thread: a DNS lookup ignores deadlines.
    asked = in_daemon_thread(lambda: get_session().head(url, timeout=PATIENCE_S))
    try:
        error = asked.exception(PATIENCE_S)
    except NotDone:
        return f"no answer within {PATIENCE_S:g} s"
    return None if error is None else str(error) or type(error).__name__
