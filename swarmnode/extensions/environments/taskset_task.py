"""Tasksets of verifiers (0.4 and later) as tasks, as far as they ask one question and judge one answer.

verifiers:NAME?field=value -> [load_taskset] -> TasksetTask -> Task.score(trace) of verifiers

NAME is what verifiers calls a taskset: `reverse-text`, `owner/reverse-text@1.0`, a module that is installed
or lies in the folder a node is started in. Fields are those of its configuration. Tools, containers and
rewards that look at a runtime are refused: an answer would be judged by half a judge.
"""

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from typing import Any, cast

import msgspec

from swarmnode.chat import Message
from swarmnode.errors import TaskError, where
from swarmnode.extensions.environments.gym_task import read_value
from swarmnode.tasks.kinds.data import shuffled, with_system
from swarmnode.tasks.kinds.imported import look_here_too, text_of
from swarmnode.tasks.optional_packages import extra_module
from swarmnode.tasks.rows import read_row
from swarmnode.tasks.specs import TaskSpec
from swarmnode.tasks.task_source import TaskSource
from swarmnode.types import Example, ExampleKey

INSTALL = 'pip install "verifiers>=0.4,<0.5"'
"""The command for the package. It is no extra of ours: it brings some hundred packages."""

MAX_TASKS = 50_000
"""Most tasks used of a set; of an endless one the first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TasksetTask:
    """A taskset, loaded: each seed asks its tasks in another order."""

    name: str
    version: str
    vf: Any
    tasks: Sequence[Any]
    rows: Sequence[Mapping[str, Any]]
    exchangeable: bool = True
    _told: set[str] = field(default_factory=set[str])

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields all tasks once, in this seed's order."""
        for index, number in enumerate(shuffled(f"{self.name}/{self.version}/{seed}", len(self.rows))):
            yield read_row(self.rows[number], ExampleKey(self.name, self.version, seed, index), self.name)

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the taskset's own weighted rewards, as verifiers scores a finished conversation."""
        task = self.tasks[example.columns["idx"]]
        traces = [self._trace(task, [*example.messages, _said(text)]) for text in completions]
        return asyncio.run(self._scored(task, traces))

    async def _scored(self, task: Any, traces: Sequence[Any]) -> list[Mapping[str, float | None]]:
        failures = await asyncio.gather(*map(task.score, traces), return_exceptions=True)
        for failure in failures:
            if isinstance(failure, BaseException) and (what := type(failure).__name__) not in self._told:
                self._told.add(what)
                logger.warning("%s cannot score an answer: %r. %s", self.name, failure, where(failure))
        return [
            {
                name: None if failure or reward is None else reward.value
                for name, reward in trace.rewards.items()
            }
            for trace, failure in zip(traces, failures, strict=True)
        ]

    def _trace(self, task: Any, messages: Sequence[Message]) -> Any:
        """Returns a finished conversation whose last message is the policy's."""
        trace_module = extra_module("verifiers.v1.trace", INSTALL, self.name)
        data = trace_module.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = trace_module.Trace(task=data, agent=trace_module.AgentInfo(config=self.vf.AgentConfig()))
        last = len(messages) - 1
        trace.nodes = [
            trace_module.MessageNode(
                parent=at - 1 if at else None,
                message=dict(message),
                sampled=at == last,
                timestamp=0.0,
            )
            for at, message in enumerate(messages)
        ]
        return trace


def load_taskset(spec: TaskSpec) -> TasksetTask:
    """Loads `verifiers:NAME`. Raises TaskError for a taskset that is missing or needs more than one
    answer."""
    here = look_here_too()
    vf = extra_module("verifiers.v1", INSTALL, spec)
    loaders = extra_module("verifiers.v1.utils.loaders", INSTALL, spec)
    generic = extra_module("verifiers.v1.utils.generic", INSTALL, spec)
    fields = {key: read_value(str(spec.one(key))) for key in spec.options if key != "private"}
    try:
        kind = loaders.taskset_class(spec.name)
        settings = generic.concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig
        taskset = kind(settings.model_validate({"id": spec.name, **fields}))
        tasks: list[Any] = list(islice(taskset, MAX_TASKS))
    except ModuleNotFoundError as error:
        hint = f"install its package, or start where its module lies: it is neither installed nor in {here}"
        hint = hint if spec.name in str(error) else where(error)
        raise TaskError(f"{spec} cannot be loaded: {_first_sentence(error)}", hint=hint) from error
    except Exception as error:
        raise TaskError(f"{spec} cannot be loaded: {error}", hint=where(error)) from error
    if not tasks:
        raise TaskError(f"{spec} has no tasks", hint="check what its load() yields")
    _require_one_answer(spec, taskset, tasks[0])
    rows = [_row(task, f"{spec} task {number}", vf) for number, task in enumerate(tasks)]
    module = inspect.getmodule(kind)
    source = text_of(module) if module is not None else ""
    digest = hashlib.blake2b(
        f"{version('verifiers')}\n{sorted(fields.items())}\n{source}".encode(), digest_size=8
    )
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    for row in rows:
        digest.update(encode(row))
    name = spec.name.rpartition("/")[2].partition("@")[0]
    may_leave = not spec.flag("private")
    return TasksetTask(name, digest.hexdigest(), vf, tasks, rows, exchangeable=may_leave)


def _first_sentence(error: ModuleNotFoundError) -> str:
    """Returns what a loader says of a missing package, without its advice to the authors of packages."""
    return str(error).partition(". ")[0].rstrip(".")


def _require_one_answer(spec: TaskSpec, taskset: Any, task: Any) -> None:
    """Raises TaskError for a task that is more than a question and its judge."""
    what = None
    hint = "only tasksets with one question, one answer and a judge of the text can be trained on"
    kinds = cast(Any, type(taskset)), cast(Any, type(task))
    if task.NEEDS_CONTAINER:
        what = "needs a container"
    elif kinds[0].toolsets(taskset.config) or kinds[1].toolsets(task.config):
        what = "has tools"
        hint = (
            "its harness cannot run here; functions and servers of the Model Context Protocol are tools of a"
            " task file (tools = [...]) or script (sn.Node(rows, reward, tools=[...])): docs/environments.md"
        )
    else:
        rewards = task.hooks("reward")
        blind = [reward.__name__ for reward in rewards if _needs_runtime(reward)]
        if blind:
            what = f"has rewards that look at a runtime ({', '.join(blind)})"
        elif not rewards:
            what = "has no reward"
    if what:
        raise TaskError(f"{spec} {what}", hint=hint)


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _row(task: Any, place: str, vf: Any) -> Mapping[str, Any]:
    """Returns the question of a task, and its author's own fields."""
    data = task.data
    given: dict[str, Any] = data.model_dump(mode="json", exclude_none=True)
    own = {name: value for name, value in given.items() if name not in vf.TaskData.model_fields}
    prompt: Any = given.get("prompt")
    if isinstance(prompt, list):
        prompt = [_message(message) for message in cast(list[dict[str, Any]], prompt)]
    if data.system_prompt:
        prompt = with_system(data.system_prompt, prompt, place)
    row = {**own, "prompt": prompt, "idx": data.idx}
    read_row(row, ExampleKey("", "", 0, 0), place)
    return row


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return {key: message.get(key) for key in ("role", "content")}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


VERIFIERS = TaskSource(load_taskset, "a taskset of verifiers", needs="verifiers")
