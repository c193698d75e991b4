"""Imports run one way: a module imports from its own folder or those to its left, never in a circle."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swarmnode"
LAYERS = (
    "ground",
    "identity",
    "network",
    "tasks",
    "rollout",
    "exchange",
    "model",
    "training",
    "node",
    "api",
    "cli",
    "extensions",
)
GROUND = {
    "",
    "bounded_dict",
    "chat",
    "cpu_kernels",
    "engine_record",
    "errors",
    "families",
    "machine",
    "models",
    "printable",
    "registry",
    "settings",
    "token_bucket",
    "types",
}
ABOVE_ALL = {"__main__", "testing"}
LIBRARY = "swarmnode.__init__"
"""The package itself names the library, which it loads when one of the names is used."""


@cache
def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def layer(module: str) -> int:
    first = module.removeprefix("swarmnode").removeprefix(".").split(".")[0].replace("__init__", "")
    if first in ABOVE_ALL or module == LIBRARY:
        return len(LAYERS)
    return LAYERS.index("ground" if first in GROUND else first)


@cache
def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "swarmnode":
            candidates = [f"{node.module}.{alias.name}" for alias in node.names]
            known = modules()
            found.update(c if c in known else node.module for c in candidates)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "swarmnode")
    return found


def test_no_module_imports_from_a_folder_to_its_right() -> None:
    upward = [
        f"{module} imports {target}"
        for module, path in modules().items()
        for target in imports(path)
        if layer(target) > layer(module) and not target.startswith("swarmnode.extensions.")
    ]
    assert upward == []


def test_the_heart_imports_no_extension() -> None:
    """Extensions register themselves (swarmnode/registry.py): the heart stands without them."""
    guilty = [
        f"{module} imports {target}"
        for module, path in modules().items()
        for target in imports(path)
        if target.startswith("swarmnode.extensions.") and not module.startswith("swarmnode.extensions.")
    ]
    assert guilty == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports(path) - {module} for module, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"circle: {' -> '.join(error.args[1])}") from None


def test_rewards_know_nothing_of_swarmnode() -> None:
    guilty = [path.name for path in (ROOT / "rewards").rglob("*.py") if imports(path)]
    assert guilty == []


def test_every_module_says_where_it_stands() -> None:
    silent = [str(path) for path in modules().values() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
