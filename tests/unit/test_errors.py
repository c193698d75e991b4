"""The tree of errors, as its module draws it."""

import re
from collections.abc import Iterator

from swarmnode import errors
from swarmnode.errors import SwarmnodeError


def tree_of(kind: type[SwarmnodeError], depth: int = 0) -> Iterator[tuple[int, str]]:
    yield depth, kind.__name__
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from tree_of(one, depth + 1)


def test_the_drawn_tree_has_every_error_in_the_order_in_which_they_are_defined() -> None:
    drawn = re.findall(r"^([│├└─ ]*)([A-Z]\w+)", (errors.__doc__ or "").split("\n\n")[1], re.MULTILINE)
    assert [(len(lines) // 4, name) for lines, name in drawn] == list(tree_of(SwarmnodeError))
