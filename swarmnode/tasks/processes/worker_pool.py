"""Several processes for the code of one task: a request takes a free one, and a lost one is replaced."""

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnode.errors import JudgementLost, SwarmnodeError
from swarmnode.tasks.deadlines.daemon_threads import in_daemon_thread
from swarmnode.tasks.deadlines.work_clock import off_the_clock
from swarmnode.tasks.processes.task_process import TaskProcess
from swarmnode.tasks.processes.worker_messages import Loaded, Reply, Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """A process of the pool. `ready`: as far as we know, it has loaded the task."""

    runner: TaskProcess
    ready: bool = False
    busy: bool = False


class WorkerPool:
    """Processes of one task. All methods may be called from any thread."""

    def __init__(
        self, processes: Sequence[TaskProcess], *, may_grow: Callable[[], bool] = lambda: True
    ) -> None:
        """`processes`: none of them started. `may_grow`: asked once, when a second process is needed."""
        self._slots = [_Slot(process) for process in processes]
        self._may_grow = may_grow
        self._width: int | None = None
        self._changed = threading.Condition()
        self._interrupts = 0
        self._closed = False

    @property
    def most(self) -> int:
        """Most processes of this pool."""
        return len(self._slots)

    def start(self) -> Loaded:
        """Starts the first process. Raises JudgementLost, or TaskError if the task cannot be loaded."""
        with self._taken(self._interrupts, 0) as slot:
            return slot.runner.start()

    def ask(self, request: Request, affinity: int | None = None) -> Reply:
        """Sends a request to a free process, with a deadline of its own. `affinity`: equal numbers go to the
        same process. Raises TaskError for an error of the task, JudgementLost if it did not answer."""
        with off_the_clock(), self._taken(self._interrupts, affinity) as slot:
            return slot.runner.ask(request)

    def first_of_all(self, request: Request, is_answer: Callable[[Reply], bool]) -> Reply | None:
        """Asks the processes that are ready, one after another, and returns the first answer. None: none of
        them has one."""
        for number, slot in enumerate(self._slots):
            if slot.ready and is_answer(reply := self.ask(request, number)):
                return reply
        return None

    def interrupt(self) -> None:
        """Ends all processes at once; requests that wait for an answer raise JudgementLost."""
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()
        for slot in self._slots:
            slot.runner.interrupt()

    def close(self) -> None:
        """Ends all processes for good."""
        self._closed = True
        self.interrupt()
        for slot in self._slots:
            slot.runner.close()

    @contextmanager
    def _taken(self, interrupts: int, affinity: int | None) -> Generator[_Slot, None, None]:
        with self._changed:
            slot = self._wait_for_one(interrupts, affinity)
            slot.busy = True
        ready = True
        try:
            yield slot
        except JudgementLost:
            ready = False
            raise
        finally:
            with self._changed:
                slot.ready, slot.busy = ready, False
                self._changed.notify_all()

    def _wait_for_one(self, interrupts: int, affinity: int | None) -> _Slot:
        while True:
            if self._interrupts != interrupts or self._closed:
                raise JudgementLost(f"task {self._slots[0].runner.name} was stopped")
            if (slot := self._free(affinity)) is not None:
                return slot
            self._changed.wait()

    def _free(self, affinity: int | None) -> _Slot | None:
        """Returns the process for a request now, or None if it has to wait. Starts another one if all are
        busy."""
        if affinity is not None:
            slot = self._slots[affinity and affinity % self._allowed()]
            return None if slot.busy else slot
        if (chosen := next_free(self._slots)) is not None:
            return chosen
        beside = next(
            (slot for slot in self._slots[: self._allowed()] if not slot.ready and not slot.busy), None
        )
        if beside is not None:
            self._start_beside(beside)
        return None

    def _allowed(self) -> int:
        if self._width is None:
            self._width = len(self._slots) if len(self._slots) == 1 or self._may_grow() else 1
        return self._width

    def _start_beside(self, slot: _Slot) -> None:
        slot.busy = True
        interrupts = self._interrupts

        def started() -> None:
            ready = False
            try:
                slot.runner.start()
                ready = True
            except SwarmnodeError as error:
                if self._interrupts == interrupts:
                    logger.warning("task %s continues with fewer processes: %s", slot.runner.name, error)
                    self._width = max(1, self._slots.index(slot))
            finally:
                with self._changed:
                    slot.ready, slot.busy = ready, False
                    self._changed.notify_all()

        in_daemon_thread(started)


def next_free(slots: Sequence[_Slot]) -> _Slot | None:
    """Returns the first process that is ready and free. If none is ready or loading, the first one: the
    request waits while it loads."""
    found = next((slot for slot in slots if slot.ready and not slot.busy), None)
    if found is None and not any(slot.ready or slot.busy for slot in slots):
        return slots[0]
    return found
