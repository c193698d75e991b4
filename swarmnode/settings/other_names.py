"""Names that people bring along: what another trainer calls something.

registry.py -> [other_names] -> config_layers.py (advice for an unknown name), settings_page.py
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
        return (
            f"in swarmnode, {self.trainer}'s {name} is {self.arguments[name]}"
            if name in self.arguments
            else None
        )


@cache
def other_names() -> Sequence[OtherNames]:
    """Returns the names of the trainers that are known. They are advice: what cannot be imported is left
    out, with a warning."""
    return [*importable("names")]
