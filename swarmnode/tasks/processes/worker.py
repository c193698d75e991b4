"""The process that runs a task's code: it draws and judges, and it can be killed.

task_process.py (the node) -> socket -> [worker] -> loader.py -> examples(seed), reward(...) of the user

A thread cannot be ended, and a runaway regular expression blocks the whole interpreter; a process can be
ended whatever it does. Requests are answered in the main thread, one after another: rewards that use
signal.alarm for their own limit (as math-verify does) need that.

Past its deadline the process ends itself, by a C timer that needs no interpreter, and reports where each
thread was. So it also ends if the node was killed meanwhile.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NoReturn

import msgspec

from swarmnode.bounded_dict import BoundedDict
from swarmnode.chat import read_prompt, written_prompt
from swarmnode.errors import JudgementLost, SwarmnodeError, notes_of, where
from swarmnode.tasks.deadlines.work_clock import WorkClock, on_the_clock
from swarmnode.tasks.drawing.demonstrations import COLUMN, Demonstrations
from swarmnode.tasks.drawing.draw_digest import draw_digest, written_down
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes import worker_messages as wire
from swarmnode.tasks.processes.unconfined import allow_unconfined
from swarmnode.tasks.source_file import traceback_of
from swarmnode.tasks.task import (
    EVALUATION_SEED,
    MAX_INDEX,
    Task,
    demonstrations_of,
    evaluation_size_of,
    is_environment,
    is_exchangeable,
    judges_groups,
    levels_of,
    score_strictly,
)
from swarmnode.types import Example, ExampleKey

MAX_SEEDS = 64
"""Most seeds with stored draws, so that judging an answer does not draw its example again."""

PARENT_LOOK_S = 1.0

NICENESS = 15
"""Niceness of a process that judges strangers' answers, so that our own work never waits for cores because of
it."""

STRANGERS_MB = 512
"""Megabytes for playing strangers' episodes, besides those of the loaded environment. `tasks.memory_mb`, if
set, bounds all of it instead."""


@dataclass(slots=True)
class _Drawing:
    """The examples drawn so far of one seed."""

    source: Iterator[Example]
    examples: list[Example] = field(default_factory=list[Example])
    failure: wire.Failure | None = None

    def up_to(self, end: int) -> None:
        if self.failure is None:
            try:
                self.examples.extend(islice(self.source, max(0, end - len(self.examples))))
            except SwarmnodeError as error:
                self.failure = wire.Failure(error.message, error.hint)


class TaskWorker:
    """A loaded task and its draws."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._drawings = BoundedDict[int, _Drawing](MAX_SEEDS)

    def answer(self, request: wire.Request) -> wire.Reply:
        """Answers one request. Raises SwarmnodeError."""
        match request:
            case wire.Draw(seed, start, count):
                return self._draw(seed, start, count)
            case wire.Score():
                return self._score(request)
            case wire.Observe():
                return self._observe(request)
            case _:
                return draw_digest(self._task)

    def _draw(self, seed: int, start: int, count: int) -> wire.Drawn:
        drawing = self._drawing(seed, start + count)
        rows = drawing.examples[start : start + count]
        failure = drawing.failure if len(rows) < count else None
        return wire.Drawn(tuple(written_down(self._with_shown(row)) for row in rows), failure)

    def _with_shown(self, example: Example) -> Example:
        """Returns an example with the texts of a demonstration function, which stays in this process."""
        if not callable(demonstrations_of(self._task)):
            return example
        shown = Demonstrations().of(self._task, example)
        return replace(example, columns={**example.columns, COLUMN: shown})

    def _score(self, asked: wire.Score) -> wire.Reply:
        given = asked.given
        if given is None:
            example = self._example(asked)
        else:
            key = ExampleKey(self._task.name, self._task.version, asked.seed, asked.index)
            example = Example(key, read_prompt(given.prompt), given.columns, given.conversational)
        if example is None:
            return wire.OtherExample()
        return wire.Scored(score_strictly(self._task, example, asked.completions))

    def _observe(self, asked: wire.Observe) -> wire.Reply:
        assert is_environment(self._task), "only an environment is asked"
        example = self._example(asked)
        if example is None:
            return wire.OtherExample()
        try:
            return wire.Observed(self._task.observe(example, asked.turns))
        except JudgementLost as lost:
            return wire.Observed(None, lost.message)

    def _example(self, asked: wire.Score | wire.Observe) -> Example | None:
        """Returns the requested example, or None if this process draws another one there."""
        examples = self._drawing(asked.seed, asked.index + 1).examples
        found = examples[asked.index] if asked.index < len(examples) else None
        return found if found is not None and written_prompt(found.prompt) == asked.prompt else None

    def _drawing(self, seed: int, end: int) -> _Drawing:
        drawing = self._drawings.get(seed) or _Drawing(iter(self._task.examples(seed)))
        self._drawings[seed] = drawing  # The most recently used ones are kept.
        drawing.up_to(end if seed == EVALUATION_SEED else min(end, MAX_INDEX))
        return drawing


def serve(channel: socket.socket, trace: int) -> None:
    """Answers requests until the node closes the channel. `trace`: an open file for the threads' stacks at a
    deadline."""
    reader, worker = wire.MessageReader(channel), None
    while (data := reader.read(None)) is not None:
        order = msgspec.msgpack.decode(data, type=wire.Order)
        if order.timeout_s is not None:
            faulthandler.dump_traceback_later(order.timeout_s, exit=True, file=trace)
        on_the_clock(None if order.timeout_s is None else WorkClock(order.timeout_s))
        try:
            if worker is None:
                worker, reply = _load(order.request)
            else:
                reply = worker.answer(order.request)
            framed = wire.frame(reply)
        except SwarmnodeError as error:
            framed = wire.frame(wire.Failure(error.message, error.hint, "\n".join(notes_of(error))))
        except MemoryError:
            hint = "--set tasks.memory_mb=MIB gives it more"
            framed = wire.frame(wire.Failure("ran out of memory", hint, lost=True))
        except BaseException as error:  # noqa: BLE001  a reward that calls sys.exit() fails, and no more
            what = f"the task raised {error!r:.1000}"
            framed = wire.frame(wire.Failure(what, where(error), traceback_of(error)))
        faulthandler.cancel_dump_traceback_later()
        channel.settimeout(None)
        channel.sendall(framed)


def _load(request: wire.Request) -> tuple[TaskWorker, wire.Loaded]:
    assert isinstance(request, wire.Load), "a node loads a task first"
    allow_unconfined(request.unconfined)
    if request.home is not None:
        os.environ["SWARMNODE_HOME"] = request.home  # noqa: TID251  for what a task keeps, such as judgements
    if request.memory_mb is not None:
        _limit_memory(request.memory_mb << 20)
    if request.strangers:
        _yield_to_others()
    task = load_task(request.spec, request.text)
    if request.strangers and is_environment(task):
        _play_strangers(task, limited=request.memory_mb is not None)
    known = wire.Loaded(
        task.name,
        task.version,
        is_exchangeable(task),
        judges_groups=judges_groups(task),
        levels=levels_of(task),
        evaluation_size=evaluation_size_of(task),
        most_turns=task.most_turns if is_environment(task) else None,
        demonstrations={} if callable(shown := demonstrations_of(task)) else shown,
    )
    return TaskWorker(task), known


def _yield_to_others() -> None:
    """Gives our own work precedence on the cores, if the system can. The process leads its own session: on
    Linux a session weighs as much as the node's, whatever the niceness of its processes, unless the session
    itself is nice."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    with suppress(OSError), open("/proc/self/autogroup", "w") as session:
        session.write(str(NICENESS))


def _play_strangers(task: Task, *, limited: bool) -> None:
    """Bounds an environment's resources for strangers: episodes of one example at a time, and memory, unless
    that is `limited` already."""
    if (bound := getattr(task, "keep_one_example", None)) is not None:
        bound()
    taken = _taken_bytes()
    if taken is not None and not limited:
        _limit_memory(taken + (STRANGERS_MB << 20))


def _taken_bytes() -> int | None:
    """Returns memory in bytes, as `_limit_memory` counts it. None: this system does not report it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _limit_memory(size_bytes: int) -> None:
    """Makes allocations past the limit fail with a MemoryError, if the system can. Memory counts when it is
    written to, not when a library reserves it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _end_with(parent: int) -> None:
    """Ends this process when the node ends, even in the middle of a reward."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os._exit(0)


def main(channel_fd: int, trace_fd: int, parent: int) -> NoReturn:
    """Entry point of the process."""
    # Processes that a reward starts must not hold these open, or nobody would notice our end.
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(trace_fd, False)
    # A model that judges must not take the cores from training: one thread, unless the user set otherwise.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # noqa: TID251  no setting of ours, and read by libraries
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(socket.socket(fileno=channel_fd), trace_fd)
    sys.stdout.flush()
    os._exit(0)  # Threads that a task started do not keep us alive.
