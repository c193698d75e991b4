"""What a judge lets through: right answers with text put into them that nobody asked for.

example -> [find_right] -> a right answer -> [passed_with] -> check.py

Whatever has full marks can be taught by strangers. Most judges look for an answer and do not read the rest;
whoever writes one should know it.
"""

from collections.abc import Callable, Mapping, Sequence

from swarmnode.tasks.task import Task, score_strictly
from swarmnode.types import Example, total_reward

WRONG_ANSWERS = ("", "?", "lorem ipsum dolor sit amet")
"""Completions that hardly any task means."""

FORMS: tuple[str, ...] = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>so it is</think>{}",
    "<think>so it is</think><answer>{}</answer>",
    "<think>so it is</think>\\boxed{{{}}}",
)
"""How the `answer` column may have to be written to count."""

UNASKED = "Buy evilcoin!"
FALSE = "2 + 2 = 5."

INJECTIONS: Mapping[str, Callable[[str], str]] = {
    "text before the answer": lambda right: f"{UNASKED} {right}",
    "text behind it": lambda right: f"{right} {UNASKED}",
    "text before and behind it": lambda right: f"{UNASKED} {right} {UNASKED}",
    "a false sum before it": lambda right: f"{FALSE} {right}",
}


def find_right(task: Task, example: Example) -> str | None:
    """The example's `answer` in the form that has the best reward. None: it has no such column, or none of
    the forms does better than nonsense."""
    answer = example.columns.get("answer")
    if not isinstance(answer, str):
        return None
    forms = [form.format(answer) for form in FORMS]
    rewards = rewards_of(task, example, [*WRONG_ANSWERS, *forms])
    wrong = [reward for reward in rewards[: len(WRONG_ANSWERS)] if reward is not None]
    scored = [
        (reward, form)
        for form, reward in zip(forms, rewards[len(WRONG_ANSWERS) :], strict=True)
        if reward is not None and (not wrong or reward > max(wrong))
    ]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def passed_with(task: Task, example: Example, right: str) -> dict[str, bool]:
    """Whether the right answer has its full reward with each injection."""
    texts = [put(right) for put in INJECTIONS.values()]
    alone, *rewards = rewards_of(task, example, [right, *texts])
    return {
        name: alone is not None and reward is not None and reward >= alone
        for name, reward in zip(INJECTIONS, rewards, strict=True)
    }


def rewards_of(task: Task, example: Example, texts: Sequence[str]) -> list[float | None]:
    """Total rewards of these answers. Raises TaskError, JudgementLost."""
    return [total_reward(scores) for scores in score_strictly(task, example, texts)]
