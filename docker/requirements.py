"""Prints requirements of pyproject.toml, one a line, for pip install -r: `requirements.py project train`.

Dockerfile -> [requirements] -> pip

`project` names what swarmnode always needs, any other word one of its extras. It lets an image install the
dependencies from the manifest alone, in a layer that outlives every change of a source file.
"""

import sys
import tomllib
from pathlib import Path


def requirements(manifest: Path, groups: list[str]) -> list[str]:
    """What pyproject.toml asks for under these names, in their order."""
    project = tomllib.loads(manifest.read_text())["project"]
    extras = project["optional-dependencies"]
    return [
        line
        for group in groups
        for line in (project["dependencies"] if group == "project" else extras[group])
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join([*requirements(Path("pyproject.toml"), sys.argv[1:]), ""]))
