"""Reward functions of other trainers, made into ones on TRL's contract.

load_reward("verl:package.module:function") -> tasks/judging/conventions.py -> [VERL ...] -> rewards.py, which
    calls it as any other

    verl       compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict
    slime      async custom_rm(args, sample) -> float, or (args, samples) -> list[float]
    nanochat   reward(conversation, assistant_response) -> float, or a Task that has such a method
    verifiers  reward(completion, prompt, answer, state, info, task) -> float, sync or async, any of these
    genrl      reward_fn(completions, answer, metadata) -> list[float]

All but genrl's are known by the names of their arguments. genrl's could be one of TRL's, so it has to be
named. Columns are those of the data set: `ground_truth`, `label` and the like are looked for where a trainer
keeps them, and `answer` stands for all of them.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any, cast

from swarmnode.chat import Message
from swarmnode.tasks.arguments import accepted
from swarmnode.tasks.judging.conventions import Convention, argument_names
from swarmnode.tasks.judging.plain_rewards import final_answer

Columns = Mapping[str, Any]
Judged = Callable[..., Any]


@dataclass(slots=True)
class SlimeSample:
    """The attributes of slime's `Sample` that its rewards read."""

    prompt: Any
    response: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    index: int = 0
    reward: Any = None
    response_length: int = 0
    status: str = "completed"


def _on_trl(make: Callable[[Any], tuple[Any, Judged]], function: Any) -> Any:
    """Returns `function` on TRL's contract; `make` returns the function itself, and how groups are judged
    with it."""
    inner, judge = make(function)

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        trainer_state: object = None,
        log_extra: object = None,
        log_metric: object = None,
        **columns: Sequence[Any],
    ) -> Any:
        rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completions))]
        return judge(list(prompts), list(completions), rows)

    signature = inspect.signature(reward)
    update_wrapper(reward, inner)
    # Callers look at the arguments, and ours are not those of what is wrapped.
    reward.__signature__ = signature  # type: ignore[attr-defined]
    return reward


def _verl(function: Any) -> tuple[Any, Judged]:
    def one(prompt: Any, said: Any, row: Columns) -> Any:
        model = row.get("reward_model")
        nested: Any = cast(Columns, model).get("ground_truth") if isinstance(model, Mapping) else None
        given = {
            "data_source": row.get("data_source", ""),
            "solution_str": final_answer(said),
            "ground_truth": _first(row.get("ground_truth"), nested, row.get("answer")),
            "extra_info": row.get("extra_info", dict(row)),
        }
        return function(**accepted(function, given))

    return function, _each(one)


def _slime(function: Any) -> tuple[Any, Judged]:
    def called(samples: Any) -> Any:
        return function(SimpleNamespace(), samples)

    whole = argument_names(function)[1:2] == ["samples"]
    judge_samples = called if whole else _each(called)

    def judge(prompts: list[Any], said: list[Any], rows: list[Columns]) -> Any:
        texts = map(final_answer, said)
        samples = [
            SlimeSample(
                prompt, text, _first(row.get("label"), row.get("answer")), dict(row), at, None, len(text)
            )
            for at, (prompt, text, row) in enumerate(zip(prompts, texts, rows, strict=True))
        ]
        return judge_samples(samples)

    return function, judge


def _nanochat(found: Any) -> tuple[Any, Judged]:
    function = _reward_of(found)

    def one(prompt: Any, said: Any, row: Columns) -> Any:
        return function({**row, "messages": _solved(prompt, row)}, final_answer(said))

    return function, _each(one)


def _reward_of(found: Any) -> Any:
    """Returns the function itself, or the method of a Task or of its class."""
    if inspect.isroutine(found):
        return found
    task: Any = cast(Any, found)() if inspect.isclass(found) else found
    return task.reward


def _genrl(function: Any) -> tuple[Any, Judged]:
    def judge(prompts: list[Any], said: list[Any], rows: list[Columns]) -> Any:
        # One example, so one answer and one set of further columns for all of its completions.
        row: Columns = rows[0] if rows else {}
        metadata = row.get("metadata", {name: value for name, value in row.items() if name != "answer"})
        return function(list(map(final_answer, said)), row.get("answer"), metadata)

    return function, judge


def _verifiers(function: Any) -> tuple[Any, Judged]:
    def one(prompt: Any, said: Any, row: Columns) -> Any:
        given: dict[str, Any] = {
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "completion": [{"role": "assistant", "content": said}] if isinstance(said, str) else said,
            "answer": row.get("answer", ""),
            "info": row.get("info", {}),
            "task": row.get("task", ""),
        }
        return function(**accepted(function, {**row, **given, "state": {**row, **given}}))

    return function, _each(one)


def _each(one: Judged) -> Judged:
    """Returns how a group is judged with a function that judges each answer by itself. One that does not wait
    is called here, in the thread of who asks: rewards with an alarm of their own need the main one."""

    def judge(*columns: Sequence[Any]) -> Any:
        results = [one(*parts) for parts in zip(*columns, strict=True)]
        waits = any(map(inspect.isawaitable, results))
        return _gathered(results) if waits else list(map(_number, results))

    return judge


async def _gathered(results: list[Any]) -> list[Any]:
    async def value(result: object) -> Any:
        return _number(await result if inspect.isawaitable(result) else result)

    return await asyncio.gather(*map(value, results))


def _number(result: object) -> Any:
    """Returns the score in a verl result, which is a number or a dictionary with more to tell."""
    return cast(Columns, result).get("score") if isinstance(result, Mapping) else result


def _solved(prompt: Any, row: Columns) -> list[Message]:
    """Returns the conversation with its right answer, as nanochat's data sets have it."""
    asked: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = row.get("answer")
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


VERL = Convention(partial(_on_trl, _verl), lambda names: {"solution_str", "ground_truth"} <= set(names))
SLIME = Convention(
    partial(_on_trl, _slime), lambda names: names[:2] in (["args", "sample"], ["args", "samples"])
)
NANOCHAT = Convention(
    partial(_on_trl, _nanochat),
    lambda names: names[:2] == ["conversation", "assistant_response"],
    of_objects=True,
)
VERIFIERS = Convention(
    partial(_on_trl, _verifiers), lambda names: "completion" in names and "completions" not in names
)
GENRL = Convention(partial(_on_trl, _genrl))
"""Its functions are known by name alone."""
