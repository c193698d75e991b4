"""One synchronous round over a fake engine."""

from collections.abc import Sequence
from typing import cast

import pytest

from swarmnode.rollout.engine import Request, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import completion_seed
from swarmnode.testing.fake_engine import LOGPROB, FakeEngine
from swarmnode.training.evaluation import collect
from swarmnode.types import Example, ExampleKey, one_span

EOS = 0
SAMPLING = SamplingParams(max_tokens=8)


class Letters:
    """A renderer of one token per character, EOS behind them."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != EOS)


RENDERER = cast(Renderer, Letters())


def example(index: int, prompt: str = "question") -> Example:
    return Example(ExampleKey("sums", "1", 5, index), prompt)


def echo(request: Request) -> tuple[int, ...]:
    """Answers with the prompt, ended by EOS."""
    return (*request.prompt_ids, EOS)


def test_each_example_comes_back_with_its_group_in_order() -> None:
    engine = FakeEngine(lambda request: (97 + cast(int, request.sampling.seed) % 26, EOS))
    examples = [example(i) for i in range(3)]
    answered = list(collect(engine, RENDERER, examples, 4, SAMPLING, seed=9))
    assert [one.example for one in answered] == examples
    for one in answered:
        seeds = [completion_seed(9, one.example.key, place) for place in range(4)]
        assert [completion.text for completion in one.completions] == [chr(97 + seed % 26) for seed in seeds]
        first = one.completions[0]
        assert (first.finish, first.logprobs, first.spans) == ("stop", (LOGPROB,) * 2, one_span(0, 2))
        assert first.token_ids[-1] == EOS


def test_groups_come_out_as_they_complete() -> None:
    engine = FakeEngine(echo)
    rounds = collect(engine, RENDERER, [example(0, "longer"), example(1, "a")], 2, SAMPLING, seed=0)
    assert next(rounds).example.key.index == 1
    assert engine.stats().running == 2
    assert next(rounds).example.key.index == 0


def test_the_same_seed_asks_for_the_same_samples_and_no_two_are_alike() -> None:
    def seeds(seed: int) -> list[int | None]:
        asked: list[int | None] = []

        def answer(request: Request) -> tuple[int, ...]:
            asked.append(request.sampling.seed)
            return (EOS,)

        list(collect(FakeEngine(answer), RENDERER, [example(i) for i in range(5)], 3, SAMPLING, seed=seed))
        return asked

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 30


def test_a_seed_is_pinned_forever() -> None:
    """It decides what a resumed node samples: another number here breaks every checkpoint."""
    assert completion_seed(3, ExampleKey("sums", "1", 5, 7), 2) == 16302539608841158719


def test_stopping_keeps_whole_groups_and_leaves_the_engine_empty() -> None:
    engine = FakeEngine(echo)
    found = collect(
        engine,
        RENDERER,
        [example(0, "a"), example(1, "longer")],
        2,
        SAMPLING,
        seed=0,
        should_stop=lambda: engine.stats().generated_tokens >= 8,
    )
    assert [one.example.key.index for one in found] == [0]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_a_caller_that_turns_away_leaves_the_engine_empty() -> None:
    engine = FakeEngine(echo, max_slots=1)
    rounds = collect(engine, RENDERER, [example(0, "a"), example(1, "b")], 2, SAMPLING, seed=0)
    next(rounds)
    rounds.close()
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_an_example_too_long_for_the_engine_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(echo, max_length=12)
    examples = [example(0, "much too long a question"), example(1, "a")]
    answered = list(collect(engine, RENDERER, examples, 2, SAMPLING, seed=0))
    assert [one.example.key.index for one in answered] == [1]
    assert "skipping example 0 of sums" in caplog.text


def test_nothing_to_ask_is_nothing_answered() -> None:
    assert list(collect(FakeEngine(echo), RENDERER, [], 4, SAMPLING, seed=0)) == []
