"""Requests that people make to a running node: pause, resume, finish the round, stop.

page, commands, signals -> [RunControl] -> node.py -> lifecycle.py
guards (building/guards.py) -> [RunControl.hold] -> the same

A guard holds the run back while it has a reason. People take precedence: `pause` lasts whatever a guard
finds, and `resume` continues despite the present reasons; each counts again once it has gone away. `finish`
ends the run after the current round; `stop` ends it as soon as the current work can be interrupted. Both
write a checkpoint. A paused node stays in its swarm and still serves others.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger(__name__)

Request = Literal["pause", "resume", "finish", "stop"]

REQUESTS: tuple[Request, ...] = ("pause", "resume", "finish", "stop")

LONGEST_PAUSE_S = 366 * 86400.0
"""Longest duration that a pause may name; a pause without one has no end."""


class RunControl:
    """The requests to one node so far. `ask` may be called from any thread.

    >>> control = RunControl(lambda: None)
    >>> control.ask("pause"), control.paused, control.ask("resume"), control.paused
    ('pausing after this round', True, 'resuming', False)
    """

    def __init__(
        self,
        stop: Callable[[], object],
        takes: tuple[Request, ...] = REQUESTS,
        stopping: str = "stopping now, with a checkpoint",
    ) -> None:
        """`stop`: interrupts the current work, from any thread. `takes`: the supported requests. `stopping`:
        the answer to `stop`."""
        self.takes = takes
        self.ending = False
        """True if the run ends as soon as the round allows."""
        self._stop, self._stopping = stop, stopping
        self._paused_until = 0.0
        self._reasons: dict[str, str] = {}
        self._overruled: set[str] = set()
        self._changing = threading.Lock()

    @property
    def paused(self) -> bool:
        return self._paused_by_hand or bool(self.held)

    @property
    def held(self) -> str:
        """Reasons that hold the run back, in words. Empty: there are none, or a person has overruled them."""
        with self._changing:
            return ", ".join(why for guard, why in self._reasons.items() if guard not in self._overruled)

    @property
    def until(self) -> str:
        """Until when, or for what reason, the run is paused, in words. Empty: it is not."""
        if not self._paused_by_hand:
            return self.held
        if self._paused_until == math.inf:
            return "until resumed"
        return time.strftime("until %H:%M on %Y-%m-%d", time.localtime(self._paused_until))

    def hold(self, guard: str, reason: str) -> None:
        """Holds the run back until this guard gives an empty reason. Thread-safe."""
        with self._changing:
            before = self._reasons.get(guard, "")
            if reason:
                self._reasons[guard] = reason
            else:
                self._reasons.pop(guard, None)
                self._overruled.discard(guard)
        if reason and not before:
            logger.info("pausing after this round: %s", reason)
        elif before and not reason:
            logger.info("no longer a reason to pause: %s", before)

    def ask(self, request: Request, for_s: float | None = None) -> str:
        """Takes a request and returns its effect in words. `for_s`: duration of a pause; None: until
        `resume`. Raises ValueError for a request that this node does not support."""
        if request not in self.takes:
            raise ValueError(f"this node takes {', '.join(self.takes)}, not {request}")
        match request:
            case "pause":
                self._paused_until = math.inf if for_s is None else time.time() + for_s
                logger.info("pausing after this round, as requested: %s", self.until)
                return "pausing after this round"
            case "resume":
                if not self.paused:
                    return "not paused; it keeps running"
                held, self._paused_until = self.held, 0.0
                with self._changing:
                    self._overruled |= self._reasons.keys()
                words = f"resuming despite this: {held}" if held else "resuming"
                logger.info("as requested, %s", words)
                return words
            case "finish":
                self.ending = True
                return "stopping after this round, with a checkpoint"
            case "stop":
                self.ending = True
                self._stop()
                return self._stopping

    @property
    def _paused_by_hand(self) -> bool:
        return time.time() < self._paused_until
