"""How much a reader of this repository pays: lines of code, rooms, names, docstrings that are riddles.

heart_code_lines: lines of swarmnode/ but extensions/ with a token that is no comment and no docstring
product_code_lines: the same of all of swarmnode/; C apart
file_names_twice: names of modules that stand in more than one folder
tests_without_a_module: files in tests/unit/ that stand beside no module of theirs
files_in_largest_folder: modules in the fullest folder of swarmnode/
heart_imports_of_extensions: imports of swarmnode.extensions outside of it
settings: settings on docs/settings.md
own_late_imports: import statements inside functions that name modules of ours
riddles: docstrings that begin with What, Whether, Those, The same, Where or How
readme_words: words of README.md as `wc -w` counts them

Each figure comes with what is behind it. A figure is a lamp, not a goal: none is met by folding, renaming or
moving text about.

python benchmarks/house.py [--quick] [--json FILE]; --quick prints the figures without the lists
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common import arguments, report
from house_counts import (
    code_lines,
    count_words,
    file_names_twice,
    files_by_folder,
    imports_of,
    lonely_tests,
    modules,
    own_late_imports,
    riddles,
)

from swarmnode.settings.config import KEYS

ROOT = Path(__file__).resolve().parent.parent
GOALS = {
    "heart_code_lines": 29000,
    "product_code_lines": 47000,
    "file_names_twice": 0,
    "tests_without_a_module": 0,
    "files_in_largest_folder": 14,
    "heart_imports_of_extensions": 0,
    "settings": 95,
    "own_late_imports": 60,
    "riddles": 60,
    "readme_words": 1000,
}
"""At most so many of each."""


def main() -> None:
    options = arguments(__doc__ or "")
    claims, material = counted()
    if not options.quick:
        for name, lines in material.items():
            print(f"{name}:", *lines, sep="\n  ")
    for claim, value in claims.items():
        print(f"{claim:28} {value:6.0f}  (at most {GOALS[claim]})")
    report("house", claims, {}, options.json, extra={"goals": GOALS})


def counted(root: Path = ROOT) -> tuple[Mapping[str, float], Mapping[str, Sequence[str]]]:
    """Returns the claims, and by name what is behind each of them."""
    package = root / "swarmnode"
    extensions = package / "extensions"
    lines = {path: code_lines(path) for path in modules(package)}
    heart = {path: count for path, count in lines.items() if not path.is_relative_to(extensions)}
    twice = file_names_twice(package)
    lonely = lonely_tests(root / "tests" / "unit", package)
    folders = files_by_folder(package)
    leaks = imports_of(package, "swarmnode.extensions", extensions)
    late = own_late_imports(package)
    unclear = riddles(package)
    claims = {
        "heart_code_lines": sum(heart.values()),
        "product_code_lines": sum(lines.values()),
        "file_names_twice": len(twice),
        "tests_without_a_module": len(lonely),
        "files_in_largest_folder": max(folders.values()),
        "heart_imports_of_extensions": len(leaks),
        "settings": len(KEYS),
        "own_late_imports": len(late),
        "riddles": len(unclear),
        "readme_words": count_words((root / "README.md").read_text()),
    }
    return claims, {
        "code lines by folder": by_room(lines, package),
        "file names twice": [f"{name}: {', '.join(files)}" for name, files in twice.items()],
        "tests without a module": lonely,
        "modules by folder": [f"{count:3} {folder}" for folder, count in folders.items()],
        "imports of extensions by the heart": leaks,
        "settings": sorted(KEYS),
        "late imports of our own": late,
        "riddles": unclear,
    }


def by_room(lines: Mapping[Path, int], package: Path) -> list[str]:
    """Returns code lines by folder of the first floor, and of the second below extensions/."""
    rooms: dict[str, int] = {}
    for path, count in lines.items():
        parts = path.relative_to(package).parts[:-1]
        room = "/".join(parts[: 2 if parts[:1] == ("extensions",) else 1]) or "."
        rooms[room] = rooms.get(room, 0) + count
    return [f"{count:6} {room}" for room, count in sorted(rooms.items(), key=lambda one: -one[1])]


if __name__ == "__main__":
    main()
