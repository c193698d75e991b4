"""What stands in examples/ runs, in a home of its own, and stays short. To its end: `make examples-check`."""

import ast
import os
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import swarmnode
from swarmnode.api import GivenTask, rewards_of, tasks_of
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.kinds.script_objects import RewardSpec
from swarmnode.tasks.task import draw_train, score_strictly
from swarmnode.types import total_reward
from tests.test_readme import task_of_the_readme
from tests.warm_start import WarmStart

FOLDER = Path(__file__).parent.parent / "examples"
MOST_LINES = 20
"""What a user has to write: lines of code, without docstrings, comments and empty ones."""

QUICKLY = {"SWARMNODE_TASKS__EVAL_EXAMPLES": "4", "SWARMNODE_NETWORK__MDNS": "false"}


def lines_of_code(source: str) -> int:
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docs = {node.lineno for node in texts if isinstance(node.value, ast.Constant)}
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in docs for number, line in lines)


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    assert lines_of_code('"""Doc."""\n\n# why\nx = 1  # so\n') == 1


TRAINED = {
    "environment": r"rounds=2, tokens=[1-9].*reward_last=[01]\.\d",
    "notebook": r"rounds=2, tokens=[1-9](.|\n)*^rev abc=.",
    "own_task": r"^[01]\.\d+ ",
    "refine": r"rounds=2, tokens=[1-9].*reward_last=[01]\.\d",
    "watched": r"^1 [01]\.\d+ 0\n2 [01]\.\d+ 0\n.*rounds=2, tokens=[1-9]",
}
"""Examples that are about the node, or that it plays, and what two rounds of them print. The others are about
tasks: those are drawn and judged as a node has them, and only the training is left out."""

TASKS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in TRAINED)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_the_task_of_an_example_is_drawn_and_judged_and_it_is_short(
    path: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = path.read_text()
    assert lines_of_code(source) <= MOST_LINES
    for package in re.findall(
        r"^(?:from|import) (\w+)|\b(trl)\.rewards|\"(reasoning)-gym:", source, re.MULTILINE
    ):
        name = "reasoning_gym" if package[2] else package[0] or package[1]
        pytest.importorskip(name, reason=f"{name} is not installed")
    here = tmp_path / path.name
    here.write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    told: list[float | None] = []
    renderer = Renderer(AutoTokenizer.from_pretrained(tiny_model))

    def judged(task: GivenTask, reward: Sequence[RewardSpec] | RewardSpec = (), **options: Any) -> None:
        options.pop("samples", None)
        node = swarmnode.Node(task, reward, **{"model": "tiny", "home": tmp_path / "home", **options})
        with ExitStack() as stack:
            tasks = tasks_of(stack, task, rewards_of(reward), node.config)
            for one in (tasks or start_tasks(stack, node.config.tasks)).values():
                asked = list(islice(draw_train(one, 0), 32))
                longest = max(len(renderer.prompt_ids(example.prompt)) for example in asked)
                assert longest <= node.config.rollout.max_prompt_tokens
                example = asked[0]
                answer = str(example.columns.get("answer", "1"))
                texts = [answer, f"so \\boxed{{{answer}}}", answer, "?", *map(str, range(50))]
                told.extend(map(total_reward, score_strictly(one, example, texts)))

    monkeypatch.setattr(swarmnode, "run", judged, raising=False)
    monkeypatch.setattr(swarmnode, "evaluate", judged, raising=False)
    runpy.run_path(str(here), run_name="__main__")
    assert None not in told
    assert len(set(told)) > 1, "one answer is better than another"


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_an_example_runs_and_is_short(name: str, tiny_model: Path, tmp_path: Path, warm: WarmStart) -> None:
    path = FOLDER / f"{name}.py"
    source = path.read_text()
    assert lines_of_code(source) <= MOST_LINES
    models = resolve_paths(tmp_path, {}).models
    models.parent.mkdir(parents=True)
    models.symlink_to(tiny_model.parent)
    quick = tmp_path / path.name
    quick.write_text(re.sub(r"rounds=\d+", "rounds=2", source))
    environment = {**os.environ, **QUICKLY, "SWARMNODE_HOME": str(tmp_path)}
    done = warm.run([str(quick)], tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(TRAINED[name], done.stdout, re.MULTILINE), done.stdout


def test_the_task_of_the_example_is_that_of_the_readme_which_is_learnt() -> None:
    """tests/swarm/test_join.py trains the README's for as many rounds as are promised."""
    _name, code = task_of_the_readme()
    own = (FOLDER / "own_task.py").read_text()

    def tasks_in(source: str) -> list[ast.stmt]:
        return [part for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)]

    assert len(tasks_in(own)) == 2
    assert list(map(ast.unparse, tasks_in(own))) == [
        ast.unparse(part).replace("zip(completions, answer)", "zip(completions, answer, strict=True)")
        for part in tasks_in(code)
    ]
