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
        names=("rev", "a.jsonl", "b.csv?system=Hm.&answer=gold", "./mine.py"),
        reward=("numeric_match",),
        system_prompt="Be brief.",
    )
    assert specs_of(config) == (
        "rev",
        "a.jsonl?reward=numeric_match&system=Be%20brief.",
        "b.csv?reward=numeric_match&system=Hm.&answer=gold",
        "./mine.py",
    )
    assert specs_of(TasksConfig()) == ("builtin",)


def test_settings_about_data_sets_need_one() -> None:
    with pytest.raises(TaskError, match=r"tasks\.system_prompt applies to data sets"):
        specs_of(TasksConfig(names=("rev",), system_prompt="Be brief."))


def test_a_checkpoint_knows_what_to_load_again(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "gold": "2"}\n')
    with ExitStack() as stack:
        config = TasksConfig(names=(f"{path}?answer=gold",), system_prompt="Hm.")
        (task,) = start_tasks(stack, config).values()
        assert spec_of(task) == f"{path}?system=Hm.&answer=gold"


def test_a_reward_is_found_again_from_another_folder_and_is_the_same_task_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: set[str] = set()
    config = TasksConfig(names=("q.jsonl",), reward=("rw.py:f",))
    for machine in ("one", "other"):
        folder = tmp_path / machine
        folder.mkdir()
        (folder / "q.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
        (folder / "rw.py").write_text("def f(completions, **_):\n    return [1.0 for _ in completions]\n")
        monkeypatch.chdir(folder)
        with ExitStack() as stack:
            (task,) = start_tasks(stack, config).values()
        monkeypatch.chdir(tmp_path)
        with ExitStack() as stack:
            (again,) = start_tasks(stack, TasksConfig(names=(str(spec_of(task)),))).values()
            assert spec_of(again) == spec_of(task) == f"{folder}/q.jsonl?reward={folder}/rw.py:f"
        versions |= {task.version, again.version}
    assert len(versions) == 1
