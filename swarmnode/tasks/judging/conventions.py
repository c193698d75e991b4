"""Rewards written for other trainers: a registered convention adapts them to TRL's contract.

load_reward("verl:package.module:function") -> [adapted] -> registry.py -> Convention -> rewards.py
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnode.registry import find, importable, names


@dataclass(frozen=True, slots=True)
class Convention:
    """The way in which a trainer calls its rewards."""

    adapted: Callable[[Any], Any]
    """Returns a function of that trainer as one on TRL's contract."""
    fits: Callable[[Sequence[str]], bool] = lambda arguments: False
    """Returns True if a function with these arguments was written for that trainer."""
    of_objects: bool = False
    """True if a reward may be an object that is not a function."""


def adapted(function: Any, convention: str | None = None) -> Any:
    """Returns `function` on TRL's contract. Without `convention`, its arguments show which one it follows; a
    function of TRL or of an unknown convention is returned unchanged. Raises ConfigError if the name is
    unknown or that convention cannot be imported."""
    if convention is not None:
        return find("convention", convention).adapted(function)
    arguments = argument_names(function)
    for one in importable("convention"):
        if one.fits(arguments):
            return one.adapted(function)
    return function


def split_convention(reward: str) -> tuple[str | None, str]:
    """Returns the trainer that a reward names as its convention, if any, and the rest of its name.
    `verl:compute_score` is a function of verl, and `verl:file.py:compute_score` is written for it.

    >>> split_convention("verl:rw.py:f"), split_convention("verl:f"), split_convention("a:b/rw.py:f")
    (('verl', 'rw.py:f'), (None, 'verl:f'), (None, 'a:b/rw.py:f'))
    """
    first, _, rest = reward.partition(":")
    return (first, rest) if ":" in rest and first in names("convention") else (None, reward)


def argument_names(function: Any) -> list[str]:
    """Returns the names of a function's arguments, or none if they are unknown."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
