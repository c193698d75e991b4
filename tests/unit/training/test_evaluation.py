"""pass@k is what it says: the share of ways to take k of the sampled answers that have a passing one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import pytest

from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.conversations import ConversationRules
from swarmnode.tasks.judging.rewards import load_reward, score_with
from swarmnode.testing import FakeTask
from swarmnode.testing.fake_engine import FakeEngine, by_turns
from swarmnode.training.evaluation import evaluate, pass_at_k, powers_of_two
from swarmnode.training.records import Evaluation
from swarmnode.types import Example
from tests import two_tools
from tests.two_tools import TwoTools, last_words, said

END = 1


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_ways_to_take_k(samples: int) -> None:
    for passed in range(samples + 1):
        answers = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            ways = [any(way) for way in combinations(answers, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(ways) / len(ways))


def test_k_doubles_up_to_the_number_of_answers() -> None:
    assert [powers_of_two(most) for most in (1, 2, 7, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


class Letters:
    eos_token_ids = (END,)

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


class Graded(FakeTask):
    """Half of a reward for any answer, none for an empty one, and none known for "?"."""

    name = "graded"

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        return [{"some": None if text == "?" else 0.5 * bool(text)} for text in completions]


def measured(answers: Sequence[str], *tasks: FakeTask, **options: Any) -> Evaluation:
    """Each question is answered in turn by `answers`; "=" stands for the right one."""
    asked: Counter[tuple[int, ...]] = Counter()

    def answer(request: Request) -> list[int]:
        place = asked[request.prompt_ids] % len(answers)
        asked[request.prompt_ids] += 1
        left, right = "".join(map(chr, request.prompt_ids)).rstrip("=").split("+")
        text = str(int(left) + int(right)) if answers[place] == "=" else answers[place]
        return [*map(ord, text), END]

    renderer: Any = Letters()
    sampling = SamplingParams(max_tokens=8)
    found = evaluate(
        FakeEngine(answer), renderer, {task.name: task for task in tasks}, sampling, examples=5, **options
    )
    assert found is not None
    return found


def test_of_several_answers_to_each_question_the_reward_is_their_mean_and_pass_at_k_follows() -> None:
    found = measured(["=", "no", "no", "no"], FakeTask(), samples=4)
    assert found.per_task == {"sum": 0.25} and found.mean == 0.25
    assert found.pass_at == {"sum": {1: 0.25, 2: 0.5, 4: 1.0}}
    assert found.pass_at_mean == {1: 0.25, 2: 0.5, 4: 1.0}


def test_one_answer_to_each_question_is_pass_at_1() -> None:
    found = measured(["="], FakeTask())
    assert (found.mean, found.pass_at_mean) == (1.0, {1: 1.0})


def test_what_passes_is_a_reward_that_one_may_choose() -> None:
    assert measured(["some"], Graded(), samples=2).pass_at_mean == {1: 0.0, 2: 0.0}
    assert measured(["some"], Graded(), samples=2, passing_reward=0.5).pass_at_mean == {1: 1.0, 2: 1.0}


def test_where_too_few_answers_were_scored_pass_at_k_is_unknown_and_not_zero() -> None:
    found = measured(["some", "?"], Graded(), FakeTask(), samples=2, passing_reward=0.5)
    assert found.pass_at["graded"] == {1: 1.0, 2: None}
    assert found.pass_at_mean[2] == found.pass_at["sum"][2] == 0.0


class Agreeing(FakeTask):
    """Sums whose answers nobody knows."""

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        asked = replace(example, columns={})
        return score_with({"majority_vote": load_reward("majority_vote")}, asked, completions)


def test_the_majority_is_right_more_often_than_one_answer() -> None:
    found = measured(["=", "no", "=", "=", "?", "="], FakeTask(), samples=6)
    assert found.pass_at["sum"][1] == pytest.approx(4 / 6)
    assert found.majority_at == {"sum": {1: pytest.approx(4 / 6), 2: pytest.approx(4 / 6), 4: 1.0}}


def test_what_only_agrees_with_itself_does_not_read_as_right() -> None:
    alone = measured(["7"], Agreeing())
    assert alone.mean is None and alone.judged_by == {"sum": ("agreement",)}
    found = measured(["7", "7", "8", "7"], Agreeing(), samples=4)
    assert found.mean == 0.75 and found.majority_at == {"sum": {1: None, 2: None, 4: None}}


def test_of_conversations_the_majority_is_of_what_was_said_last() -> None:
    """Each looks the numbers up in another order, so no two transcripts are alike."""
    asked: Counter[tuple[int, ...]] = Counter()

    def turn(request: Request, given: Sequence[Sequence[int]]) -> tuple[int, ...]:
        if not given:
            asked[request.prompt_ids] += 1
            return said(f"add {asked[request.prompt_ids]}")
        number = int(two_tools.Letters().decode(given[0]))
        return said("5" if number == 4 else "4")

    class Sums(TwoTools):
        def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
            return [{"right": float(last_words(text) == "4")} for text in completions]

    task, renderer = Sums(), two_tools.Letters()
    found = evaluate(
        FakeEngine(by_turns(turn)),
        cast(Renderer, renderer),
        {task.name: task},
        SamplingParams(max_tokens=100),
        examples=3,
        samples=4,
        conversations=ConversationRules({task.name: task}, turn_timeout_s=60.0),
    )
    assert found is not None and found.mean == 0.75
    assert found.majority_at == {task.name: {1: 0.75, 2: 0.75, 4: 1.0}}
