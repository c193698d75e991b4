"""The files of `rewards/`, which import nothing from swarmnode, and the one rule by which all rewards find an
answer."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from swarmnode.errors import TaskError
from swarmnode.machine.storage import builtin_folder

_PACKAGE = "_swarmnode_rewards"
"""Import name of the built-in rewards, since `rewards` may be a package of the user."""


def final_answer(completion: Any) -> str:
    """Returns the answer in a completion as rewards receive it: its text, or the policy's last message. The
    plain rewards use the same rule (rewards/_text.py)."""
    return builtin("_text").text_of(completion)


def builtin(module: str) -> ModuleType:
    """Returns one of the plain reward modules. Raises TaskError."""
    if _PACKAGE not in sys.modules:
        _import_package(builtin_folder("rewards"))
    return importlib.import_module(f"{_PACKAGE}.{module}")


def _import_package(folder: Path) -> None:
    location = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, location, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not location.is_file():
        raise TaskError(f"the built-in rewards are missing from {folder}", hint="reinstall swarmnode")
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
