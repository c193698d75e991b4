"""Makes the tables of docs/metrics.md from the sentences under NodeStatus's fields and the reasons.

node/showing/node_status.py, training/records.py, exchange/drop_reasons.py -> [table] -> docs/metrics.md

`python checks/metrics_page.py` writes it anew; the suite says when that is due.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec

from swarmnode.exchange.drop_reasons import Reason
from swarmnode.node.showing.node_status import NodeStatus

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
REASONS = """## Why not used

`NAME` of `exchange.dropped` and `exchange.unpublished`, and the panel's row "dropped". The log has the
first of each reason, with its author and cause, and `swarmnode peers` all of one peer. Points are taken from
an author's score of 100, below 20 it is banned. On both sides that looks like a bad line: who bans its only
seed is `alone`, and who was banned connects and is disconnected again and again; only the other operator
can say why.

`other_version`: compare with `swarmnode task show FILE` on both machines. `false_claim`: the reward depends
on more than the answer (a clock, a seed, a file), or somebody lies; `swarmnode task check` tries it twice.

To change a rule, search `swarmnode/exchange/` for `Reason.` and the name in capitals; `too_long` is in
`_completion` and `false_claim` in `is_false_claim`, both of `validation/body_check.py`. Bounds are in
`swarmnode/exchange/limits.py`, tests of the checks in `tests/unit/exchange/validation/`."""
MARK = "<!-- Made by checks/metrics_page.py of the sentences under the fields: change them there. -->\n"


def sentences(of: type) -> dict[str, str]:
    """The sentence under each field of a struct or an enum; fields without one are absent."""
    (made,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(made, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            assert isinstance(target, ast.Name) and isinstance(below.value, ast.Constant)
            found[target.id] = " ".join(str(below.value.value).split())
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
    texts = f"Texts and lists, which only the status has:\n\n{head}{rest}\n"
    return f"{MARK}\n{head}{numbers}\n\n{texts}\n{REASONS}\n\n{reasons()}\n"


def reasons() -> str:
    """The table of the reasons why something was not used."""
    told = sentences(Reason)
    rows = (f"| `{code}` | {code.words} | {told.get(code.name, '')} | {code.points:g} |" for code in Reason)
    return "\n".join(("| `NAME` | on the panel | rule | points |", "|---|---|---|---|", *rows))


def page() -> str:
    """The whole page as it should be."""
    return PAGE.read_text().partition(MARK)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page())
