"""Objects of a script as tasks: what they are called, when two nodes mean the same, what is refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import TaskError
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.data_settings import specs_of
from swarmnode.tasks.digests import source_of
from swarmnode.tasks.judging.rewards import named_rewards
from swarmnode.tasks.kinds.rewarded_task import rewarded
from swarmnode.tasks.kinds.script_objects import as_task, refuse_untrained
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.task import is_exchangeable, is_held_out, redraw, score_strictly
from swarmnode.types import Example, ExampleKey, by_reward, total_reward

ROWS = [("1+1=", "2"), ("2+2=", "4"), ("3+3=", "6"), ("4+4=", "8")]


def sums(seed: int) -> Iterator[tuple[str, str]]:
    for number in range(50):
        yield f"{number}+{seed}=", str(number + seed)


def is_short(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(text) < 3) for text in completions]


def test_a_function_is_a_task_of_its_name_judged_by_exact_match() -> None:
    task = as_task(sums)
    first = next(iter(task.examples(3)))
    assert (task.name, first.prompt, first.columns) == ("sums", "0+3=", {"answer": "3"})
    assert score_strictly(task, first, ["3", "4"]) == ({"correct": 1.0}, {"correct": 0.0})


def test_a_function_that_is_called_examples_says_nothing_of_its_task() -> None:
    def examples(seed: int) -> list[str]:
        return ["?"]

    assert as_task(examples).name == "task"


def test_the_version_follows_from_the_source_of_draws_and_rewards() -> None:
    def sums(seed: int) -> Iterator[tuple[str, str]]:
        yield "1+1=", "2"

    assert as_task(sums).version == as_task(sums).version
    assert as_task(sums).version != as_task(globals()["sums"]).version
    assert as_task(sums).version != as_task(sums, [is_short]).version


def test_each_seed_draws_the_rows_in_another_order_and_anyone_can_draw_them_again() -> None:
    task = as_task(ROWS)
    orders = {tuple(example.prompt for example in task.examples(seed)) for seed in range(20)}
    assert len(orders) > 5 and {frozenset(order) for order in orders} == {frozenset(row[0] for row in ROWS)}
    same = as_task([*ROWS])
    for example in same.examples(3):
        with pytest.raises(TaskError, match="held out") if is_held_out(example.prompt) else nullcontext():
            assert redraw(task, example.key) == example


def test_other_rows_are_another_version() -> None:
    assert as_task(ROWS).version != as_task(ROWS[:-1]).version
    row = {"prompt": "?", "answer": 1}
    assert as_task([row]).version == as_task([dict(reversed(row.items()))]).version


def test_other_rewards_take_the_place_of_a_tasks_own_judge() -> None:
    rev = next(task for task in BUILTIN_TASKS if task.name == "rev")
    task = as_task(rev, [is_short, "exact_match"])
    example = next(iter(task.examples(0)))
    assert (task.name, example.key.version) == ("rev", task.version) != ("rev", rev.version)
    assert score_strictly(task, example, ["xyzxyz"]) == ({"is_short": 0.0, "exact_match": 0.0},)
    assert rewarded(rev, named_rewards([is_short])).version != task.version


def test_another_judge_lets_nothing_out_that_is_to_stay_at_home() -> None:
    kept = replace(as_task(ROWS), may_leave=False)  # type: ignore[type-var]
    assert is_exchangeable(as_task(ROWS, [is_short])) and not is_exchangeable(as_task(kept, [is_short]))


def test_a_reward_of_another_trainer_is_one_here_too() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    task = as_task(ROWS, [compute_score])
    example = next(iter(task.examples(0)))
    right = str(example.columns["answer"])
    assert score_strictly(task, example, [right, "?"]) == ({"compute_score": 1.0}, {"compute_score": 0.0})


def test_an_object_that_is_a_task_stays_what_it_is() -> None:
    class One:
        name, version = "one", "1"

        def examples(self, seed: int) -> list[Example]:
            return [Example(ExampleKey(self.name, self.version, seed, 0), "?")]

        def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
            return [{"length": float(len(text))} for text in completions]

    one = One()
    assert as_task(one) is one


@pytest.mark.parametrize(
    "given", [3, None, [], "rev", lambda: ["?"], [object()], [{"prompt": "?", "f": sums}]]
)
def test_what_is_no_task_is_refused(given: object) -> None:
    with pytest.raises(TaskError):
        list(as_task(given).examples(0))  # type: ignore[arg-type]


def test_what_is_no_reward_is_refused_and_so_are_two_of_one_name() -> None:
    with pytest.raises(TaskError, match="not a reward"):
        named_rewards([3])  # type: ignore[list-item]
    with pytest.raises(TaskError, match="two rewards"):
        named_rewards([is_short, is_short])
    assert list(named_rewards([lambda completions: [], lambda completions: []])) == ["reward_0", "reward_1"]


def is_even(completions: Sequence[str], **columns: object) -> list[float | None]:
    return [float(int(text) % 2 == 0) if text.isdecimal() else None for text in completions]


def test_rewards_count_by_their_weights_and_one_that_says_nothing_is_left_out() -> None:
    task = as_task(sums, [is_short, is_even], weights=[0.5, 2])
    scores = score_strictly(task, next(iter(task.examples(3))), ["12", "123", "x"])
    assert [total_reward(named) for named in scores] == [2.5, 0.0, 0.5]
    assert by_reward(scores) == {"is_short": [1.0, 0.0, 1.0], "is_even": [1.0, 0.0]}


def test_a_reward_of_weight_zero_is_measured_and_not_learned_from() -> None:
    task = as_task(sums, [is_short, is_even], weights=[1, 0])
    scores = score_strictly(task, next(iter(task.examples(3))), ["12", "123"])
    assert [total_reward(named) for named in scores] == [1.0, 0.0]
    assert by_reward(scores)["is_even"] == [1.0, 0.0]


def test_who_weighs_otherwise_has_another_task_and_weight_one_is_none() -> None:
    plain = as_task(sums, [is_short, is_even])
    assert as_task(sums, [is_short, is_even], weights=[1, 1.0]).version == plain.version
    swapped = as_task(sums, [is_even, is_short], weights=[2, 0.5])
    versions = {plain.version, as_task(sums, [is_short, is_even], weights=[2, 0.5]).version, swapped.version}
    assert len(versions) == 3
    assert as_task(sums, [is_short, is_even], weights=[0.5, 2]).version == swapped.version, "in any order"


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], ["a", "b"], [1, float("nan")], [1, 1e9], 3])
def test_weights_that_do_not_fit_are_refused(weights: Any) -> None:
    with pytest.raises(TaskError, match="weight"):
        as_task(sums, [is_short, is_even], weights=weights)


def test_a_file_says_how_much_each_of_its_rewards_counts(tmp_path: Path) -> None:
    path = tmp_path / "weighed.py"
    path.write_text(
        "def examples(seed):\n    for n in range(30):\n        yield str(n), str(n)\n"
        "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"
        "def reward_length(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        "reward_weights = [1, 0.25]\n"
    )
    task = load_task(str(path))
    scores = score_strictly(task, next(iter(task.examples(0))), ["abcd"])
    assert scores == ({"reward": 1.0, "length*0.25": 4.0},) and total_reward(scores[0]) == 2.0


def test_a_data_set_takes_its_weights_from_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    config = TasksConfig(names=(str(path),), reward=("exact_match", "numeric_match"), reward_weights=(1, 0.5))
    (spec,) = specs_of(config)
    task = load_task(spec)
    assert list(score_strictly(task, next(iter(task.examples(0))), ["x"])[0]) == [
        "exact_match",
        "numeric_match*0.5",
    ]
    (plain,) = specs_of(config.model_copy(update={"reward_weights": ()}))
    assert load_task(plain).version != task.version
    with pytest.raises(TaskError, match=r"tasks\.reward_weights applies to data sets"):
        specs_of(TasksConfig(names=("rev",), reward_weights=(1.0,)))


class Scaled:
    """A reward with a setting, as people write them."""

    __name__ = "scaled"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[str], **columns: object) -> list[float]:
        return [self.factor * len(text) for text in completions]

    def score(self, completions: list[str], **columns: object) -> list[float]:
        return self(completions)


def scaled(completions: list[str], *factors: float, factor: float = 1.0, **columns: object) -> list[float]:
    return [sum(factors) + factor * len(text) for text in completions]


@pytest.mark.parametrize(
    "judge",
    [Scaled, lambda factor: Scaled(factor).score, lambda factor: partial(scaled, factor=factor)],
    ids=["object", "method", "partial"],
)
def test_what_a_reward_carries_is_part_of_the_version(judge: Callable[[float], Any]) -> None:
    assert source_of(judge(1.0)) == source_of(judge(1.0))
    assert source_of(judge(1.0)) != source_of(judge(-1.0))


def test_every_argument_of_a_partial_counts_where_it_stands() -> None:
    sources = {source_of(partial(scaled, *factors)) for factors in ((1, 2), (2, 1), (1, 2, 1), (1, 2, 2), ())}
    assert len(sources) == 5
    inside = {source_of(partial(partial(scaled, factor=factor), 1)) for factor in (1.0, 2.0)}
    assert len(inside) == 2


def test_rows_that_cannot_train_or_measure_are_told_for_what_they_are() -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    with pytest.raises(TaskError, match="every training row is also in the evaluation set"):
        as_task(rows, evaluation=rows)
    with pytest.raises(TaskError, match="eval_dataset is empty"):
        as_task(rows, evaluation=[])
    with pytest.raises(TaskError, match="no split 'train' among test"):
        refuse_untrained({"test": rows})
    with pytest.raises(TaskError, match="no split 'train' among prompt, answer") as caught:
        refuse_untrained({"prompt": ["1+1="], "answer": ["2"]})
    assert "Dataset.from_dict" in caught.value.hint
    refuse_untrained({"train": rows})
    refuse_untrained(rows)
