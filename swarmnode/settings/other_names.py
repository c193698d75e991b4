"""Names from other trainers, which people may use for our settings and arguments.

registry.py -> [other_names] -> config_layers.py (advice for an unknown name), the page of settings
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
    """Our setting for each of their names, with a remark."""
    without: Mapping[str, str]
    """A remark for each of their options without a setting here."""
    arguments: Mapping[str, str]
    """The equivalent in sn.Node for each argument of their trainer or its config."""
    page: str
    """Text before the table of these names on the page of all settings."""

    def advice(self, name: str) -> str | None:
        """Returns advice for one of their names, or None for any other name."""
        if name in self.settings:
            ours, note = self.settings[name]
            return f"Did you mean {ours!r}?" + (f" ({note})" if note else "")
        if name in self.without:
            return f"{self.trainer}'s {name} has no setting here: {self.without[name]}"
        return self.advice_for_argument(name)

    def advice_for_argument(self, name: str) -> str | None:
        """Returns advice for an argument of their trainer, or None for any other name."""
        return (
            f"in swarmnode, {self.trainer}'s {name} is {self.arguments[name]}"
            if name in self.arguments
            else None
        )


@cache
def other_names() -> Sequence[OtherNames]:
    """Returns the names of all known trainers. They only serve advice: any that cannot be imported are left
    out, with a warning."""
    return [*importable("names")]
