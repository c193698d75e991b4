"""Groups for tests of the rules: answers as token ids with their rewards, to a numbered example of a task."""

from collections.abc import Mapping, Sequence

from swarmnode.types import Completion, Example, ExampleKey, FinishReason, RolloutGroup, one_span

EOS = 1


def answered(
    answers: Sequence[tuple[Sequence[int], float | None]],
    *,
    index: int = 0,
    task: str = "sum",
    author: str = "me",
    finish: FinishReason = "length",
    seed: int = 0,
) -> RolloutGroup:
    """`answers`: tokens and reward of each, without an end of text; with `finish` "stop" EOS is added."""
    own = author == "me"
    completions: list[Completion] = []
    scores: list[Mapping[str, float | None]] = []
    for tokens, reward in answers:
        ids = (*tokens, EOS) if finish == "stop" else tuple(tokens)
        logprobs = (-1.0,) * len(ids) if own else None
        text = " ".join(map(str, tokens))
        completions.append(Completion(text, ids, logprobs, one_span(0, len(ids)), finish))
        scores.append({"correct": reward})
    example = Example(ExampleKey(task, "1", seed, index), f"{task} {index}=")
    return RolloutGroup(example, tuple(completions), tuple(scores), author, 0)


def own(*answers: tuple[Sequence[int], float | None], index: int = 0, task: str = "sum") -> RolloutGroup:
    """What our own policy answered: it ended each answer itself."""
    return answered(answers, index=index, task=task, finish="stop")


def foreign(
    *answers: tuple[Sequence[int], float | None], index: int = 0, task: str = "sum", author: str = "stranger"
) -> RolloutGroup:
    """What came from a stranger: no log-probabilities, and no end of text."""
    return answered(answers, index=index, task=task, author=author)
