"""Whether examples/ do what they say: each is run as it stands, to its end, in a home of its own.

make examples-check -> [examples_check] -> steps.py (a command), report.py (what is printed)

The suite runs them for two rounds (tests/test_examples.py); here nothing is changed. What an example needs
that is not installed is told. Behind them come the shell blocks of the pages (pages_check.py). Names as
arguments: these only, `pages` for the latter.
"""

import re
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from os import environ
from pathlib import Path

from pages_check import run_pages
from report import Report
from steps import StepFailed, run, step

from swarmnode.extensions.demonstration.tiny import build_tiny
from swarmnode.machine.storage import resolve_paths

FOLDER = Path(__file__).resolve().parent.parent / "examples"
RUN_S = 900
LEARNT = 0.5
"""Held-out reward, from 0.01, that counts as learnt."""


def main() -> int:
    report = Report()
    wanted = sys.argv[1:]
    paths = sorted(path for path in FOLDER.glob("*.py") if path.stem in wanted or not wanted)
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(Path(folder) / "models")
        for path in paths:
            if missing := [name for name in packages_of(path.read_text()) if find_spec(name) is None]:
                report.say(f"{path.stem} is not run: {', '.join(missing)} is not installed")
                continue
            home = Path(folder) / path.stem
            step(report, path.stem, lambda path=path, home=home: checked(path, home, model))
        if not wanted or "pages" in wanted:
            run_pages(report, Path(folder) / "pages", model)
    return report.finish()


def packages_of(source: str) -> list[str]:
    """Packages that an example imports, or whose rewards, data sets or tasks it names.

    >>> packages_of('import random\\nimport swarmnode as sn\\nsn.run("reasoning-gym:chain_sum")')
    ['random', 'swarmnode', 'reasoning_gym']
    """
    found = re.findall(r"^(?:from|import) (\w+)|\b(trl)\.rewards|\"(reasoning)-gym:", source, re.MULTILINE)
    return ["reasoning_gym" if gym else imported or trl for imported, trl, gym in found]


def checked(path: Path, home: Path, model: Path) -> str:
    """Run one example, and return the last line that it printed. Raises StepFailed."""
    models = resolve_paths(home, {}).models
    models.parent.mkdir(parents=True)
    models.symlink_to(model.parent)
    work = home / "work"
    work.mkdir()
    own = environ | {
        "SWARMNODE_HOME": str(home),
        "SWARMNODE_NETWORK__MDNS": "false",
        "PYTHONPATH": path_of(path),
    }
    out = run([sys.executable, path], RUN_S, cwd=work, env=own)
    asked = re.search(r"rounds=(\d+)", path.read_text())
    PROMISES.get(path.stem, all_rounds)(out, int(asked[1]) if asked else 0)
    return out.strip().splitlines()[-1][:100]


def path_of(example: Path) -> str:
    """Where the example's own folder and this checkout are found, whatever folder it is started in."""
    return ":".join([str(example.parent), str(example.parent.parent)])


def all_rounds(out: str, asked: int) -> None:
    """Its summary has all rounds that the script asks for, and what it measured at the end."""
    if not re.search(rf"rounds={asked}, tokens=[1-9]\d*, .*reward_last=-?\d", out):
        raise StepFailed(f"there is no summary of {asked} rounds in what it printed:\n{out[-500:]}")


def learnt(out: str, asked: int) -> None:
    """It prints a held-out reward, which has become good, and an answer."""
    found = re.search(r"^(\d\.\d+) (.+)$", out, re.MULTILINE)
    if found is None or float(found[1]) < LEARNT:
        raise StepFailed(f"after {asked} rounds the reward is not {LEARNT} or more:\n{out[-500:]}")


def stopped_early(out: str, asked: int) -> None:
    """It stops when it is good enough, before its rounds are over."""
    done = re.search(r"rounds=(\d+), tokens=", out)
    if done is None or int(done[1]) >= asked:
        raise StepFailed(f"it did not stop before round {asked}:\n{out[-500:]}")


def continued(out: str, asked: int) -> None:
    """The exported adapter answers in transformers."""
    all_rounds(out, asked)
    if not re.search(r"^rev abc=.", out, re.MULTILINE):
        raise StepFailed(f"transformers says nothing with the adapter:\n{out[-500:]}")


def measured(out: str, asked: int) -> None:
    """It ends with what an evaluation found."""
    if not re.search(r"mean=\d", out):
        raise StepFailed(f"no mean was printed:\n{out[-500:]}")


PROMISES: dict[str, Callable[[str, int], None]] = {
    "own_task": learnt,
    "watched": stopped_early,
    "notebook": continued,
    "without_answers": measured,
}
"""What else an example says than that it trains for its rounds."""


if __name__ == "__main__":
    sys.exit(main())
