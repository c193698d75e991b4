"""Settings of tasks reach the processes that their code runs in."""

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from swarmnode.chat import Turn
from swarmnode.errors import TaskError
from swarmnode.extensions.workbench.task_description import descriptions_of
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.task_processes import start_tasks, tasks_for_strangers
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.judging.own_judge import OwnJudge
from swarmnode.tasks.processes.worker import NICENESS
from swarmnode.tasks.task import Isolated

TASK = """
from swarmnode.tasks.processes.unconfined import is_unconfined_allowed

def examples(seed):
    yield {"prompt": "?"}

def reward(completions, **columns):
    return [float(is_unconfined_allowed()) for _ in completions]
"""


@pytest.mark.parametrize(("said", "allowed"), [("required", 0.0), ("optional", 1.0)])
def test_programs_do_without_a_sandbox_only_where_somebody_said_so(
    tmp_path: Path, said: Literal["required", "optional"], allowed: float
) -> None:
    path = tmp_path / "asking.py"
    path.write_text(TASK)
    with ExitStack() as stack:
        own = start_tasks(stack, TasksConfig(names=(str(path),), sandbox=said))
        for (task,) in (own.values(), tasks_for_strangers(stack, own).values()):
            example = next(iter(task.examples(1)))
            assert task.score(example, ["!"]) == [{"reward": allowed}]


def test_what_a_task_keeps_lies_in_the_home_of_the_node(tmp_path: Path) -> None:
    path = tmp_path / "where.py"
    path.write_text(
        "from swarmnode.machine.storage import resolve_paths\n"
        "def examples(seed):\n    yield str(resolve_paths().cache), ''\n"
    )
    home = resolve_paths(tmp_path / "home")
    with ExitStack() as stack:
        own = start_tasks(stack, TasksConfig(names=(str(path),)), home.home)
        for (task,) in (own.values(), tasks_for_strangers(stack, own).values()):
            assert next(iter(task.examples(1))).prompt == str(home.cache)


def test_the_tasks_before_one_that_cannot_be_loaded_leave_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(TASK)
    (tmp_path / "bad.py").write_text("raise ValueError('no')\n")
    names = tuple(str(tmp_path / name) for name in ("good.py", "bad.py"))
    before = psutil.Process().children()
    for load in (
        lambda: start_tasks(stack, TasksConfig(names=names)),
        lambda: descriptions_of(TasksConfig(names=names)),
    ):
        with pytest.raises(TaskError, match=r"bad\.py cannot be loaded"), ExitStack() as stack:
            load()
        assert psutil.Process().children() == before


LIMITED = """
import resource

def examples(seed):
    yield {"prompt": "?"}

def reward(completions, **columns):
    return [resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**20 for _ in completions]
"""


def test_as_many_processes_as_are_set_have_the_memory_that_is_set(tmp_path: Path) -> None:
    path = tmp_path / "limited.py"
    path.write_text(LIMITED)
    with ExitStack() as stack:
        own = start_tasks(stack, TasksConfig(names=(str(path),), workers=3, memory_mb=512))
        theirs = tasks_for_strangers(stack, own)
        for task, workers in ((own["limited"], 3), (theirs["limited"], 1)):
            assert isinstance(task, Isolated)
            assert task.workers == OwnJudge({task.name: task}, 1.0).width == workers
            example = next(iter(task.examples(1)))
            assert task.score(example, ["!"]) == [{"reward": 512.0}]


STRANGERS = """
import os, resource
exchangeable = True
alive = 0

class Game:
    def reset(self):
        global alive
        alive += 1
        return "Play."

    def step(self, said):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        bounded = limit != resource.RLIM_INFINITY
        return f"{alive} {os.getpriority(os.PRIO_PROCESS, 0)} {bounded}", 0.0, False, {}

    def close(self):
        global alive
        alive -= 1

environment = Game
"""


def test_strangers_episodes_are_played_in_a_process_that_yields_and_keeps_those_of_one_example(
    tmp_path: Path,
) -> None:
    path = tmp_path / "game.py"
    path.write_text(STRANGERS)
    with ExitStack() as stack:
        own = start_tasks(stack, TasksConfig(names=(str(path),), workers=1))
        theirs = tasks_for_strangers(stack, own)

        def said(task: Any) -> list[list[str]]:
            answers = [
                task.observe(example, [Turn(f"{number}")])[0]["content"]
                for example in islice(task.examples(1), 3)
                for number in range(2)
            ]
            return [answer.split() for answer in answers]

        at_home, apart = said(own["game"]), said(theirs["game"])
    assert [alive for alive, _, _ in at_home] == ["1", "2", "3", "4", "5", "6"]
    assert [alive for alive, _, _ in apart] == ["1", "2", "3", "2", "3", "2"]
    assert {(nice, bounded) for _, nice, bounded in apart} == {(str(NICENESS), "True")}
    assert {bounded for _, _, bounded in at_home} == {"False"}
