"""Settings of an exchange: what an operator may set.

`[exchange]` of the configuration -> [ExchangeSettings] -> Exchange
"""

import re
from collections.abc import Container
from dataclasses import dataclass

from swarmnode.errors import ConfigError
from swarmnode.exchange.limits import MAX_BODY_BYTES, MAX_GROUP_SIZE, MIN_GROUP_SIZE
from swarmnode.settings.config import SWARM_NAME


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Defaults suit a node that trains on 4 own and 4 external groups a round."""

    swarm: str = "commons"
    """Nodes exchange rollouts when they name the same swarm."""
    publishers: Container[str] | None = None
    """Peer ids whose groups are accepted, in a private swarm. None: anyone's."""
    answers_per_group: int = 16
    """Most answers of one group of others that are kept and trained on: of a larger group those whose rewards
    differ most."""
    max_prompt_tokens: int = 4096
    """Longer prompts of others are left alone: our policy was not made for them."""
    max_completion_tokens: int = 4096
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
    private: bool = False
    """Nothing of ours is announced; what others announce is used all the same."""

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(SWARM_NAME, self.swarm), "swarm", "lower-case letters, digits, '.', '_' and '-'"
        )
        _require(
            MIN_GROUP_SIZE <= self.answers_per_group <= MAX_GROUP_SIZE,
            "answers_per_group",
            f"between {MIN_GROUP_SIZE} and {MAX_GROUP_SIZE}",
        )
        _require(self.max_prompt_tokens >= 1, "max_prompt_tokens", "at least 1")
        _require(self.max_completion_tokens >= 1, "max_completion_tokens", "at least 1")
        _require(self.max_age_versions >= 0, "max_age_versions", "0 or more")
        _require(self.max_age_s > 0, "max_age_s", "positive")
        _require(self.buffer_groups >= 1, "buffer_groups", "at least 1")
        _require(self.prefetch_groups >= 0, "prefetch_groups", "0 or more")
        _require(self.fetch_concurrency >= 1, "fetch_concurrency", "at least 1")
        _require(self.patience_s > 0, "patience_s", "positive")
        _require(self.fetch_timeout_s > 0, "fetch_timeout_s", "positive")
        _require(self.score_timeout_s > 0, "score_timeout_s", "positive")
        _require(
            self.store_bytes >= MAX_BODY_BYTES, "store_bytes", f"at least one body, {MAX_BODY_BYTES} bytes"
        )
        _require(
            self.upload_bytes_per_s >= MAX_BODY_BYTES,
            "upload_bytes_per_s",
            f"at least {MAX_BODY_BYTES} bytes",
        )


def _require(holds: object, name: str, expected: str) -> None:
    if not holds:
        raise ConfigError(f"exchange setting {name} is out of range", hint=f"it must be {expected}")


STRANGERS_TIMEOUT_S = 0.75 * ExchangeSettings().score_timeout_s
"""Limit of judging the answers of a stranger: within the exchange's deadline, which counts tokenizing as
well."""
