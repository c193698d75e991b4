"""Settings of an exchange that an operator may change.

`[exchange]` of the configuration, which checks them -> [ExchangeSettings] -> Exchange
"""

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Defaults suit a node that trains on 4 own and 4 external groups a round."""

    swarm: str = "commons"
    """Nodes exchange rollouts if they name the same swarm."""
    publishers: Container[str] | None = None
    """Peer ids whose groups are accepted, in a private swarm. None: anyone's."""
    max_prompt_tokens: int = 4096
    """Longer prompts of others are skipped: our policy was not made for them."""
    max_tokens: int = 4096
    """Longer completions of others are skipped: they would not fit into our training batch."""
    max_age_versions: int = 8
    """Oldest group still trained on, in versions of our policy since its header arrived. 0: only the current
    one."""
    max_age_s: float = 1800.0
    """Oldest header or group still used, in seconds."""
    buffer_groups: int = 256
    """Accepted external groups kept for later rounds."""
    prefetch_groups: int = 4
    """Groups fetched ahead of the round that asks for them, so that the trainer need not wait."""
    fetch_concurrency: int = 4
    """Bodies fetched at the same time: at most one per author, two from a proven one."""
    patience_s: float = 0.2
    """Seconds that `collect` waits for a first announcement when nothing is on its way."""
    fetch_timeout_s: float = 10.0
    """Deadline of a fetch: a slow or silent peer costs no more."""
    score_timeout_s: float = 20.0
    """Deadline for redrawing, tokenizing and scoring one group."""
    store_bytes: int = 64 * 1024 * 1024
    """Memory for bodies that others may still ask for."""
    upload_bytes_per_s: float = 2 * 1024 * 1024
    """Rate of bodies served to all peers together."""
    download_bytes_per_s: float | None = None
    """Rate of bodies and pages fetched from all peers together, on average. None: no limit."""
    receipts_every_s: float = 300.0
    """Seconds between receipts, one small message that tells all authors how many of their groups we learnt
    from."""
    private: bool = False
    """Nothing of ours is announced; groups of others are still used."""


STRANGERS_TIMEOUT_S = 0.75 * ExchangeSettings().score_timeout_s
"""Deadline for judging a stranger's answers, below the exchange's own deadline, which includes tokenizing."""
