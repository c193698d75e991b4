"""A task whose code runs in separate processes, as the node sees it.

loader.py, path -> [isolate] -> IsolatedTask -> worker_pool.py -> task_process.py -> socket -> worker.py

A node has several processes for its own rollouts (tasks.workers) and one for those of strangers, so that a
stranger's answer that hangs a reward costs our own rollouts nothing.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.chat import Message, Said, Turn, read_prompt, written_prompt
from swarmnode.errors import JudgementLost, TaskError
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.drawing.draw_digest import written_down
from swarmnode.tasks.loader import load_task
from swarmnode.tasks.processes import worker_messages as wire
from swarmnode.tasks.processes.task_process import KnownTask, ProcessOptions, TaskProcess
from swarmnode.tasks.processes.worker_pool import WorkerPool
from swarmnode.tasks.source_file import read_source
from swarmnode.tasks.specs import TaskKind, absolute, parse_spec
from swarmnode.tasks.task import DEMONSTRATED_SEED, Isolated, Task
from swarmnode.types import Example, ExampleKey

FIRST_ROWS, MOST_ROWS = 16, 256
"""Examples requested at once: first FIRST_ROWS, enough for a round's share of a task, then four times as many
each time."""

MOST_WORKERS = 4
"""Most processes of one task without a setting: judges that wait for something need more than there are
cores, and those that compute take cores from training."""

SMALL_BYTES = 512 << 20
"""Largest resident memory, in bytes, at which a task without a setting gets several processes. A larger one
(a data set, a model that judges) has one."""


class IsolatedTask(Isolated):
    """A task whose code runs in another process. Raises JudgementLost if that process does not answer."""

    most_turns: int
    """Most turns of the policy; only an environment has this attribute (is_environment)."""

    def __init__(self, process: WorkerPool, load: wire.Load, known: KnownTask) -> None:
        """`process`: one process of the task, or a pool of them."""
        loaded = known.loaded
        assert loaded is not None, "the first process was started"
        self._process = process
        self._load = load
        self._known = known
        self.task, self.version = loaded, loaded.version
        if loaded.most_turns is not None:
            self.most_turns = loaded.most_turns

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the file's own examples, with the columns that can be serialized."""
        start, count = 0, FIRST_ROWS
        while True:
            drawn = self._process.ask(wire.Draw(seed, start, count))
            assert isinstance(drawn, wire.Drawn)
            for index, row in enumerate(drawn.rows, start):
                key = ExampleKey(self.name, self.version, seed, index)
                yield Example(key, read_prompt(row.prompt), row.columns, row.conversational)
            if drawn.failure is not None:
                raise TaskError(drawn.failure.message, hint=drawn.failure.hint)
            if len(drawn.rows) < count:
                return
            start, count = start + count, min(4 * count, MOST_ROWS)

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the scores of the file's own rewards, for the example as its process draws it, or as it was
        given if it belongs to no draw."""
        key = example.key
        given = written_down(example) if key.seed == DEMONSTRATED_SEED else None
        asked = wire.Score(key.seed, key.index, written_prompt(example.prompt), tuple(completions), given)
        scored = self._process.ask(asked, self._affinity(key))
        if isinstance(scored, wire.OtherExample):
            scored = self._process.first_of_all(asked, lambda reply: isinstance(reply, wire.Scored)) or scored
        if isinstance(scored, wire.OtherExample):
            raise self._draws_otherwise()
        assert isinstance(scored, wire.Scored)
        return list(scored.scores)

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the answer of the file's own environment. Raises JudgementLost if the episode is gone."""
        key = example.key
        asked = wire.Observe(key.seed, key.index, written_prompt(example.prompt), tuple(turns))
        observed = self._process.ask(asked, self._affinity(key))
        if isinstance(observed, wire.OtherExample):
            raise self._draws_otherwise()
        assert isinstance(observed, wire.Observed)
        if observed.lost:
            raise JudgementLost(observed.lost)
        return observed.messages

    def digest(self) -> wire.Digested:
        """Draws everything anew and returns its digest."""
        digested = self._process.ask(wire.Digest())
        assert isinstance(digested, wire.Digested)
        return digested

    def for_strangers(self, timeout_s: float, turn_timeout_s: float | None = None) -> "IsolatedTask":
        load = msgspec.structs.replace(self._load, strangers=True)
        options = ProcessOptions(timeout_s, turn_timeout_s, load_wait_s=timeout_s)
        return IsolatedTask(_pool_of(load, options, 1, self._known), load, self._known)

    @property
    def spec(self) -> str:
        return self._load.spec

    @property
    def workers(self) -> int:
        return self._process.most

    def interrupt(self) -> None:
        self._process.interrupt()

    def close(self) -> None:
        self._process.close()

    def _affinity(self, key: ExampleKey) -> int | None:
        """Returns the number that keeps an environment's example in one process. None: any process may
        judge."""
        return zlib.crc32(f"{key.seed}/{key.index}".encode()) if hasattr(self, "most_turns") else None

    def _draws_otherwise(self) -> TaskError:
        return TaskError(
            f"{self.name} draws different examples each time it is started",
            hint="draw only from random.Random(seed); see `swarmnode task check`",
        )


def isolate(
    spec: str,
    timeout_s: float,
    *,
    builtin: bool = False,
    unconfined: bool = False,
    workers: int | None = 1,
    memory_mb: int | None = None,
    home: Path | None = None,
    **options: Any,
) -> Task:
    """Loads a task as `load_task` does, but other people's code in separate processes. The caller closes it.
    Built-in tasks are ours and always return: they stay in this process, unless `builtin`. `unconfined`:
    programs of its rewards run without a sandbox if there is none. `workers`: most processes (None:
    MOST_WORKERS, or one if it is large). `memory_mb`: most memory of each. `home`: the node's folder (None:
    from the environment). `options`: further fields of ProcessOptions."""
    asked = parse_spec(spec)
    if asked.kind != TaskKind.BUILTIN:
        asked = absolute(asked)
        text = read_source(Path(asked.name)) if asked.kind == TaskKind.FILE else None
        load = wire.Load(str(asked), text, unconfined, memory_mb, None if home is None else str(home))
    elif builtin:
        load = wire.Load(load_task(spec).name, None)
    else:
        return load_task(spec)
    known = KnownTask()
    pool = _pool_of(load, ProcessOptions(timeout_s, **options), workers, known)
    pool.start()
    return IsolatedTask(pool, load, known)


def isolate_as_set(spec: str, config: TasksConfig, **options: Any) -> Task:
    """Loads a task as `isolate` does, with the limits and rights of the settings. `options`: those of
    `isolate`, which take precedence."""
    limits: dict[str, Any] = {
        "unconfined": config.sandbox == "optional",
        "workers": config.workers,
        "memory_mb": config.memory_mb,
        "turn_timeout_s": config.turn_timeout_s,
    }
    return isolate(spec, config.score_timeout_s, **{**limits, **options})


def _pool_of(load: wire.Load, options: ProcessOptions, workers: int | None, known: KnownTask) -> WorkerPool:
    """Returns the pool of a task's processes, none of them started."""
    count = MOST_WORKERS if workers is None else workers
    processes = [TaskProcess(load, options, known) for _ in range(count)]
    return WorkerPool(
        processes, may_grow=lambda: workers is not None or processes[0].resident_bytes < SMALL_BYTES
    )
