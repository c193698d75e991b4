"""CountDown and Sudoku: any right answer counts, and nothing else does."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.extensions.puzzles.puzzles import COUNTDOWN, SUDOKU, reaches_target, solves
from swarmnode.tasks.loader import load_task, load_tasks, spec_of
from swarmnode.tasks.processes.isolated_task import isolate

PUZZLES = (COUNTDOWN, SUDOKU)

GOLDEN = {
    "countdown": "((38 * 4) - 19)",
    "sudoku": "912785643/758634912/643921758/136592487/529478136/487163529/374216895/261859374/895347261",
}
"""The first answer of seed 0. A change here means a new VERSION: nodes of both kinds would disagree."""


@pytest.mark.parametrize("task", PUZZLES, ids=lambda task: task.name)
def test_the_first_answer_is_the_same_on_every_platform_and_for_ever(task) -> None:
    assert next(task.examples(0)).columns["answer"].replace("\n", "/") == GOLDEN[task.name]


@pytest.mark.parametrize("task", PUZZLES, ids=lambda task: task.name)
def test_the_answer_that_is_known_is_right(task) -> None:
    for example in islice(task.examples(1), 200):
        answer = example.columns["answer"]
        texts = [answer, f"<think>hm</think>\n<answer>\n{answer}\n</answer>", f"so: {answer}", "", "1"]
        assert [named["correct"] for named in task.score(example, texts)] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["countdown", "sudoku"])
def test_they_are_built_in_beside_the_eight(name: str) -> None:
    task = isolate(name, timeout_s=1.0)
    assert spec_of(task) == name
    assert load_task(name).name == name
    assert name not in {task.name for task in load_tasks(["builtin"])}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("(50 - 25) * 4 / 2", True),
        ("4*(50-25)/2", True),
        ("50 * 4 / (2 * 2)", False),
        ("25 + 25", False),
        ("50", False),
        ("50 = 50 * 1", False),
        ("(50 - 25) * 4 / 2 = 50", False),
        ("25 * 4 / 2 - 50", False),
        ("50 - 25 + 4 ** 2", False),
        ("((50 - 25) * 4 / 2", False),
        ("(50 - 25)) * (4 / 2", False),
        ("50 25 4 2", False),
        ("", False),
        ("2 / (25 - 50 / 2) * 4", False),
        ("(" * 5000 + "50", False),
        ("__import__('os')", False),
    ],
)
def test_an_expression_uses_each_number_once_and_reaches_the_target(text: str, right: bool) -> None:
    assert reaches_target(text, {"numbers": [50, 25, 4, 2], "target": 50}) is right


@given(st.text(alphabet="12+-*/() =", max_size=40))
def test_no_text_makes_the_judge_fail(text: str) -> None:
    assert reaches_target(text, {"numbers": [1, 2], "target": 3}) in (True, False)
    assert solves(text, {"puzzle": "." * 81}) is False


def test_another_way_to_fill_a_sudoku_counts_too() -> None:
    example = next(SUDOKU.examples(0))
    answer = example.columns["answer"]
    empty = {"puzzle": "." * 81}
    swapped = answer.translate(str.maketrans("12", "21"))
    assert solves(answer, example.columns)
    assert solves(swapped, empty)
    assert not solves(swapped, example.columns)
    assert not solves(answer[::-1].replace("1", "2"), empty)
    rows = answer.split()
    assert not solves("\n".join([rows[3], *rows[1:3], rows[0], *rows[4:]]), empty), "its boxes are mixed"
