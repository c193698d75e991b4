"""Demonstrations by column, function, mapping and row; none is of what a policy is measured on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.kinds.data import load_data
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.specs import parse_spec
from swarmnode.tasks.task import DEMONSTRATED_SEED, draw_train, is_held_out
from swarmnode.types import Example, ExampleKey

TASK = as_task([(f"{number}+1=", str(number + 1)) for number in range(40)])
TRAINED = [f"{number}+1=" for number in range(40) if not is_held_out(f"{number}+1=")]
HELD_OUT = [f"{number}+1=" for number in range(40) if is_held_out(f"{number}+1=")]


def example(prompt: str, **columns: Any) -> Example:
    return Example(ExampleKey(TASK.name, TASK.version, 0, 0), prompt, columns)


def test_a_column_of_a_data_file_is_a_demonstration(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    row = '{{"question": "{0}+1=", "answer": "{0}", "demonstration": ["so {0}", "{0}"]}}\n'
    file.write_text("".join(row.format(number) for number in range(20)))
    task = load_data(parse_spec(str(file)))
    drawn = next(draw_train(task, 0))
    answer = drawn.columns["answer"]
    assert Demonstrations().of(task, drawn) == (f"so {answer}", answer)
    assert "so " not in drawn.prompt


@pytest.mark.parametrize("given", [lambda one: one.columns.get("answer"), {"2+1=": "3"}])
def test_a_function_or_a_mapping_says_it_too(given: Any) -> None:
    assert Demonstrations(given).of(TASK, example("2+1=", answer="3")) == ("3",)
    assert Demonstrations(given).of(TASK, example("9+1=")) == ()


def test_a_function_that_fails_is_an_error_that_says_what_it_gets() -> None:
    with pytest.raises(TaskError, match=r"on '2\+1=': TypeError.*not subscriptable") as raised:
        Demonstrations(lambda one: one["prompt"]).of(TASK, example("2+1="))  # type: ignore[index]
    assert (
        "an Example: example.prompt" in raised.value.hint
        and "test_demonstrations.py line" in raised.value.hint
    )


def test_a_task_may_bring_its_own() -> None:
    class Shown:
        name, version = "shown", "1"
        demonstrations: Mapping[str, str] = {"2+1=": "3"}

        def examples(self, seed: int) -> Iterator[Example]:
            yield example("2+1=")

        def score(self, one: Example, completions: Any) -> list[Any]:
            return [{"right": 1.0} for _ in completions]

    assert Demonstrations().of(Shown(), example("2+1=")) == ("3",)
    judged_otherwise = as_task(Shown(), ["exact_match"])
    assert Demonstrations().of(judged_otherwise, example("2+1=")) == ("3",)
    assert Demonstrations().of(as_task(TASK, ["exact_match"]), example("2+1=")) == ()


def test_rows_are_examples_that_no_peer_can_name_and_none_is_held_out() -> None:
    rows = [{"prompt": prompt, "answer": "1", "demonstration": "1"} for prompt in (TRAINED[0], HELD_OUT[0])]
    (one,) = Demonstrations(rows).rows(TASK)
    assert (one.prompt, one.key.seed) == (TRAINED[0], DEMONSTRATED_SEED)


def test_nothing_of_an_evaluation_set_of_its_own_is_demonstrated() -> None:
    task = as_task([("1+1=", "2"), ("2+2=", "4")], evaluation=[(TRAINED[0], "1")])
    rows = [{"prompt": prompt, "answer": "1", "demonstration": "1"} for prompt in TRAINED[:2]]
    assert [one.prompt for one in Demonstrations(rows).rows(task)] == [TRAINED[1]]


def test_what_is_no_demonstration_is_said_with_its_prompt() -> None:
    with pytest.raises(TaskError, match="of '2\\+1='"):
        Demonstrations().of(TASK, example("2+1=", demonstration=3))
    with pytest.raises(TaskError, match="has no column 'demonstration'"):
        list(Demonstrations([{"prompt": TRAINED[0]}]).rows(TASK))
    with pytest.raises(TaskError, match="invalid demonstrations: 3"):
        list(Demonstrations(3).rows(TASK))  # type: ignore[arg-type]
