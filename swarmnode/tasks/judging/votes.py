r"""Majority vote as a reward: the most frequent answer to a question counts as right."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnode.tasks.judging.answers import hashed, last_boxed, number_of, plain_math, tagged
from swarmnode.tasks.judging.plain_rewards import final_answer

MAX_ANSWER_CHARS = 1000
"""Longest answer in characters: two completions would hardly share a longer one."""


VOTED = "agreement"
"""Name of scores that measure how far answers agree, not whether they are right."""


def extracted(completion: str) -> str | None:
    r"""Returns the answer in a completion, in a normal form: the content of the last box, the number after
    the last ####, the text in the last <answer> tags, or all of it. None: there is no answer, so it has no
    vote.

    >>> extracted(r"so \boxed{\frac12}"), extracted("#### 1,000"), extracted("<answer> ab </answer>")
    ('1/2', '1000', 'ab')
    """
    answer = last_boxed(completion) or hashed(completion) or tagged(completion)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return None
    plain = plain_math(answer)
    number = number_of(plain)
    return str(number) if number is not None else plain or None


def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the most frequent answer. None: there is no answer, or a tie.

    >>> majority(["4", "5", "4", None]), majority(["4", "5"])
    ('4', None)
    """
    first = Counter(answer for answer in answers if answer is not None).most_common(2)
    tie = len(first) == 2 and first[0][1] == first[1][1]
    return None if tie or not first else first[0][0]


class MajorityVote:
    """The reward of majority vote. It needs the whole group, and part of a group would score differently, so
    such rollouts are not exchanged."""

    __name__ = "majority_vote"
    of_group = True

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Returns 1.0 for each answer that equals the majority of its question, else 0.0. None: there is no
        majority."""
        answers = _answers(completions)
        chosen = majority(answers)
        return [None if chosen is None else float(answer == chosen) for answer in answers]

    def measured(self, columns: Mapping[str, Any]) -> tuple[str, Any]:
        """Returns the name and the judge for held-out examples."""
        return ("correct", says_the_answer) if columns.get("answer") is not None else (VOTED, agreement)


majority_vote = MajorityVote()


def says_the_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Returns 1.0 for each completion whose answer equals the `answer` column, both extracted the same way.
    None: nothing can be extracted from that column."""
    right = [extracted(str(one)) for one in answer]
    pairs = zip(_answers(completions), right, strict=True)
    return [None if true is None else float(found == true) for found, true in pairs]


def agreement(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Returns 1.0 for each answer that equals the majority of the others, without its own vote. None: the
    others have no majority, or there are none.

    >>> agreement(["4", "4", "5"]), agreement(["4"])
    ([None, None, 0.0], [None])
    """
    answers = _answers(completions)
    others = [majority([*answers[:at], *answers[at + 1 :]]) for at in range(len(answers))]
    return [
        None if chosen is None else float(answer == chosen)
        for answer, chosen in zip(answers, others, strict=True)
    ]


def majority_at_k(texts: Sequence[str], passed: Sequence[bool | None], k: int) -> float | None:
    """Returns maj@k: how often the majority of k answers is right, over all groups of k. In a tie each answer
    counts by its share. None: not all were judged, or there are fewer than k.

    >>> majority_at_k(["4", "5", "4", "5"], [True, False, True, False], 2)
    0.5
    """
    if len(texts) < k or None in passed:
        return None
    answers = [extracted(text) for text in texts]
    groups = range(0, len(texts) - k + 1, k)
    return sum(_chosen_is_right(answers[at : at + k], passed[at : at + k]) for at in groups) / len(groups)


def _chosen_is_right(answers: Sequence[str | None], passed: Sequence[bool | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    right = [bool(ok) for answer, ok in zip(answers, passed, strict=True) if votes[answer or ""] == most]
    return sum(right) / len(right) if votes else 0.0


def _answers(completions: Sequence[Any]) -> list[str | None]:
    return [extracted(final_answer(one)) for one in completions]
