"""The command that installs what is missing here, and whoever else may be installed in our place.

errors' hints -> [how_to_install];  cli/__init__.py, __init__.py, doctor -> [find_namesake]

The distribution is called swarmnode-rl, the package and the command swarmnode. On the package index the name
swarmnode is another project's, with a package of the same name, and neither name is ours there yet: so every
hint names the place that this installation came from. Needs nothing but the standard library.
"""

import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "swarmnode-rl"
OUR_COMMAND = "swarmnode.cli.app:main"
"""What the entry points of every distribution of ours say, of those that were called swarmnode, too."""


def how_to_install(extra: str) -> str:
    """Returns the command that adds an extra to this installation: from its source tree, the git address or
    the wheel that it came from, or, where none of them is known, in words for any of them.

    >>> how_to_install("train").startswith("pip install ")
    True
    """
    return install_command(extra, Path(__file__).parent.parent, _came_from())


def install_command(extra: str, beside: Path, origin: str) -> str:
    """Returns `how_to_install` of a package that lies in the folder `beside` and came from the address
    `origin` (a git+ or file: URL; empty: nobody knows)."""
    tree = beside if (beside / "pyproject.toml").is_file() else _local(origin)
    if tree is not None and tree.is_dir():
        return f'pip install -e "{tree}[{extra}]"'
    if tree is not None and not tree.is_file():
        origin = ""
    if origin:
        return f'pip install "{DISTRIBUTION}[{extra}] @ {origin}"'
    return f'pip install -e ".[{extra}]" in a clone, or pip install "{DISTRIBUTION}[{extra}] @ git+URL"'


def find_namesake() -> str | None:
    """Returns one sentence about another project's `swarmnode` in this environment, or None.

    Both have a package of that name: in one folder each overwrites files of the other, and in two it depends
    on the order of the path which of them is imported."""
    for folder in dict.fromkeys(sys.path):
        for found in Path(folder or ".").glob("swarmnode-*.dist-info"):
            entries = found / "entry_points.txt"
            if not (entries.is_file() and OUR_COMMAND in entries.read_text(errors="replace")):
                name = found.name.removesuffix(".dist-info").replace("-", " ")
                return f"another project's package {name} is installed over {DISTRIBUTION}, in {found.parent}"
    return None


NAMESAKE_ADVICE = f"pip uninstall swarmnode {DISTRIBUTION}, then install this one again (docs/operations.md)"


def _came_from() -> str:
    """The address in the record that pip keeps of an installation (PEP 610); empty where there is none."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    address = str(record.get("url", ""))
    # A repository on this disk is a folder like any other: pip takes no git+file: behind a name.
    is_git = record.get("vcs_info", {}).get("vcs") == "git" and not address.startswith("file:")
    return f"git+{address}" if is_git else address


def _local(origin: str) -> Path | None:
    parts = urlsplit(origin)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
