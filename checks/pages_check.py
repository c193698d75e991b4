"""Runs the shell blocks of the pages as they stand, each page in a folder and a home of its own.

page_commands.py -> [run_pages] -> steps.py, report.py <- examples_check.py

What cannot run here is told with its reason. A `join` without rounds has two.
"""

import json
import re
import sys
from os import environ
from pathlib import Path

from page_commands import ROOT, PageCommand, blocks_of, commands_of, pages
from report import Report
from steps import run, step

from swarmnode.machine.storage import resolve_paths

RUN_S = 600
NOT_HERE = {
    r"^(?!swarmnode )": "sets up, or is another program",
    r"sn1:|/ip4/|0\.0\.0\.0": "another machine",
    r"OWNER/NAME|hf:|--suite": "is downloaded first",
    r"verifiers:|reasoning-gym:": "an extra",
    r"mymodule|mypackage": "code of the reader's own",
    r"^swarmnode (status|pause|resume|finish|stop|logs|peers|report)": "a running node",
    r"^swarmnode (watch|health|swarm invite)": "a running node",
    r"^swarmnode (serve|chat|seed)": "runs until somebody ends it",
    r"^swarmnode (service|export .*--push)": "changes more than a home",
}
"""Why a command is not run, by a pattern in its words."""

QUESTIONS = [
    {"question": f"{a}+{b}=", "answer": str(a + b), "solution": str(a + b)}
    for a in range(9)
    for b in range(9)
]


def why_not(command: PageCommand) -> str:
    """Returns why a command is not run; empty: it is."""
    text = " ".join(command.words)
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, text)), "")


def run_pages(report: Report, folder: Path, model: Path) -> None:
    """Record a step for each page that has a command which runs here."""
    task = re.search(r"```python\n# last\.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    left: dict[str, int] = {}
    for page in pages():
        commands = [command for block in blocks_of(page) for command in commands_of(block)]
        for why in filter(None, map(why_not, commands)):
            left[why] = left.get(why, 0) + 1
        here = [command for command in commands if not why_not(command)]
        if here and task is not None:
            home = folder / page.relative_to(ROOT).as_posix().replace("/", "-")
            step(report, str(page.relative_to(ROOT)), lambda: typed(here, home, model, task[1]))  # noqa: B023
    report.say("not run here: " + ", ".join(f"{count} ({why})" for why, count in left.items()))


def typed(commands: list[PageCommand], home: Path, model: Path, task: str) -> str:
    """Type the commands of one page one after the other. Raises StepFailed."""
    work, models = home / "work", resolve_paths(home, {}).models
    work.mkdir(parents=True)
    models.parent.mkdir(parents=True)
    models.symlink_to(model.parent)
    (work / "last.py").write_text(task)
    (work / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (work / "benchmarks").symlink_to(ROOT / "benchmarks")
    own = environ | {
        "PYTHONPATH": str(ROOT),
        "SWARMNODE_HOME": str(home),
        "SWARMNODE_NETWORK__LISTEN": "127.0.0.1",
        "SWARMNODE_NETWORK__MDNS": "false",
        "SWARMNODE_NODE__ROUNDS": "2",
    }
    for command in commands:
        run([sys.executable, "-m", *command.words], RUN_S, cwd=work, env=own | command.variables)
    return f"{len(commands)} commands"
