"""Makes the table of docs/metrics.md from the sentences under the fields of NodeStatus.

node/showing/node_status.py, node/learner.py, training/records.py -> [table] -> docs/metrics.md

`python checks/metrics_page.py` writes it anew; the suite says when that is due.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec

from swarmnode.node.showing.node_status import NodeStatus

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
MARK = "<!-- Made by checks/metrics_page.py of the sentences under the fields: change them there. -->\n"


def sentences(struct: type) -> dict[str, str]:
    """The sentence under each field of a struct; fields without one are absent."""
    (made,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(made, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def fields_of(struct: type = NodeStatus, prefix: str = "") -> Iterator[tuple[str, bool, str]]:
    """(dotted name, whether it is a number or several, sentence) of every field, those within fields too."""
    told = sentences(struct)
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from fields_of(kind, f"{prefix}{name}.")
            continue
        parts = get_args(kind)
        many = get_origin(kind) is dict
        is_number = bool({int, float} & {kind, *parts, *(part for one in parts for part in get_args(one))})
        yield f"{prefix}{name}{'.NAME' if many else ''}", is_number, told.get(name, "")


def table() -> str:
    """The page from the mark on."""
    rows = list(fields_of())
    head = "| | |\n|---|---|\n"
    numbers, rest = (
        "\n".join(f"| `{name}` | {told} |" for name, is_number, told in rows if is_number == wanted)
        for wanted in (True, False)
    )
    return f"{MARK}\n{head}{numbers}\n\nTexts and lists, which only the status has:\n\n{head}{rest}\n"


def page() -> str:
    """The whole page as it should be."""
    return PAGE.read_text().partition(MARK)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page())
