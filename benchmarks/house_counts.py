"""Counts of what a reader pays, from the text of the files alone: each returns what is behind its figure.

swarmnode/**/*.py, tests/unit/**/*.py, README.md -> [code_lines, riddles, file_names_twice, ...] -> house.py
"""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

RIDDLES = ("What ", "Whether ", "Those ", "The same", "Where ", "How ")
"""A docstring is read alone, in a hover: one that begins so leaves its reader to guess what it is about."""

NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """Returns the lines of a file that have a token which is neither a comment nor a docstring; strings under
    fields and constants count as docstrings."""
    text = path.read_text()
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for statement in documentation(ast.parse(text)):
        lines -= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return len(lines)


def file_names_twice(package: Path) -> Mapping[str, Sequence[str]]:
    """Returns the names of modules that stand in more than one folder, each with its files."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in modules(package):
        if path.name != "__init__.py":
            files[path.name].append(path.relative_to(package).as_posix())
    return {name: found for name, found in files.items() if len(found) > 1}


def lonely_tests(tests: Path, package: Path) -> list[str]:
    """Returns the files of unit tests that stand beside no module of theirs: `a/test_b.py` and
    `a/test_b_topic.py` are the tests of `a/b.py`."""
    return [
        path.relative_to(tests).as_posix()
        for path in sorted(tests.rglob("test_*.py"))
        if not _tested(path.stem.removeprefix("test_"), package / path.parent.relative_to(tests))
    ]


def _tested(name: str, folder: Path) -> bool:
    words = name.split("_")
    return any((folder / ("_".join(words[:count]) + ".py")).is_file() for count in range(1, len(words) + 1))


def files_by_folder(package: Path) -> Mapping[str, int]:
    """Returns the number of modules in each folder, `__init__.py` apart, the largest first."""
    folders: dict[str, int] = defaultdict(int)
    for path in modules(package):
        folders[path.parent.relative_to(package.parent).as_posix()] += path.name != "__init__.py"
    return dict(sorted(folders.items(), key=lambda one: -one[1]))


def imports_of(package: Path, imported: str, outside: Path) -> list[str]:
    """Returns `path:line: name` of each import of the package `imported` by a module not below `outside`."""
    return [
        f"{path.relative_to(package.parent)}:{node.lineno}: {name}"
        for path in modules(package)
        if not path.is_relative_to(outside)
        for node, names, _ in imports(ast.parse(path.read_text()))
        for name in names
        if f"{name}.".startswith(f"{imported}.")
    ]


def own_late_imports(package: Path) -> list[str]:
    """Returns `path:line: module` of each import of a module of `package` inside a function."""
    return [
        f"{path.relative_to(package.parent)}:{node.lineno}: {names[0]}"
        for path in modules(package)
        for node, names, late in imports(ast.parse(path.read_text()))
        if late and names[0].split(".")[0] == package.name
    ]


def imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, Sequence[str], bool]]:
    """Yields each import statement, the dotted names it may load, and True where it stands in a function.
    Imports for the type checker alone are left out."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, late = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += [(child, late) for child in node.orelse]
            continue
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                yield node, [module, *(f"{module}.{alias.name}" for alias in node.names)], late
            case ast.Import():
                yield node, [alias.name for alias in node.names], late
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        todo += [(child, late) for child in ast.iter_child_nodes(node)]


def riddles(package: Path) -> list[str]:
    """Returns `path:line: text` of every docstring that begins with one of RIDDLES."""
    return [
        f"{path.relative_to(package.parent)}:{statement.lineno}: {text.splitlines()[0]}"
        for path in modules(package)
        for statement in documentation(ast.parse(path.read_text()))
        if (text := ast.literal_eval(statement.value).strip()).startswith(RIDDLES)
    ]


def documentation(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yields the docstrings of a module, its classes and functions, and of the fields and constants that have
    one underneath."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, statement in enumerate(body if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    opens = place == 0 and isinstance(node, Documented)
                    if opens or (place and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)):
                        yield statement


def count_words(text: str) -> int:
    """Returns the words of a page as `wc -w` counts them: what white space separates in its source, code
    blocks, tables and the addresses of links as well.

    >>> count_words("see [it](docs/it.md):\\n\\n```\\nmake join\\n```")
    6
    """
    return len(text.split())


def modules(package: Path) -> list[Path]:
    """Returns the files of a package, in order."""
    return sorted(package.rglob("*.py"))
