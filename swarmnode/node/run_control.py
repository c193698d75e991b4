"""Requests of people to a running node: pause, resume, finish the round, stop.

page, commands, signals -> [RunControl] -> node.py -> lifecycle.py

`finish` ends the run behind the round that runs; `stop` ends it as soon as the work in hand can be put down.
Both write a checkpoint. A paused node stays in its swarm and gives others what it has.
"""

import math
import time
from collections.abc import Callable
from typing import Literal

Request = Literal["pause", "resume", "finish", "stop"]

REQUESTS: tuple[Request, ...] = ("pause", "resume", "finish", "stop")


class RunControl:
    """The requests to one node so far. `ask` may be called from any thread.

    >>> control = RunControl(lambda: None)
    >>> control.ask("pause"), control.paused, control.ask("resume"), control.paused
    ('pauses when this round is done', True, 'goes on', False)
    """

    def __init__(self, stop: Callable[[], object], takes: tuple[Request, ...] = REQUESTS) -> None:
        """`stop`: puts down the work in hand, from any thread. `takes`: requests that this kind of node can
        follow."""
        self.takes = takes
        self.ending = False
        """The run ends as soon as the round allows."""
        self._stop = stop
        self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        return time.time() < self._paused_until

    @property
    def until(self) -> str:
        """When a pause ends, in words; empty without one."""
        if not self.paused:
            return ""
        if self._paused_until == math.inf:
            return "until resumed"
        return time.strftime("until %H:%M on %Y-%m-%d", time.localtime(self._paused_until))

    def ask(self, request: Request, for_s: float | None = None) -> str:
        """Takes a request and returns what follows from it, in words. `for_s`: how long a pause lasts; None:
        until `resume`. Raises ValueError for a request that this node cannot follow."""
        if request not in self.takes:
            raise ValueError(f"this node takes {', '.join(self.takes)}, not {request}")
        match request:
            case "pause":
                self._paused_until = math.inf if for_s is None else time.time() + for_s
                return "pauses when this round is done"
            case "resume":
                self._paused_until = 0.0
                return "goes on"
            case "finish":
                self.ending = True
                return "ends when this round is done, with a checkpoint"
            case "stop":
                self.ending = True
                self._stop()
                return "ends now, with a checkpoint"
