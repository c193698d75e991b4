"""The command that installs a missing part, and the check for another project with our name."""

import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "swarmnode-rl"
OUR_COMMAND = "swarmnode.cli.app:main"
"""Entry point of all our distributions, including earlier ones named swarmnode."""


def how_to_install(extra: str) -> str:
    """Returns the command that adds an extra to this installation, from the source tree, git address or wheel
    that it came from; if that is unknown, in words that fit any of them.

    >>> how_to_install("train").startswith("pip install ")
    True
    """
    return install_command(extra, Path(__file__).parents[2], _came_from())


def install_command(extra: str, beside: Path, origin: str) -> str:
    """Returns `how_to_install` for a package in the folder `beside` that came from the address `origin` (a
    git+ or file: URL; empty: unknown)."""
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

    Both have a package of that name: in one folder each overwrites files of the other, and in two folders the
    order of the path decides which of them is imported."""
    for folder in dict.fromkeys(sys.path):
        for found in Path(folder or ".").glob("swarmnode-*.dist-info"):
            entries = found / "entry_points.txt"
            if not (entries.is_file() and OUR_COMMAND in entries.read_text(errors="replace")):
                name = found.name.removesuffix(".dist-info").replace("-", " ")
                return f"another project's package {name} is installed over {DISTRIBUTION}, in {found.parent}"
    return None


NAMESAKE_ADVICE = f"pip uninstall swarmnode {DISTRIBUTION}, then install this one again (docs/operations.md)"


def _came_from() -> str:
    """Returns the address in pip's record of the installation (PEP 610), or "" if there is none."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    address = str(record.get("url", ""))
    # A repository on this disk is treated as a folder: pip does not accept git+file: after a name.
    is_git = record.get("vcs_info", {}).get("vcs") == "git" and not address.startswith("file:")
    return f"git+{address}" if is_git else address


def _local(origin: str) -> Path | None:
    parts = urlsplit(origin)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
