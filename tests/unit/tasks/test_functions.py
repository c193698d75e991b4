"""Objects of a script as tasks: what they are called, when two nodes mean the same, what is refused."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from swarmnode.errors import TaskError
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.functions import as_task, rewarded
from swarmnode.tasks.rewards import named_rewards
from swarmnode.tasks.task import is_exchangeable, is_held_out, redraw, score_strictly
from swarmnode.types import Example, ExampleKey

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
    assert as_task([{"prompt": "?", "n": 1}]).version == as_task([{"n": 1, "prompt": "?"}]).version


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
    with pytest.raises(TaskError, match="no reward"):
        named_rewards([3])  # type: ignore[list-item]
    with pytest.raises(TaskError, match="two rewards"):
        named_rewards([is_short, is_short])
    assert list(named_rewards([lambda completions: [], lambda completions: []])) == ["reward_0", "reward_1"]
