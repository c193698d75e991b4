"""The page with every setting, docs/settings.md: made of the sentences in config.py, never written by hand.

config.py -> [reference_page] -> docs/settings.md

`python checks/settings_page.py` writes it anew; the suite says when that is due.
"""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from swarmnode.settings.config import SECTIONS, Section
from swarmnode.settings.other_names import other_names

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Every setting

Made by `python checks/settings_page.py` from `swarmnode/settings/config.py`; a test compares
the two. [configs/README.md](../configs/README.md) says where a value may come from, and
`swarmnode config show --explain` prints those that hold here. Scripts say
`settings={"training.loss": "grpo"}`, or a dictionary for a section.
"""


def reference_page() -> str:
    """Returns the whole page as Markdown: a table for each section, and one of another trainer's names."""
    tables = [_table(name, section) for name, section in SECTIONS.items()]
    known = [one.page + "".join(_known(*pair) for pair in one.settings.items()) for one in other_names()]
    return "\n".join([HEAD, *tables, *known])


def _known(theirs: str, here: tuple[str, str]) -> str:
    return f"| `{theirs}` | `{here[0]}` | {here[1]} |\n"


def _table(name: str, section: type[Section]) -> str:
    rows = "".join(_rows(name, section))
    return f"## {name}\n\n| setting | default | values | |\n|---|---|---|---|\n{rows}"


def _rows(prefix: str, section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key, meaning, inner = (
            f"{prefix}.{name}",
            " ".join((field.description or "").split()),
            field.annotation,
        )
        if isinstance(inner, type) and issubclass(inner, Section):
            yield _row(key, "", "table", meaning)
            yield from _rows(key, inner)
        else:
            default = field.get_default(call_default_factory=True)
            yield _row(key, _shown(default), _values(field), meaning)


def _row(key: str, *cells: str) -> str:
    table, _, name = key.rpartition(".")
    written = f"`{key}`" if table in SECTIONS else f"`[{table}] {name}`"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (written, *cells)) + " |\n"


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | tuple | dict | SecretStr) and not value:
        return "empty"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)  # pyright: ignore[reportUnknownVariableType]
    return f"`{value!r}`" if isinstance(value, str) and "\n" in value else f"`{value}`"


def _values(field: FieldInfo) -> str:
    """Returns the type of a setting in words, with its bounds."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if isinstance(annotation, UnionType):
        return " or ".join(_kind(one) for one in get_args(annotation) if one is not NoneType)
    words = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", SecretStr: "text"}
    return words.get(annotation) or {tuple: "list of texts", dict: "table"}[get_origin(annotation)]


if __name__ == "__main__":
    PAGE.write_text(reference_page())
