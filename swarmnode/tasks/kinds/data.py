"""A data set as a task: its rows are questions, and each seed asks them in another order.

questions.jsonl?reward=numeric_match -> tables.py -> [load_data] -> FileTask -> draw_round

A peer with the same rows and rewards has the same version, whatever the format of its file, so it draws a
question again from its own copy: exchanged rollouts name a row and never contain it.
"""

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.chat import Message, Prompt, messages_of
from swarmnode.errors import TaskError
from swarmnode.tasks.builtin import StableRandom
from swarmnode.tasks.data_settings import ABOUT_DATA
from swarmnode.tasks.digests import judged_version
from swarmnode.tasks.file_task import FileTask
from swarmnode.tasks.judging.rewards import judge_of, load_reward, named_rewards, with_weights
from swarmnode.tasks.kinds.tables import MAX_ROW_BYTES, Columns, PlacedRow, read_table, take
from swarmnode.tasks.rows import read_row, user_prompt
from swarmnode.tasks.specs import JUDGED_ELSEWHERE, TaskKind, TaskSpec, parse_spec, with_defaults
from swarmnode.tasks.task import EVALUATION_SEED
from swarmnode.tasks.task_source import TaskSource
from swarmnode.types import ExampleKey

MAX_ROWS = 2_000_000

MAX_KEPT_BYTES = 2 << 30
"""Largest data set, in bytes: its rows stay in the memory of each process of the task."""

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "input", "query")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "output", "response", "label")
"""Column names of the right answer: without a setting, the first that the data set has is used."""

OPTIONS = (*ABOUT_DATA, "prompt", "answer", "evaluation", "split", "private")

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def load_data(spec: TaskSpec) -> FileTask:
    """Reads a data set, checks every row and loads its rewards. Raises TaskError, which names the place of a
    bad row."""
    spec.only(*OPTIONS)
    named = spec.options.get("reward", ())
    elsewhere = named == JUDGED_ELSEWHERE
    rewards = {} if elsewhere else named_rewards(named)
    if not elsewhere and (judge := spec.one("judge")) is not None:
        rewards["judge"] = judge_of(judge)
    rewards = with_weights(rewards, spec.options.get("weight", ()))
    exact = not rewards and not elsewhere
    name = name_of(spec)
    evaluation: Sequence[bytes] = ()
    if (measured := spec.one("evaluation")) is not None:
        columns = {key: spec.options.get(key, ()) for key in ("prompt", "answer", "system")}
        other = with_defaults(parse_spec(measured), columns)
        evaluation = packed_rows(read_table(other), other, exact=exact)
    rows = without(packed_rows(read_table(spec), spec, exact=exact), evaluation)
    if not rows:
        raise TaskError(f"{spec.name} has no rows", hint="add at least a few hundred")
    may_leave = not spec.flag("private")
    judges = {"correct": load_reward("exact_match")} if exact else rewards
    # A judge elsewhere makes the version from these rows and itself by the same rule.
    digest = digest_of(rows, evaluation)
    version = judged_version(digest, judges) if judges else digest
    draw = partial(drawn, rows, evaluation, f"{name}/{version}")
    asked = frozenset(prompts_of(evaluation))
    return FileTask(name, version, Path(spec.name), draw, judges, may_leave=may_leave, evaluated=asked)


DATA_SETS = TaskSource(
    load_data, "a data set of the Hugging Face hub", "OWNER/NAME", "datasets", frozenset(ABOUT_DATA)
)


def packed_rows(rows: Iterator[PlacedRow], spec: TaskSpec, *, exact: bool) -> list[bytes]:
    """Returns the rows, each checked and packed. `exact`: the judge is exact match. Raises TaskError, which
    names the place of a bad row."""
    name, kept = name_of(spec), 0
    found: list[bytes] = []
    for place, row in _prepared(take(rows, MAX_ROWS, name), spec, exact=exact):
        found.append(_packed(row, place))
        kept += len(found[-1])
        if kept > MAX_KEPT_BYTES:
            raise TaskError(
                f"{name} takes more than {MAX_KEPT_BYTES >> 30} GiB of memory", hint="use a part of it"
            )
    return found


def without(rows: Sequence[bytes], evaluation: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the rows whose question is not in the evaluation set."""
    if not evaluation:
        return rows
    measured = set(prompts_of(evaluation))
    return [row for row, prompt in zip(rows, prompts_of(rows), strict=True) if prompt not in measured]


def prompts_of(rows: Iterable[bytes]) -> Iterator[Prompt]:
    """Yields the prompts of packed rows."""
    return (user_prompt(msgspec.msgpack.decode(row)["prompt"], "a row") for row in rows)


def digest_of(rows: Iterable[bytes], evaluation: Sequence[bytes]) -> str:
    """Returns one digest of packed rows and of their evaluation set."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(len(row).to_bytes(4, "little") + row)
    if evaluation:
        # No row is that long, so with an evaluation set the digest differs.
        digest.update(b"\xff" * 4 + digest_of(evaluation, ()).encode())
    return digest.hexdigest()


def drawn(rows: Sequence[bytes], evaluation: Sequence[bytes], name: str, seed: int) -> Iterator[Any]:
    """Yields the rows once, in the order of this seed, or for EVALUATION_SEED the evaluation set in its own
    order."""
    if seed == EVALUATION_SEED:
        return map(msgspec.msgpack.decode, evaluation)
    return (msgspec.msgpack.decode(rows[number]) for number in shuffled(f"{name}/{seed}", len(rows)))


def name_of(spec: TaskSpec) -> str:
    """Returns the name of a data set's task: its file or folder, or the hub's set with subset and split.

    >>> name_of(TaskSpec(TaskKind.HUB, "openai/gsm8k/main:test"))
    'gsm8k-main-test'
    """
    if spec.kind != TaskKind.HUB:
        return Path(spec.name).stem
    repo, _, split = spec.name.partition(":")
    parts = repo.split("/")
    return "-".join([*parts[-1 if len(parts) < 2 else 1 :], *([split] if split else [])])[:63]


def shuffled(name: str, count: int) -> Iterator[int]:
    """Yields the numbers from 0 to `count` in an order that follows from `name`, on every machine. Taking
    only the first ones does not cost the work of the rest.

    >>> list(shuffled("a", 5)), list(shuffled("b", 5))
    ([3, 1, 0, 2, 4], [4, 1, 3, 2, 0])
    """
    random, moved = StableRandom(name), dict[int, int]()
    for place in range(count):
        other = random.between(place, count - 1)
        here = moved.pop(place, place)
        if other == place:
            yield here
        else:
            yield moved.get(other, other)
            moved[other] = here


def _prepared(rows: Iterator[PlacedRow], spec: TaskSpec, *, exact: bool) -> Iterator[PlacedRow]:
    """Yields rows with a `prompt` and, if there is one, an `answer`. Raises TaskError."""
    prompt_column, answer_column = spec.one("prompt"), spec.one("answer")
    first = True
    for place, row in rows:
        if first:
            prompt_column = prompt_column or _found(PROMPT_COLUMNS, row) or _no_column(row, "prompt", place)
            answer_column = answer_column or _found(ANSWER_COLUMNS, row)
            first = False
        prepared = _prepare(row, str(prompt_column), answer_column, place)
        if system := spec.one("system"):
            prepared["prompt"] = with_system(system, prepared["prompt"], place)
        if exact:
            prepared["answer"] = _exact_answer(prepared, place)
        example = read_row(prepared, ExampleKey("", "", 0, 0), place)
        if example.conversational:
            prepared["prompt"] = example.messages
        yield place, prepared


def _prepare(row: Columns, prompt_column: str, answer_column: str | None, place: str) -> Columns:
    if prompt_column not in row:
        _no_column(row, prompt_column, place)
    if answer_column is not None and answer_column not in row:
        otherwise = "every row needs it, as the first row has it; use None for an unknown answer"
        _no_column(row, answer_column, place, otherwise)
    prompt = row[prompt_column]
    columns = {name: value for name, value in row.items() if name not in ("prompt", prompt_column)}
    if prompt_column != "prompt" and isinstance(prompt, str):
        columns[prompt_column] = prompt
    if answer_column is not None:
        columns["answer"] = row[answer_column]
    match prompt:
        case [*before, {"role": "assistant", "content": str(said)}] if before:
            # A conversation written to be imitated: its last turn is the wanted answer.
            columns.setdefault("answer", said)
            prompt = before
        case _:
            pass
    return {**columns, "prompt": prompt}


def with_system(system: str, prompt: Any, place: object) -> list[Message]:
    """Returns a prompt as a conversation that begins with a system message. Raises TaskError if it already
    has one."""
    messages = messages_of(user_prompt(prompt, place))
    if messages[0]["role"] in ("system", "developer"):
        raise TaskError(f"{place} already has a system message", hint="leave out tasks.system_prompt")
    return [{"role": "system", "content": system}, *messages]


def _exact_answer(row: Columns, place: str) -> str | float:
    answer = row.get("answer")
    if not isinstance(answer, str | int | float):
        raise TaskError(
            f"{place} has no answer to compare with: {answer!r:.80}",
            hint="name its column answer (or pass FILE?answer=COLUMN), or pass a reward: reward=f, or --set"
            " tasks.reward=file.py:f",
        )
    # 2.0 and True have two spellings each, which the reward knows.
    return answer if isinstance(answer, bool | float) else str(answer)


def _found(names: Sequence[str], row: Columns) -> str | None:
    return next((name for name in names if name in row), None)


def _no_column(
    row: Columns,
    wanted: str,
    place: str,
    otherwise: str = "FILE?prompt=COLUMN names the prompt's column; rows of a script have it as `prompt`",
) -> str:
    names = sorted(map(str, row))
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    raise TaskError(
        f"{place} has no column {wanted!r}; its columns are {', '.join(names) or 'none'}"[:400],
        hint=f"did you mean {close[0]}?" if close else otherwise,
    )


def _packed(row: Columns, place: str) -> bytes:
    try:
        data = _encode(row)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise TaskError(
            f"{place} has a value that cannot be stored: {error}", hint="leave that column out"
        ) from error
    if len(data) > MAX_ROW_BYTES:
        raise TaskError(f"{place} has {len(data)} bytes; the limit is {MAX_ROW_BYTES}", hint="shorten it")
    return data
