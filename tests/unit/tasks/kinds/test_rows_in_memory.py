"""Rows in whatever people hold them in: the same rows are the same task, and nothing is read without end."""

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.judging.own_judge import OwnJudge
from swarmnode.tasks.kinds import rows_in_memory as sources
from swarmnode.tasks.kinds.script_objects import as_task, measured_rows
from swarmnode.tasks.task import (
    EVALUATION_SEED,
    draw_held_out,
    draw_train,
    holds_out,
    is_held_out,
    redraw,
    score_strictly,
)

ROWS = [{"question": f"{a} + 1 =", "answer": a + 1} for a in range(40)]
OTHERS = [{"question": f"{a} + 2 =", "answer": a + 2} for a in range(7)]


class Frame:
    """A data frame of pandas, as far as anyone looks at it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def iterrows(self) -> Iterator[Any]:
        return iter(enumerate(self._rows))

    def to_dict(self, orient: str = "dict") -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


class PolarsFrame:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_dicts(self) -> list[dict[str, Any]]:
        return self._rows


class Streamed:
    """An IterableDataset: rows, and nobody knows how many."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.mark.parametrize("held", [tuple, iter, Frame, PolarsFrame, Streamed])
def test_the_same_rows_are_the_same_task_whatever_holds_them(held: Callable[[Any], Any]) -> None:
    task, listed = as_task(held(ROWS)), as_task(ROWS)
    assert (task.name, task.version) == (listed.name, listed.version)
    for example in draw_train(task, 3):
        assert redraw(listed, example.key) == example


def test_what_other_libraries_hold_is_the_same_task_too() -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    version = as_task(ROWS).version
    held = datasets.Dataset.from_list(ROWS)
    assert as_task(held).version == as_task(held.to_iterable_dataset()).version == version
    both = datasets.DatasetDict({"train": held, "test": datasets.Dataset.from_list(OTHERS)})
    assert as_task(both).version == as_task(ROWS, evaluation=OTHERS).version


def test_a_data_frame_of_pandas_is_the_same_task_too() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert as_task(pandas.DataFrame(ROWS)).version == as_task(ROWS).version
    frame = pandas.DataFrame([{**ROWS[0], "level": 1.5}, {**ROWS[1]}])
    assert [e.columns["level"] for e in as_task(frame).examples(0)].count(None) == 1


def test_a_stream_without_end_is_read_as_far_as_a_node_can_hold_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "MOST_STREAMED", 30)
    with caplog.at_level(logging.WARNING):
        task = as_task({"prompt": f"{number}?", "answer": number} for number in count())
    assert len(list(task.examples(0))) == 30
    assert "using the first 30" in caplog.text
    caplog.clear()
    as_task(iter(ROWS[:30]))
    assert not caplog.text


@pytest.mark.parametrize("answer", [2, 2.0, "2"])
def test_a_question_with_a_number_for_its_answer_is_asked_and_judged(answer: object) -> None:
    for reward in ([], ["exact_match"], ["numeric_match"], ["boxed_match"], ["strict_numeric_match"]):
        task = as_task([{"question": "1 + 1 =", "answer": answer}], reward)
        (example,) = task.examples(0)
        right = r"\boxed{2}" if reward == ["boxed_match"] else "2"
        scores = score_strictly(task, example, [right, "3"])
        assert [list(named.values()) for named in scores] == [[1.0], [0.0]]
        assert example.prompt == "1 + 1 ="


def test_true_and_false_are_answers_in_either_spelling() -> None:
    task = as_task([{"prompt": "Is 7 prime?", "answer": True}])
    (example,) = task.examples(0)
    assert [named["correct"] for named in score_strictly(task, example, ["True", "true", "False", "1"])] == [
        1.0, 1.0, 0.0, 0.0,
    ]  # fmt: skip


def test_an_evaluation_set_is_measured_whole_and_all_other_rows_train() -> None:
    task = as_task(ROWS, evaluation=[*OTHERS, ROWS[0]])
    assert [example.prompt for example in draw_held_out(task, 0)] == [
        *(row["question"] for row in OTHERS), ROWS[0]["question"],
    ]  # fmt: skip
    trained = list(draw_train(task, 0))
    assert {example.prompt for example in trained} == {row["question"] for row in ROWS[1:]}
    assert any(is_held_out(example.prompt) for example in trained)
    assert all(redraw(task, example.key) == example for example in trained)
    assert all(holds_out(task, example) for example in task.examples(EVALUATION_SEED))
    assert task.version != as_task(ROWS).version != as_task(ROWS, evaluation=OTHERS).version
    (own,) = OwnJudge({"rows": task}, 10).tasks.values()
    assert len(list(draw_held_out(own, 0))) == len(OTHERS) + 1


def test_a_peer_cannot_name_a_question_of_an_evaluation_set() -> None:
    task = as_task(ROWS, evaluation=OTHERS)
    with pytest.raises(TaskError, match="out of bounds"):
        redraw(task, next(iter(draw_held_out(task, 0))).key)


def test_a_function_has_an_evaluation_set_too_and_never_trains_on_it() -> None:
    def sums(seed: int) -> Iterator[dict[str, Any]]:
        yield from ROWS if seed else reversed(ROWS)

    def asks(seed: int) -> Iterator[dict[str, Any]]:
        return ({"prompt": row["question"], "answer": row["answer"]} for row in sums(seed))

    task = as_task(asks, evaluation=OTHERS + ROWS[:3])
    assert len(list(draw_held_out(task, 0))) == len(OTHERS) + 3
    assert {e.prompt for e in draw_train(task, 1)} == {row["question"] for row in ROWS[3:]}
    assert task.version != as_task(asks).version


def test_several_splits_are_rows_to_train_on_and_rows_to_measure_with() -> None:
    splits = {"train": ROWS, "test": OTHERS}
    assert as_task(splits).version == as_task(ROWS, evaluation=OTHERS).version
    assert as_task({"train": ROWS}).version == as_task(ROWS).version
    assert (measured_rows(splits), measured_rows(ROWS)) == (OTHERS, ROWS)
    assert measured_rows(as_task(ROWS)) is None
    with pytest.raises(TaskError, match="no split 'train' among easy, hard"):
        as_task({"easy": ROWS, "hard": OTHERS})


def test_a_policy_is_measured_on_every_row_that_is_passed() -> None:
    task = as_task((), evaluation=ROWS)
    assert len(list(draw_held_out(task, 0))) == len(ROWS)


@pytest.mark.parametrize("given", [b"rows", {"a", "b"}, object(), 3.5])
def test_what_holds_no_rows_in_an_order_is_refused(given: object) -> None:
    with pytest.raises(TaskError, match="not a task"):
        as_task(given)  # type: ignore[arg-type]
