"""What can be counted without running a node: class names, docstrings, words. Text in, findings out.

swarmnode/**/*.py, README.md -> [duplicate_class_names, fragment_docstrings, count_words] -> house.py
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

OPENINGS = """
About Above Across After Against Along Among Around As At Before Behind Below Beside Besides Between
Beyond But By Down During Except For From In Inside Into Like Near Of Off On Onto Out Outside Over Past
Per Since Than Through Till To Toward Towards Under Until Up Upon With Within Without That
"""
FRAGMENT_OPENINGS = frozenset(OPENINGS.split())
"""A docstring that begins with one of these (a preposition, or "That") is the rest of a sentence that stands
elsewhere. Some whole sentences begin so, too: that is why the goal is not zero."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def duplicate_class_names(package: Path) -> Mapping[str, Sequence[str]]:
    """The public class names that more than one module of `package` defines, each with these modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path, tree in _parsed(package):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path)
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def fragment_docstrings(package: Path) -> list[str]:
    """`path:line: text` of every docstring in `package` that begins with one of FRAGMENT_OPENINGS."""
    return [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in _parsed(package)
        for line, text in docstrings(tree)
        if text and text.split()[0].rstrip(",:;") in FRAGMENT_OPENINGS
    ]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes and functions, and of the fields and constants
    that have one underneath."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, statement in enumerate(body if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    opens = place == 0 and isinstance(node, Documented)
                    if opens or (place and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)):
                        yield statement.lineno, text.strip()


def count_words(text: str) -> int:
    """Words of a page as `wc -w` counts them: what white space separates in its source. Code blocks, tables
    and the addresses of links are counted as well.

    >>> count_words("see [it](docs/it.md):\\n\\n```\\nmake join\\n```")
    6
    """
    return len(text.split())


def _parsed(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package.parent).as_posix(), ast.parse(path.read_text())
