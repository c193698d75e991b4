"""Demonstrations are judged once, by whatever judges the task, and teach a policy that is never right."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import swarmnode as sn
from swarmnode.errors import JudgementLost
from swarmnode.node.demonstrating import MOST_LOST, Demonstrating
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.task import Task, draw_train, is_held_out
from swarmnode.types import Example, RolloutGroup

ROWS = [(f"{number}+1=", str(number + 1)) for number in range(40)]
TASK = as_task(ROWS)


class Bytes:
    """One token a character, and an end."""

    def encode_completion(self, text: str, finish: str) -> tuple[int, ...]:
        return (*text.encode(), 256)


def showing(given: object, task: Task = TASK, max_tokens: int = 8) -> Demonstrating:
    demonstrations = Demonstrations(given)  # type: ignore[arg-type]
    return Demonstrating(demonstrations, {task.name: task}, Bytes(), max_tokens)  # type: ignore[arg-type]


def answered(example: Example) -> RolloutGroup:
    return RolloutGroup(example, (), (), "me", 0)


def right(example: Example) -> str:
    return example.columns["answer"]


def test_an_example_is_shown_once_judged_and_encoded() -> None:
    example, one = next(draw_train(TASK, 0)), showing(right)
    (group,) = one.judge_new([answered(example)], 0)
    assert group.rewards == (1.0,) and group.completions[0].finish == "stop"
    assert group.completions[0].token_ids == (*right(example).encode(), 256)
    assert one.judge_new([answered(example)], 1) == []


def test_rows_are_shown_in_the_first_round() -> None:
    prompt, answer = next(row for row in ROWS if not is_held_out(row[0]))
    one = showing([{"prompt": prompt, "answer": answer, "demonstration": [answer, "no"]}])
    (group,) = one.judge_new([], 0)
    assert group.rewards == (1.0, 0.0)
    assert one.judge_new([], 1) == []


def compares(task: Task) -> Task:
    return as_task(ROWS, ["majority_vote"])


@pytest.mark.parametrize(
    ("given", "task", "said"),
    [
        (lambda one: "x" * 20, TASK, "more than rollout.max_tokens=8"),
        (right, compares(TASK), "needs more than a text"),
    ],
)
def test_what_cannot_be_used_is_told_once(
    given: Callable[[Example], str], task: Task, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = showing(given, task)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert one.judge_new([answered(next(draw_train(task, seed)))], seed) == []
    assert [said in record.message for record in caplog.records] == [True]


class LosesJudgements:
    """A task whose process dies under so many of its judgements."""

    name, version = TASK.name, TASK.version
    lost = 0

    def __init__(self, losses: int) -> None:
        self.losses = losses

    def examples(self, seed: int) -> Iterable[Example]:
        return TASK.examples(seed)

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        if self.lost < self.losses:
            self.lost += 1
            raise JudgementLost("the process ended")
        return TASK.score(example, completions)


def test_a_judgement_that_was_lost_is_asked_for_again_and_not_for_ever() -> None:
    prompt, answer = next(row for row in ROWS if not is_held_out(row[0]))
    rows = [{"prompt": prompt, "answer": answer, "demonstration": answer}]
    one = showing(rows, LosesJudgements(2))
    found = [one.judge_new([], version) for version in range(4)]
    assert [[group.rewards for group in groups] for groups in found] == [[], [], [(1.0,)], []]
    dies = LosesJudgements(10 * MOST_LOST)
    one = showing(rows, dies)
    assert not any(one.judge_new([], version) for version in range(2 * MOST_LOST))
    assert dies.lost == MOST_LOST + 1


WORD = """
def examples(seed):
    for number in range(1000):
        yield f"say {seed % 1000} {number}=", "zq"

def reward(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
"""
SMALL = {
    "exchange.enabled": False,
    "rollout.groups": 8,
    "rollout.max_tokens": 4,
    "node.eval_every": 0,
    "tasks.eval_examples": 16,
}


def test_a_policy_that_is_never_right_alone_learns_a_task_file_from_two_demonstrations(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "word.py"
    file.write_text(WORD)
    prompts = [prompt for number in range(20) if not is_held_out(prompt := f"say it {number}=")]
    rows = [{"prompt": prompt, "answer": "zq", "demonstration": "zq"} for prompt in prompts[:2]]

    def trained(name: str, shown: list[dict[str, str]]) -> float | None:
        home = tmp_path / name
        done = sn.run(
            file, demonstrations=shown, model=tiny_model, rounds=24, home=home, preset="tiny", settings=SMALL
        )
        return done.reward_last

    assert trained("alone", []) == 0.0
    assert (trained("shown", rows) or 0.0) > 0.5
