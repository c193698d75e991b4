"""What the settings say of data sets stands in their names, so that it is found again with a checkpoint."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from swarmnode.errors import TaskError
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.loader import spec_of


def test_settings_are_those_of_every_data_set_that_does_not_say_otherwise() -> None:
    config = TasksConfig(
        names=("rev", "a.jsonl", "b.csv?answer=gold", "./mine.py"),
        reward=("numeric_match",),
        answer_column="solution",
    )
    assert specs_of(config) == (
        "rev",
        "a.jsonl?reward=numeric_match&answer=solution",
        "b.csv?reward=numeric_match&answer=gold",
        "./mine.py",
    )
    assert specs_of(TasksConfig()) == ("builtin",)


def test_settings_about_data_sets_need_one() -> None:
    with pytest.raises(TaskError, match=r"tasks\.answer_column is about data sets"):
        specs_of(TasksConfig(names=("rev",), answer_column="solution"))


def test_a_checkpoint_knows_what_to_load_again(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "gold": "2"}\n')
    with ExitStack() as stack:
        (task,) = start_tasks(stack, TasksConfig(names=(str(path),), answer_column="gold")).values()
        assert spec_of(task) == f"{path}?answer=gold"
