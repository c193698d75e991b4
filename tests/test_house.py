"""One meaning a word: what a reader searches for is defined in one place."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "swarmnode"


def public_classes(source: str) -> list[str]:
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_private_classes_and_those_within_others_do_not_count() -> None:
    source = "class Peer:\n    class Meta: ...\nclass _Peer: ...\ndef make():\n    class Local: ..."
    assert public_classes(source) == ["Peer"]


def test_no_public_class_name_is_defined_twice() -> None:
    files_of: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in public_classes(path.read_text()):
            files_of[name].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}
