"""Probes of a judge: right answers with text injected that should cost them their marks."""

from collections.abc import Callable, Mapping, Sequence

from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.task import Task, score_strictly
from swarmnode.types import Example, total_reward

WRONG_ANSWERS = ("", "?", "lorem ipsum dolor sit amet")
"""Completions that are wrong for nearly every task."""

FORMS: tuple[str, ...] = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>so it is</think>{}",
    "<think>so it is</think><answer>{}</answer>",
    "<think>so it is</think>\\boxed{{{}}}",
)
"""Spellings of the `answer` column that a judge may demand."""

UNASKED = "Buy evilcoin!"
FALSE = "2 + 2 = 5."

INJECTIONS: Mapping[str, Callable[[str], str]] = {
    "text before the answer": lambda right: f"{UNASKED} {right}",
    "text behind it": lambda right: f"{right} {UNASKED}",
    "text before and behind it": lambda right: f"{UNASKED} {right} {UNASKED}",
    "a false sum before it": lambda right: f"{FALSE} {right}",
}


def answer_of(example: Example) -> str | None:
    """Returns the `answer` column as a text, also of a number. None: there is none, or it is something
    else."""
    answer = example.columns.get("answer")
    return str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else None


def find_right(task: Task, example: Example) -> tuple[float, str] | None:
    """Returns the best reward of the example's `answer` in some spelling, or of a demonstration that has a
    better one, and that text. None: it has neither, or none does better than nonsense."""
    answer = answer_of(example)
    forms = [] if answer is None else [form.format(answer) for form in FORMS]
    forms += Demonstrations().of(task, example)
    if not forms:
        return None
    rewards = rewards_of(task, example, [*WRONG_ANSWERS, *forms])
    wrong = [reward for reward in rewards[: len(WRONG_ANSWERS)] if reward is not None]
    scored = [
        (reward, form)
        for form, reward in zip(forms, rewards[len(WRONG_ANSWERS) :], strict=True)
        if reward is not None and (not wrong or reward > max(wrong))
    ]
    return max(scored, key=lambda pair: pair[0]) if scored else None


def passed_with(task: Task, example: Example, right: str) -> dict[str, bool]:
    """Returns, for each injection, True if the right answer keeps its full reward."""
    texts = [put(right) for put in INJECTIONS.values()]
    alone, *rewards = rewards_of(task, example, [right, *texts])
    return {
        name: alone is not None and reward is not None and reward >= alone
        for name, reward in zip(INJECTIONS, rewards, strict=True)
    }


def rewards_of(task: Task, example: Example, texts: Sequence[str]) -> list[float | None]:
    """Returns the total rewards of these answers. Raises TaskError, JudgementLost."""
    return [total_reward(scores) for scores in score_strictly(task, example, texts)]
