"""Names that people bring along: what another trainer, or an earlier version, calls something.

registry.py -> [other_names] -> config_layers.py (advice for an unknown name), settings_page.py
[FORMER_SETTINGS] -> config_layers.py (advice for a setting that there was)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from swarmnode.registry import importable


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Another trainer's names of settings and arguments."""

    trainer: str
    settings: Mapping[str, tuple[str, str]]
    """Our setting by their name, with remarks."""
    without: Mapping[str, str]
    """Remarks by their name, for options without a setting here."""
    arguments: Mapping[str, str]
    """Equivalents in sn.Node, by argument of their trainer or of its config."""
    page: str
    """Text before the table of these settings on the page of all settings."""

    def advice(self, name: str) -> str | None:
        """Returns advice for one of their names. None: it is none."""
        if name in self.settings:
            ours, note = self.settings[name]
            return f"Did you mean {ours!r}?" + (f" ({note})" if note else "")
        if name in self.without:
            return f"{self.trainer}'s {name} has no setting here: {self.without[name]}"
        return self.advice_for_argument(name)

    def advice_for_argument(self, name: str) -> str | None:
        """Returns advice for an argument of their trainer. None: it is none."""
        return f"{self.trainer}'s {name} is here {self.arguments[name]}" if name in self.arguments else None


@cache
def other_names() -> Sequence[OtherNames]:
    """Returns the names of the trainers that are known. They are advice: what cannot be imported is left
    out, with a warning."""
    return [*importable("names")]


_CLIP = (
    "each training.loss has its own clip; replace(DAPO, clip=Clip(0.2, 0.4)) is a loss of your own"
    " (configs/README.md)"
)

FORMER_SETTINGS: Mapping[str, str] = {
    "training.clip_low": _CLIP,
    "training.clip_high": _CLIP,
    "policy.threads": "OMP_NUM_THREADS says how many threads torch has; one where it is not set",
    "tasks.prompt_column": "it stands behind a data set's name: questions.jsonl?prompt=COLUMN",
    "tasks.answer_column": "it stands behind a data set's name: questions.jsonl?answer=COLUMN",
    "tasks.evaluation": "it stands behind a data set's name: train.jsonl?evaluation=test.jsonl",
    "tasks.max_turns": "an environment says it, most_turns = 16, and its methods may be your tools",
    "rollout.max_turn_tokens": "rollout.max_tokens bounds the whole conversation",
    "rollout.max_lag": 'it is 8; with rollout.mode="sync" and rollout.overlap="off" none is behind',
    "limits.card": "limits.give_way is for card and battery",
    "limits.battery": "limits.give_way is for card and battery",
    "exchange.receipts_every_s": "receipts are sent every five minutes",
    "pipeline.memory_gb": "limits.memory_gb bounds a stage, too",
    "pipeline.search_tasks": "it is always 200000, about a second of CPU",
    "node.contribution": "the record is always kept, on this machine alone (docs/contribution.md)",
}
"""What stands in place of settings that earlier versions had, by their full names."""
