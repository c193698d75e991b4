"""Arguments that a function of the user takes."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function of the user takes by name.

    >>> accepted(lambda answer: answer, {"answer": "4", "index": 7})
    {'answer': '4'}
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    return {
        one.name: given[one.name]
        for one in parameters
        if one.name in given and one.kind is not one.VAR_POSITIONAL
    }
