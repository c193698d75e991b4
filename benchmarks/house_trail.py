"""A real `swarmnode join` that writes down which modules it loaded and by which frames it came to its loss.

house.py -> a process of its own: [main] -> swarmnode join ... -> modules and frames as JSON in a file

A stack ends where a coroutine or a thread begins. Trail goes on with whoever started the coroutine or handed
the work to the thread, so that what a reader follows through the source is one list.
"""

import asyncio
import atexit
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

LOSS_MODULE, LOSS = "swarmnode.training.losses", "policy_loss"
"""The function that computes the loss of a micro-batch, whatever its name in the settings."""

COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Frames of their own in Python 3.11 and no longer in 3.12: they count in neither."""


@dataclass(frozen=True)
class Step:
    """One frame of ours on the way: a function, and the file that it stands in."""

    file: str
    function: str


class Trail:
    """The frames below one folder that led to where we are, through coroutines and thread pools."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._of_tasks: WeakKeyDictionary[asyncio.Task[Any], list[Step]] = WeakKeyDictionary()
        self._of_threads = threading.local()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note who starts a task or hands work to a pool, as long as the context is open."""
        create_task, submit = asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit

        def noted_task(loop: Any, coroutine: Any, **options: Any) -> Any:
            task = create_task(loop, coroutine, **options)
            self._of_tasks[task] = self.here()
            return task

        def noted_work(pool: Any, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
            return submit(pool, self._behind(self.here(), work), *arguments, **options)

        asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit = noted_task, noted_work  # type: ignore
        try:
            yield
        finally:
            asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit = create_task, submit  # type: ignore

    def here(self) -> list[Step]:
        """From the first frame of ours in this process to the caller's."""
        found: list[Step] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _runs_tasks(frame):
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(self._folder) and frame.f_code.co_name not in COMPREHENSIONS:
                found.append(Step(path.relative_to(self._folder).as_posix(), frame.f_code.co_qualname))
            frame = frame.f_back
        return [*self._origin(frame), *reversed(found)]

    def _origin(self, frame: FrameType | None) -> Sequence[Step]:
        if frame is None:
            return getattr(self._of_threads, "origin", ())
        task = asyncio.current_task()
        return () if task is None else self._of_tasks.get(task, ())

    def _behind(self, origin: list[Step], work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self._of_threads.origin = origin
            return work(*arguments, **options)

        return run


def _runs_tasks(frame: FrameType) -> bool:
    """Whether this is the event loop calling a coroutine: what lies below it did not start that one."""
    return frame.f_code.co_qualname == "Handle._run" and frame.f_globals["__name__"] == "asyncio.events"


def from_join_to_loss(steps: Sequence[Step]) -> Sequence[Step]:
    """The frames from the command `join` to the loss, both included. Raises ValueError when there are none:
    then somebody hands work on in a way that Trail does not know."""
    for place, step in enumerate(steps):
        if step == Step("cli/join.py", "join"):
            return steps[place:]
    raise ValueError(f"no way leads from `join` to {LOSS}, only {[step.function for step in steps]}")


def modules_of(package: str, loaded: Sequence[str]) -> list[str]:
    """The names among `loaded` that are of a package, it and its own packages included.

    >>> modules_of("swarm", ["swarm.node", "swarmnode", "swarm"])
    ['swarm', 'swarm.node']
    """
    return sorted(name for name in loaded if name == package or name.startswith(f"{package}."))


def main() -> None:
    """`sys.argv`: the file to write, then the arguments of `swarmnode`."""
    from importlib import import_module

    import swarmnode

    out, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    trail = Trail(Path(swarmnode.__file__).parent)
    ways: list[list[Step]] = []
    # Before anybody else imports the function from there. The trainer would load the module in any case.
    losses = import_module(LOSS_MODULE)
    loss = getattr(losses, LOSS)
    place = Step(f"{LOSS_MODULE.removeprefix('swarmnode.').replace('.', '/')}.py", LOSS)

    def noted_loss(*arguments: Any, **options: Any) -> Any:
        if not ways:
            ways.append([*trail.here(), place])
        return loss(*arguments, **options)

    def write() -> None:
        found = {
            "modules": modules_of("swarmnode", list(sys.modules)),
            "ways": [list(map(asdict, w)) for w in ways],
        }
        out.write_text(json.dumps(found))

    setattr(losses, LOSS, noted_loss)
    atexit.register(write)
    from swarmnode.cli.app import main as swarmnode_main

    with trail.followed():
        swarmnode_main()
