"""Looks after the machine of a running node, in a thread of its own, and pauses it while it is wanted.

building/guards.py -> [guard_machine] -> machine_readings.py -> reasons_to_pause.py -> RunControl.hold
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import copy_context

from swarmnode.extensions.limits.machine_readings import card_of, read_machine
from swarmnode.extensions.limits.reasons_to_pause import Readings, Reasons, reasons_to_pause
from swarmnode.node.building.guards import GuardSource

LOOK_S = 5.0
"""Seconds between two looks."""

LONGEST_LOOK_S = 20.0
"""Longest wait for a look under way when the node ends."""


class PauseWatch:
    """Holds the run back while this machine is wanted for something else."""

    def __init__(self, source: GuardSource, read: Callable[[], Readings]) -> None:
        self._source, self._read = source, read
        self._found = Reasons()

    def look(self) -> None:
        """Reads, decides, and tells the run."""
        before = self._found
        self._found = reasons_to_pause(self._source.config.limits, self._read(), before)
        for guard in dict.fromkeys((*before.words, *self._found.words)):
            self._source.control.hold(guard, self._found.words.get(guard, ""))


@contextmanager
def guard_machine(source: GuardSource) -> Generator[None]:
    """Looks after the machine while the block runs."""
    ended = threading.Event()

    def keep_looking() -> None:
        card = card_of(source.config.policy.device)
        watch = PauseWatch(source, lambda: read_machine(source.config, card))
        while not ended.is_set():
            watch.look()
            ended.wait(LOOK_S)

    # With our context: log lines say which policy they are about.
    thread = threading.Thread(target=copy_context().run, args=(keep_looking,), name="limits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LONGEST_LOOK_S)
