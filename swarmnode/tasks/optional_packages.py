"""Packages that only some tasks need, imported when such a task is loaded.

tables.py, hub_datasets.py and other adapters -> [extra_module]
"""

import importlib
from typing import Any

from swarmnode.errors import TaskError


def extra_module(name: str, install: str, what: object) -> Any:
    """Returns a module of an optional package. Raises TaskError with the command that installs it.

    >>> from swarmnode.machine.installing import how_to_install
    >>> extra_module("json", how_to_install("data"), "questions.parquet").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        trouble = "is not installed" if missing else f"cannot be imported: {error}"
        raise TaskError(f"{what} needs {package}, which {trouble}", hint=install) from error
