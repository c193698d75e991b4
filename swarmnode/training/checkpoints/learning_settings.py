"""The settings that shape learning: a checkpoint records them, and a start learns which ones have changed.

config -> [learning_settings] -> state.json -> [changes] -> node.py (a line of the log, or an error)

A run that has rounds left continues with changed settings: a person may lower a learning rate half-way. If
all of its rounds are done, its result was learnt under other settings, and that is an error.
"""

from collections.abc import Mapping
from typing import Any

from swarmnode.settings.config import Config

_MEMORY_AND_SPEED = frozenset({"micro_batch_tokens", "gradient_checkpointing"})
"""Training settings that do not affect what is learnt."""

_BESIDE_TRAINING: Mapping[str, tuple[str, ...]] = {
    "policy": ("lora_rank", "lora_targets", "lora_alpha", "quantization", "chat_template", "raw_prompts"),
    "rollout": ("groups", "group_size", "max_tokens", "temperature", "top_p", "dynamic_sampling"),
    "exchange": ("enabled", "rule"),
}


def learning_settings(config: Config, seed: int) -> dict[str, Any]:
    """Returns the settings that shape learning by their full names, as JSON values, with the seed in use.

    >>> learning_settings(Config(), 7)["training.learning_rate"], learning_settings(Config(), 7)["node.seed"]
    (0.0001, 7)
    """
    training = config.training.model_dump(mode="json", exclude=set(_MEMORY_AND_SPEED))
    found = {f"training.{key}": value for key, value in training.items()}
    for section, keys in _BESIDE_TRAINING.items():
        values = getattr(config, section).model_dump(mode="json", include=set(keys))
        found |= {f"{section}.{key}": value for key, value in values.items()}
    return {**found, "node.seed": seed}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a sentence for each setting whose value has changed. Settings that were not recorded are not
    compared.

    >>> changes({"training.learning_rate": 0.001}, {"training.learning_rate": 0.01, "node.seed": 7})
    ('training.learning_rate was 0.001, is 0.01 now',)
    """
    return tuple(
        f"{name} was {before[name]}, is {value} now"
        for name, value in now.items()
        if name in before and before[name] != value
    )
