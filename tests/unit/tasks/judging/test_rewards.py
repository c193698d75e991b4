"""TRL's reward contract: what is passed, what may come back, and where a reward is found."""

import asyncio
import functools
import math
import sys
import threading
import typing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnode.errors import TaskError
from swarmnode.tasks.judging.rewards import (
    MOST_METRICS,
    builtin_rewards,
    call_reward,
    load_reward,
    pieces_of,
    score_with,
)
from swarmnode.tasks.kinds.script_objects import as_task
from swarmnode.tasks.task import is_exchangeable
from swarmnode.types import Example, ExampleKey, by_reward, total_reward


def call(reward, completions=("a", "bb"), **columns):
    prompts = ["?"] * len(completions)
    return call_reward(
        reward, prompts, completions, columns={k: [v] * len(prompts) for k, v in columns.items()}
    )


def test_a_reward_with_keywords_gets_what_trl_passes_except_token_ids():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    call_reward(reward, ["p", "p"], ["a", "b"], {"answer": ["x", "y"]})
    assert seen.pop("trainer_state").global_step == 0
    seen.pop("log_extra")("column", ["u", "v"])
    seen.pop("log_metric")("metric", 0.5)
    assert seen == {"prompts": ["p", "p"], "completions": ["a", "b"], "answer": ["x", "y"]}


def test_a_function_that_hides_its_arguments_is_refused():
    with pytest.raises(TaskError, match="cannot be called"):
        call(min)


def test_a_reward_without_keywords_gets_only_what_it_names():
    def reward(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert call(reward, answer="a", level="easy") == [1.0, 0.0]


def test_a_missing_column_is_named():
    def reward(completions, solution): ...

    with pytest.raises(TaskError, match="needs 'solution'") as caught:
        call(reward, answer="a")
    assert caught.value.hint == "its columns are: answer"


def test_token_ids_are_missing_and_a_reward_that_insists_on_them_gets_pieces_of_the_text():
    def insists(completion_ids, **columns):
        return [len(ids) for ids in completion_ids]

    def copes(completions, completion_ids=None):
        return [float(completion_ids is None)] * len(completions)

    assert call(copes) == [1.0, 1.0]
    assert call(insists, completions=("What is 12 + 34?", "")) == [7.0, 0.0]


def test_pieces_of_a_text_are_about_as_many_as_tokens_and_repeat_where_it_does():
    prose = "The quick brown fox, 12345 years old, jumps over the lazy dog again and again.\n" * 3
    assert 0.15 * len(prose) < len(pieces_of(prose)) < 0.35 * len(prose)
    assert len(set(pieces_of(prose))) <= len(pieces_of(prose)) / 3 + 1
    assert len(pieces_of("naive \u4f60\u597d \U0001f600")) == 6


def content(completions: list[list[dict[str, str]]], **columns):
    return [float(len(completion[0]["content"])) for completion in completions]


def content_of_sequences(completions: "Sequence[list[dict[str, str]]]"):
    return content(completions)


class Content:
    def __call__(self, completions: typing.List[typing.List[dict]], **columns):  # noqa: UP006  as old code has it
        return content(completions)


@pytest.mark.parametrize("reward", [content, content_of_sequences, Content()])
def test_a_reward_that_is_annotated_for_messages_gets_messages(reward):
    assert call(reward) == [1.0, 2.0]


def test_other_annotations_mean_text():
    def text(completions: list[str]):
        return [float(isinstance(c, str)) for c in completions]

    def either(completions: list[str | list[dict[str, str]]]):
        return text(completions)

    assert call(text) == call(either) == [1.0, 1.0]


def test_where_the_prompt_came_as_messages_every_reward_gets_messages():
    def reward(prompts, completions):
        assert prompts == [[{"role": "user", "content": "?"}]]
        return [float(completions == [[{"role": "assistant", "content": "a"}]])]

    example = Example(ExampleKey("t", "1", 0, 0), "?", {"answer": "a"}, conversational=True)
    assert score_with({"r": reward, "ours": load_reward("exact_match")}, example, ["a"]) == [
        {"r": 1.0, "ours": 1.0}
    ]


LAZY = """
import importlib, sys, types

class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name == "broken":
            raise RuntimeError("failed to import it")
        if name != "brief":
            raise AttributeError(name)
        return importlib.import_module(".inner", self.__name__).brief

lazy = Lazy(__name__)
lazy.__path__, lazy.__spec__ = __path__, __spec__
sys.modules[__name__] = lazy
"""


def test_a_reward_is_found_in_a_lazy_package(tmp_path, monkeypatch):
    (tmp_path / "lazily").mkdir()
    (tmp_path / "lazily" / "__init__.py").write_text(LAZY)
    (tmp_path / "lazily" / "inner.py").write_text(
        "def brief(completions: list[list[dict[str, str]]], **columns):\n"
        "    return [-len(c[0]['content']) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert call(load_reward("lazily:brief")) == [-1.0, -2.0]
    with pytest.raises(TaskError, match="no reward 'lazily:nothing'"):
        load_reward("lazily:nothing")
    with pytest.raises(TaskError, match="cannot import broken of lazily"):
        load_reward("lazily:broken")


@pytest.mark.parametrize(
    ("name", "made_with", "expected"),
    [
        ("accuracy_reward", None, [1.0, 0.0]),
        ("reasoning_accuracy_reward", None, [1.0, 0.0]),
        ("think_format_reward", None, [0.0, 0.0]),
        ("get_cosine_scaled_reward", {"max_len": 1000}, None),
        ("get_repetition_penalty_reward", {"ngram_size": 2}, None),
        ("get_soft_overlong_punishment", {"max_completion_len": 1000, "soft_punish_cache": 100}, [0.0, 0.0]),
    ],
)
def test_every_function_of_trl_runs(name, made_with, expected):
    pytest.importorskip("trl")
    pytest.importorskip("math_verify")
    reward = load_reward(f"trl.rewards:{name}")
    if made_with is not None:
        reward = reward(**made_with)
    answers = (r"</think> so \boxed{\frac{1}{2}}", r"</think> so \boxed{3}")
    values = call(reward, completions=answers, solution=r"$\frac{1}{2}$")
    assert values == expected or (expected is None and len(values) == 2)


async def an_async_reward(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


def test_an_async_reward_is_awaited():
    assert call(an_async_reward) == [1.0, 2.0]


async def test_an_async_reward_is_awaited_even_from_within_a_running_loop():
    assert call(an_async_reward) == [1.0, 2.0]


def test_an_async_reward_that_blocks_holds_up_no_other():
    go_on = threading.Event()

    async def blocking(completions, **columns):
        go_on.wait(30)
        return [0.0] * len(completions)

    with ThreadPoolExecutor(1) as thread:
        stuck = thread.submit(call, blocking)
        assert call(an_async_reward) == [1.0, 2.0]
        assert not stuck.done()
        go_on.set()


def test_objects_and_partial_functions_are_rewards_too():
    class Reward:
        def __call__(self, completions):
            return [1] * len(completions)

    assert call(Reward()) == [1.0, 1.0]
    assert call(functools.partial(lambda completions, value: [value] * len(completions), value=2)) == [
        2.0,
        2.0,
    ]


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2)])
def test_any_real_number_is_a_reward_and_none_stays_none(value):
    assert call(lambda completions: [value, None]) == [float(value), None]


@pytest.mark.parametrize("row", [np.array, tuple, iter])
def test_any_row_of_numbers_is_as_good_as_a_list(row):
    assert call(lambda completions: row([0.5, 1.0])) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ([1.0], "1 values for 2 completions"),
        ([1.0] * 3, "3 values for 2 completions"),
        (1.0, "float, not a list"),
        ("10", "str, not a list"),
        ({"a": 1.0, "b": 0.0}, "dict, not a list"),
        (None, "NoneType, not a list"),
        (["1", "0"], "a str, not a number"),
        ([math.nan, 0.0], "returned nan"),
        ([math.inf, 0.0], "returned inf"),
        ([10**400, 0.0], "returned inf"),
        ([1j, 0.0], "a complex, not a number"),
    ],
)
def test_a_wrong_result_is_an_error_and_never_a_zero(result, complaint):
    with pytest.raises(TaskError, match=complaint):
        call(lambda completions: result)


def test_a_failing_reward_says_where():
    def reward(completions):
        raise KeyError("solution")

    with pytest.raises(TaskError, match="reward failed: KeyError") as caught:
        call(reward)
    assert f"{__file__} line {reward.__code__.co_firstlineno + 1}" in caught.value.hint


def test_a_reward_that_wants_to_end_the_process_has_failed():
    def reward(completions):
        sys.exit(4)

    with pytest.raises(TaskError, match=r"reward failed: SystemExit\(4\)") as caught:
        call(reward)
    assert f"{__file__} line {reward.__code__.co_firstlineno + 1}" in caught.value.hint


@pytest.mark.parametrize("column", ["prompts", "completion_ids", "trainer_state"])
def test_a_column_may_not_be_named_after_an_argument(column):
    with pytest.raises(TaskError, match=column):
        call(an_async_reward, **{column: "x"})


def test_scores_are_named_and_follow_the_completions():
    example = Example(ExampleKey("t", "1", 0, 0), "?", {"answer": "a"})
    rewards = {"correct": load_reward("exact_match"), "none": lambda completions: [None] * len(completions)}
    assert score_with(rewards, example, ["a", "b"]) == [
        {"correct": 1.0, "none": None},
        {"correct": 0.0, "none": None},
    ]
    assert score_with(rewards, example, []) == []


def test_every_builtin_reward_is_found_by_its_name_alone():
    loose = {"exact_match", "numeric_match", "boxed_match", "think_format", "answer_tags", "concise"}
    strict = {"strict_numeric_match", "strict_boxed_match", "worked_numeric_match"}
    assert loose | strict | {"passes_tests", "majority_vote"} == set(builtin_rewards())
    for name in builtin_rewards():
        assert load_reward(name).__name__ == name


def test_builtin_rewards_do_not_take_the_name_of_the_users_own_package(tmp_path, monkeypatch):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").write_text("")
    (tmp_path / "rewards" / "mine.py").write_text(
        "def reward(completions):\n    return [7.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    assert call(load_reward("rewards.mine:reward")) == [7.0, 7.0]
    assert call(load_reward("rewards.exact:exact_match"), answer="a") == [1.0, 0.0]


def test_a_reward_is_found_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def brief(completions, **columns):\n    return [-len(c) for c in completions]\n")
    assert call(load_reward(f"{path}:brief")) == [-1.0, -2.0]


@pytest.mark.parametrize(
    "spec", ["exact_math", "rewards.format:nothing", "not_installed_at_all:reward", "json:loads2"]
)
def test_an_unknown_reward_is_a_clear_error(spec):
    with pytest.raises(TaskError) as caught:
        load_reward(spec)
    assert caught.value.hint


def test_a_reward_may_return_tensors() -> None:
    def row(completions: list[str], **columns: object) -> torch.Tensor:
        return torch.tensor([float(len(text)) for text in completions])

    def each(completions: list[str], **columns: object) -> list[torch.Tensor]:
        return [torch.tensor(len(text)) for text in completions]

    for reward in (row, each):
        assert call_reward(reward, ["?", "?"], ["a", "abc"]) == [1.0, 3.0]

    def table(completions: list[str], **columns: object) -> torch.Tensor:
        return torch.zeros(len(completions), 2)

    with pytest.raises(TaskError, match="returned a Tensor, not a number"):
        call_reward(table, ["?", "?"], ["a", "abc"])


def test_what_a_reward_hands_to_log_metric_stands_beside_its_scores_and_counts_nothing() -> None:
    def chatty(completions: list[str], log_metric: Any, **columns: object) -> list[float | None]:
        log_metric("share*of", torch.tensor(0.5))
        log_metric("chatty", 3.0)
        for value in (None, "many", float("nan"), 1e9):
            log_metric("odd", value)
        for number in range(100):
            log_metric(f"many {number}", number)
        return [1.0, None]

    rewarded, without = score_with({"chatty": chatty}, Example(ExampleKey("t", "1", 0, 0), "?"), ["a", "b"])
    assert (total_reward(rewarded), total_reward(without)) == (1.0, None)
    kept = by_reward([rewarded, without])
    assert kept["share of"] == [0.5] and kept["chatty"] == [1.0] and "odd" not in kept
    assert len(kept) == 1 + MOST_METRICS - 1


def test_what_a_reward_hands_to_log_extra_is_said_once_to_be_kept_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def chatty(completions: list[str], log_extra: Any, **columns: object) -> list[float]:
        log_extra("chatty_texts", completions)
        return [1.0 for _ in completions]

    for _ in range(2):
        call_reward(chatty, ["?"], ["a"])
    (said,) = [one.message for one in caplog.records if "is not stored" in one.message]
    assert "log_extra('chatty_texts')" in said and "log_metric" in said


def test_a_reward_that_is_misspelt_is_answered_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def right(completions): ...\n\n\ndef short(completions): ...\n")
    for spec, meant in (
        ("exact_mach", "did you mean exact_match?"),
        ("trl.rewards:acuracy_reward", "did you mean accuracy_reward?"),
        (f"{tmp_path}/mine.py:rigth", "did you mean right?"),
        (f"{tmp_path}/mine.py:zzz", "it has: right, short"),
    ):
        with pytest.raises(TaskError, match="no reward '") as caught:
            load_reward(spec)
        assert caught.value.hint == meant


class AskedElsewhere:
    """A reward of a package of one's own, whose scores nobody else can check."""

    exchangeable = False

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)


def test_a_reward_of_anybody_that_says_so_keeps_its_rollouts_at_home() -> None:
    def by_mood(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    assert is_exchangeable(as_task([("1+1=", "2")], [by_mood]))
    by_mood.exchangeable = False  # type: ignore[attr-defined]
    for reward in (by_mood, AskedElsewhere("one")):
        assert not is_exchangeable(as_task([("1+1=", "2")], [reward, "exact_match"]))


def test_a_reward_that_says_what_it_is_is_taken_at_its_word() -> None:
    one, other, again = (as_task([("1+1=", "2")], [AskedElsewhere(name)]) for name in ("one", "two", "one"))
    assert one.version == again.version != other.version
