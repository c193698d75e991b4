"""How much a reader pays: names that mean two things, modules, frames, half sentences, words of the README.

duplicate_class_names: public class names that more than one module of swarmnode/ defines.
modules_loaded: modules of ours in `sys.modules` at the end of `swarmnode join --rounds 1` with the tiny
    policy, which was built before. Packages are counted, what its task processes load is not.
frames_to_loss: Python frames of ours between the function of the command `join` and the call of the loss in
    the first optimizer step of that run, across coroutines and threads; neither of the two is counted,
    and no comprehension.
files_to_loss: the files in which these frames stand, that of `join` and that of the loss included.
fragment_docstrings: docstrings that begin with a preposition or with "That".
readme_words: words of README.md as `wc -w` counts them: all of its source, code blocks and links too.

python benchmarks/house.py [--quick] [--json FILE]; --quick runs no node: modules and frames are left out
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import arguments, report
from house_counts import count_words, duplicate_class_names, fragment_docstrings
from house_trail import Step, from_join_to_loss

from swarmnode.machine.storage import resolve_paths
from swarmnode.model.demonstration.tiny import build_tiny

ROOT = Path(__file__).resolve().parent.parent
GOALS = {
    "duplicate_class_names": 0,
    "modules_loaded": 120,
    "frames_to_loss": 12,
    "files_to_loss": 6,
    "fragment_docstrings": 40,
    "readme_words": 1000,
}
"""At most so many of each."""


def main() -> None:
    options = arguments(__doc__ or "")
    claims, material = written()
    if not options.quick:
        with tempfile.TemporaryDirectory() as home:
            found = joined(Path(home))
        more, lists = read(found["modules"], [Step(**step) for step in found["ways"][0]])
        claims, material = {**claims, **more}, {**material, **lists}
    for name, lines in material.items():
        print(f"{name}:", *lines, sep="\n  ")
    for claim, value in claims.items():
        print(f"{claim:22} {value:5.0f}  (at most {GOALS[claim]})")
    report("house", claims, {}, options.json, extra={"goals": GOALS})


def written(root: Path = ROOT) -> tuple[dict[str, float], dict[str, Sequence[str]]]:
    """The claims on what is written, and what somebody would have to change."""
    names = duplicate_class_names(root / "swarmnode")
    fragments = fragment_docstrings(root / "swarmnode")
    claims = {
        "duplicate_class_names": len(names),
        "fragment_docstrings": len(fragments),
        "readme_words": count_words((root / "README.md").read_text()),
    }
    return claims, {
        "class names that are defined more than once": [f"{k}: {', '.join(v)}" for k, v in names.items()],
        "docstrings that are the rest of a sentence": fragments,
    }


def read(modules: Sequence[str], way: Sequence[Step]) -> tuple[dict[str, float], dict[str, Sequence[str]]]:
    """The claims on what one round has a reader read, and the lists of it."""
    steps = from_join_to_loss(way)
    claims = {
        "modules_loaded": len(modules),
        "frames_to_loss": len(steps) - 2,
        "files_to_loss": len({step.file for step in steps}),
    }
    return claims, {
        "modules that one round loads": modules,
        "frames from join to the loss": [f"{step.file:28} {step.function}" for step in steps],
    }


def joined(home: Path) -> Mapping[str, Any]:
    """What house_trail.py found in one node's first round."""
    build_tiny(resolve_paths(home, {}).models)
    out = home / "found.json"
    folders = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, "-c", "import house_trail; house_trail.main()", str(out)]
    options = ["--home", str(home), "--model", "tiny", "--rounds", "1", "--set", "network.listen=127.0.0.1"]
    done = subprocess.run(
        [*command, "join", *options],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
    )
    if done.returncode or not out.exists():
        raise SystemExit(f"the node ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())


if __name__ == "__main__":
    main()
