"""Majority vote: what most of a group say is right, and how that is measured without praising itself."""

import json
from pathlib import Path

import pytest

from swarmnode.chat import Turn
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.judging.conventions import adapted
from swarmnode.tasks.judging.plain_rewards import final_answer
from swarmnode.tasks.judging.rewards import builtin_rewards, call_reward, load_reward
from swarmnode.tasks.judging.votes import extracted, majority_at_k
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes.isolated_task import isolate
from swarmnode.tasks.task import Isolated, Task, draw_held_out, draw_train, is_exchangeable, judges_groups

VOTE = load_reward("majority_vote")


def totals(task: Task, texts: list[str], *, held_out: bool) -> list[dict[str, float | None]]:
    draw = draw_held_out if held_out else draw_train
    return [dict(scores) for scores in task.score(next(iter(draw(task, 0))), texts)]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(40)))
    return f"{path}?reward=majority_vote"


def test_what_most_say_is_right_however_they_write_it() -> None:
    said = [r"so \boxed{\frac{1}{2}}", "#### 0.5", "<answer>1/2</answer>", "2", ""]
    assert call_reward(VOTE, ["?"] * 5, said) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert "majority_vote" in builtin_rewards()


def test_a_tie_is_no_majority_and_nobody_has_a_reward() -> None:
    for said in (["a", "b"], ["a", "a", "b", "b", "c"], ["", ""]):
        assert call_reward(VOTE, ["?"] * len(said), said) == [None] * len(said)


def test_long_texts_and_empty_ones_have_no_vote() -> None:
    assert [extracted(text) for text in ("", " ", "x" * 2000, "<answer></answer>")] == [None] * 4


def test_a_data_set_without_answers_trains_on_the_vote_and_is_measured_by_that_of_the_others(
    questions: str,
) -> None:
    task = load_task(questions)
    assert totals(task, ["a", "a", "b"], held_out=False) == [{"majority_vote": r} for r in (1.0, 1.0, 0.0)]
    assert totals(task, ["a", "a", "a", "b"], held_out=True) == [
        {"agreement": r} for r in (1.0, 1.0, 1.0, 0.0)
    ]
    # One answer alone agrees with itself, which says nothing.
    assert totals(task, ["a"], held_out=True) == [{"agreement": None}]


def test_where_there_are_true_answers_held_out_questions_are_measured_by_them() -> None:
    rev = next(task for task in BUILTIN_TASKS if task.name == "rev")
    task = as_task(rev, ["majority_vote"])
    right = str(next(iter(draw_held_out(task, 0))).columns["answer"])
    assert totals(task, ["?!", "?!", right], held_out=True) == [{"correct": r} for r in (0.0, 0.0, 1.0)]
    assert totals(task, ["?!", "?!", right], held_out=False) == [
        {"majority_vote": r} for r in (1.0, 1.0, 0.0)
    ]


def test_a_vote_over_parts_is_another_vote_so_such_a_task_stays_at_home(questions: str) -> None:
    with isolate(questions, 30.0) as task:  # type: ignore[attr-defined]
        assert isinstance(task, Isolated) and judges_groups(task) and not is_exchangeable(task)
    plain = as_task(BUILTIN_TASKS[0], ["exact_match"])
    assert is_exchangeable(plain) and not judges_groups(plain)


def test_any_function_may_say_that_it_compares_answers() -> None:
    def distinct(completions: list[str], **columns: object) -> list[float]:
        return [float(completions.count(text) == 1) for text in completions]

    assert not judges_groups(as_task([("?", "!")], [distinct]))
    distinct.__dict__["of_group"] = True
    assert judges_groups(as_task([("?", "!")], [distinct]))


def test_maj_at_k_takes_what_most_of_k_say_and_shares_ties() -> None:
    texts, right = ["4", "4", "5", "4", "5", "5"], [True, True, False, True, False, False]
    assert majority_at_k(texts, right, 1) == majority_at_k(texts, right, 6) == 0.5
    assert majority_at_k(texts, right, 3) == 0.5  # 4 of the first three, 5 of the others
    assert majority_at_k(texts, right, 8) is None
    assert majority_at_k(["", ""], [False, False], 2) == 0.0
    assert majority_at_k(["4"], [None], 1) is None


def calculator(final: str, first: str = "") -> tuple[Turn, ...]:
    call = '{"name": "add", "arguments": {"left": 2, "right": 2}}'
    return Turn(first or call, ({"role": "tool", "content": "7"},)), Turn(final)


def add(left: int, right: int) -> int:
    """Adds."""
    return left + right


def test_of_a_conversation_the_last_turn_votes_whatever_was_said_before_it() -> None:
    rows = [{"prompt": f"{n} + {n}?"} for n in range(40)]
    task = as_task(rows, ["majority_vote"], tools=[add])
    votes = [1.0, 1.0, 1.0, 0.0]
    for firsts in (["", "", "", ""], ["a", "b", "c", "d"]):
        said = [calculator(final, first) for final, first in zip("4445", firsts, strict=True)]
        assert totals(task, said, held_out=False) == [{"majority_vote": vote} for vote in votes]
        assert totals(task, said, held_out=True) == [{"agreement": vote} for vote in votes]


CONVERSATION = [
    {"role": "assistant", "content": "1", "tool_calls": []},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4"},
]


@pytest.mark.parametrize("heard_last", [True, False])
@pytest.mark.parametrize("calls", [True, False])
def test_every_reward_of_ours_reads_what_the_policy_said_last(heard_last: bool, calls: bool) -> None:
    said = CONVERSATION if heard_last else CONVERSATION[:-1]
    if calls:
        said = [CONVERSATION[0], {**said[2], "content": None, "tool_calls": []}, *said[1:]]
    assert final_answer(said) == final_answer("3") == "3"
    for name, right in (("exact_match", "3"), ("numeric_match", "3.0")):
        assert load_reward(name)(["?"], [said], answer=[right]) == [1.0]

    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    assert adapted(compute_score)(["?"], [said], answer=["3"]) == [1.0]
