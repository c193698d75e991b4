"""Settings of an exchange: what an operator may set.

`[exchange]` of the configuration, which checks them -> [ExchangeSettings] -> Exchange
"""

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Defaults suit a node that trains on 4 own and 4 external groups a round."""

    swarm: str = "commons"
    """Nodes exchange rollouts when they name the same swarm."""
    publishers: Container[str] | None = None
    """Peer ids whose groups are accepted, in a private swarm. None: anyone's."""
    max_prompt_tokens: int = 4096
    """Longer prompts of others are left alone: our policy was not made for them."""
    max_tokens: int = 4096
    """Longer completions of others are left alone: they would not fit into our training batch."""
    max_age_versions: int = 8
    """Oldest group still trained on, in our policy versions since its header arrived. 0: this one only."""
    max_age_s: float = 1800.0
    """Oldest header or group still used, in seconds."""
    buffer_groups: int = 256
    """Accepted external groups kept for later rounds."""
    prefetch_groups: int = 4
    """Groups fetched ahead of the round that asks for them, so that the trainer need not wait."""
    fetch_concurrency: int = 4
    """Bodies fetched at the same time, at most one per author."""
    patience_s: float = 0.2
    """Seconds that `collect` waits for a first announcement when nothing is on its way."""
    fetch_timeout_s: float = 10.0
    """Deadline of a fetch: a slow or silent peer costs no more."""
    score_timeout_s: float = 20.0
    """Redrawing, tokenizing and scoring of one group."""
    store_bytes: int = 64 * 1024 * 1024
    """Memory for bodies that others may still ask for."""
    upload_bytes_per_s: float = 2 * 1024 * 1024
    """Bodies served to all peers together."""
    download_bytes_per_s: float | None = None
    """Bodies and pages fetched from all peers together, on average. None: any."""
    receipts_every_s: float = 300.0
    """Time between receipts by which we tell authors how many of their groups we learnt from: one small
    message for all of them."""
    private: bool = False
    """Nothing of ours is announced; what others announce is used all the same."""


STRANGERS_TIMEOUT_S = 0.75 * ExchangeSettings().score_timeout_s
"""Limit of judging the answers of a stranger: within the exchange's deadline, which counts tokenizing as
well."""
