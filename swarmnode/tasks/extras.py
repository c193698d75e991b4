"""Packages that only some tasks need, imported when such a task is loaded.

tables.py, hub.py and other adapters -> [extra_module]
"""

import importlib
from typing import Any

from swarmnode.errors import TaskError


def extra_module(name: str, provided_by: str, what: object) -> Any:
    """A module of an optional package. Raises TaskError that names what to install.

    >>> extra_module("json", "swarmnode[data]", "questions.parquet").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        trouble = "is not installed" if missing else f"cannot be imported: {error}"
        raise TaskError(
            f"{what} needs {package}, which {trouble}", hint=f'pip install "{provided_by}"'
        ) from error
