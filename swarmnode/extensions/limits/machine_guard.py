"""Looks after the machine of a running node, in a thread of its own, and pauses it while it is wanted.

building/guards.py -> [guard_machine] -> machine_readings.py -> reasons_to_pause.py -> RunControl.hold
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import count

from swarmnode.errors import StorageError
from swarmnode.extensions.limits.disk_limit import make_room
from swarmnode.extensions.limits.machine_readings import read_machine
from swarmnode.extensions.limits.notices import send_notice
from swarmnode.extensions.limits.reasons_to_pause import Readings, Reasons, reasons_to_pause
from swarmnode.extensions.limits.trouble_watch import TroubleWatch, ended_by
from swarmnode.machine.hardware import GIB, card_in_use
from swarmnode.node.showing.node_source import NodeSource

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks."""

LOOKS_A_MINUTE = 12
"""Looks between two at the disk and at trouble, which take longer or change slowly."""

DISK = "disk"
"""Name of the hold of limits.disk_gb."""

DISK_HINT = "raise the limit (--max-disk), or remove a run: `swarmnode runs` lists them with their sizes"

LONGEST_LOOK_S = 20.0
"""Longest wait for a look under way when the node ends."""


class PauseWatch:
    """Holds the run back while this machine is wanted for something else."""

    def __init__(self, source: NodeSource, read: Callable[[], Readings]) -> None:
        self._source, self._read = source, read
        self._found = Reasons()

    def look(self) -> None:
        """Reads, decides, and tells the run."""
        before = self._found
        self._found = reasons_to_pause(self._source.config.limits, self._read(), before)
        for guard in dict.fromkeys((*before.words, *self._found.words)):
            self._source.control.hold(guard, self._found.words.get(guard, ""))

    def let_go(self) -> None:
        """Forgets what was found, and holds nothing back."""
        for guard in (*self._found.words, DISK):
            self._source.control.hold(guard, "")
        self._found = Reasons()


def trouble_with_disk(source: NodeSource) -> str:
    """Makes room in the home where it has to. Returns what is wrong where that is not enough."""
    most = source.config.limits.disk_gb
    return "" if most is None else make_room(source.paths, most * GIB, source.status().run)


@contextmanager
def guard_machine(source: NodeSource) -> Generator[None]:
    """Looks after the machine while the block runs. Raises StorageError where the home is too large."""
    if wrong := trouble_with_disk(source):
        raise StorageError(f"{wrong}, and nothing is left to delete automatically", hint=DISK_HINT)
    ended, notify = threading.Event(), source.config.node.notify.get_secret_value()

    def keep_looking() -> None:
        card = card_in_use(source.config.policy.device)
        watch = PauseWatch(source, lambda: read_machine(source.config, card))
        trouble = TroubleWatch(source.status, partial(send_notice, notify))
        failing = False
        for number in count():
            try:
                watch.look()
                if number % LOOKS_A_MINUTE == LOOKS_A_MINUTE - 1:
                    source.control.hold(DISK, trouble_with_disk(source))
                    trouble.look()
                failing = False
            except Exception:
                # Drivers and files may raise anything. A run that nobody lets go of again is worse than one
                # that gives no way for a while.
                watch.let_go()
                if not failing:
                    logger.exception(
                        "cannot monitor this machine: until this works, nothing holds rounds back"
                    )
                failing = True
            if ended.wait(LOOK_S):
                return

    # With our context: log lines say which policy they are about.
    thread = threading.Thread(target=copy_context().run, args=(keep_looking,), name="limits", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        send_notice(notify, ended_by(error, source.status()))
        raise
    finally:
        ended.set()
        thread.join(LONGEST_LOOK_S)
