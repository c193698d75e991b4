"""Tasks of reasoning-gym: drawn alike on every node, judged by the data set itself."""

from itertools import islice

import pytest

from swarmnode.errors import TaskError
from swarmnode.extensions.environments.gym_task import gym_seed
from swarmnode.machine.installing import how_to_install
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.drawing.example_stream import draw_round
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import IsolatedTask, isolate
from swarmnode.tasks.task import redraw


@pytest.fixture
def gym() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")


def test_a_data_set_is_a_task_with_its_own_judge(gym: None) -> None:
    task = load_task("reasoning-gym:basic_arithmetic")
    example = next(iter(task.examples(0)))
    answer = example.columns["answer"]
    assert task.name == "basic_arithmetic"
    assert task.score(example, [answer, f"<think>?</think><answer> {answer} </answer>", "no"]) == [
        {"score_answer": 1.0},
        {"score_answer": 1.0},
        {"score_answer": 0.0},
    ]


def test_two_nodes_draw_the_same(gym: None) -> None:
    here = load_task("reasoning-gym:leg_counting")
    there = isolate("reasoning-gym:leg_counting", timeout_s=60.0, random_hashes=True)
    assert isinstance(there, IsolatedTask)
    with there:
        assert there.version == here.version
        for example in draw_round([here], 1, 2, 3):
            again = redraw(there, example.key)
            assert again.prompt == example.prompt
            assert there.score(again, [example.columns["answer"]]) == [{"score_answer": 1.0}]


def test_a_data_set_that_draws_from_the_order_of_a_set_draws_alike_in_all_processes(gym: None) -> None:
    versions: set[str] = set()
    for random_hashes in (False, True):
        task = isolate("reasoning-gym:ransom_note", timeout_s=60.0, random_hashes=random_hashes)
        assert isinstance(task, IsolatedTask)
        with task:
            versions.add(task.version)
    assert len(versions) == 1


def test_seeds_that_follow_each_other_ask_other_questions(gym: None) -> None:
    task = load_task("reasoning-gym:chain_sum")
    first, second = ({e.prompt for e in islice(task.examples(seed), 50)} for seed in (1, 2))
    assert not first & second
    assert abs(gym_seed("a", 1) - gym_seed("a", 2)) > 4096


def test_parameters_are_in_the_name_and_make_another_version(gym: None) -> None:
    plain = load_task("reasoning-gym:chain_sum")
    long = load_task("reasoning-gym:chain_sum?min_terms=6&max_terms=6")
    assert long.version != plain.version
    assert (
        next(iter(long.examples(0))).prompt.count("+") + next(iter(long.examples(0))).prompt.count("-") >= 5
    )


def test_a_level_of_its_curriculum_may_be_named(gym: None) -> None:
    easy, hard = (load_task(f"reasoning-gym:chain_sum?level={level}") for level in (0, 3))
    longest = [max(len(e.prompt) for e in islice(task.examples(0), 30)) for task in (easy, hard)]
    assert longest[0] < longest[1]
    assert easy.version != hard.version
    with pytest.raises(TaskError, match="level must be a number from 0"):
        load_task("reasoning-gym:chain_sum?level=-1")


def test_a_system_prompt_comes_before_the_question(gym: None) -> None:
    example = next(iter(load_task("reasoning-gym:chain_sum?system=Be%20brief.").examples(0)))
    assert example.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("chain_summ", "no data set 'chain_summ'"),
        ("chain_sum?max_termss=4", "does not take"),
        ("chain_sum?min_terms=6&max_terms=2", "does not take"),
        ("chain_sum?seed=4", "seed is set by the node"),
    ],
)
def test_what_it_does_not_have_is_said_with_what_it_has(gym: None, spec: str, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        load_task(f"reasoning-gym:{spec}")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(TaskError, match="needs reasoning_gym, which is not installed") as caught:
        load_task("reasoning-gym:chain_sum")
    assert caught.value.hint == how_to_install("tasks")


def test_settings_give_it_the_system_prompt_and_nothing_else_of_data_sets() -> None:
    names = ("reasoning-gym:chain_sum?max_terms=3",)
    (spec,) = specs_of(TasksConfig(names=names, system_prompt="Be brief."))
    assert spec == "reasoning-gym:chain_sum?system=Be%20brief.&max_terms=3"
    with pytest.raises(TaskError, match=r"tasks\.reward applies to data sets"):
        specs_of(TasksConfig(names=names, reward=("exact_match",)))
