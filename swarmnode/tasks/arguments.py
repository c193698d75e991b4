"""Arguments that a user's function takes."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

FUNCTIONS_KNOWN = 256
"""Functions whose parameters are cached: a reward runs for every group, and inspecting it costs as much."""


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a user's function takes by name.

    >>> accepted(lambda answer: answer, {"answer": "4", "index": 7})
    {'answer': '4'}
    """
    try:
        parameters = parameters_of(function).values()
    except (TypeError, ValueError):
        return {}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {
        one.name: given[one.name]
        for one in parameters
        if one.name in given and one.kind is not one.VAR_POSITIONAL
    }


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a user's function by name. Raises TypeError or ValueError if they are
    unknown.

    >>> list(parameters_of(lambda answer, index=0: answer))
    ['answer', 'index']
    """
    try:
        return _known_parameters(function)
    except TypeError:  # It is not hashable, or has no known parameters.
        return inspect.signature(function).parameters


@lru_cache(FUNCTIONS_KNOWN)
def _known_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
