"""Who is told what happened: the JSONL file always, a panel on a terminal, plain lines elsewhere.

node.py -> [Monitor]s -> metrics.jsonl | panel.py | a stream
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, TextIO

from swarmnode.node.status import NodeStatus, measurements

logger = logging.getLogger(__name__)

policy_label: ContextVar[str] = ContextVar("policy_label", default="")
"""The policy's label before every line of the story that is about one of several policies; empty with one."""

MOST_LOG_BYTES = 64 * 2**20
"""Then the file is put aside once, so that a node that runs for months keeps its disk."""


class Monitor(Protocol):
    """Told after every round and evaluation, and on every tick (about twice a second)."""

    def round_done(self, status: NodeStatus) -> None: ...

    def evaluated(self, status: NodeStatus) -> None: ...

    def tick(self, status: NodeStatus) -> None: ...

    def close(self) -> None: ...


class JsonlMonitor:
    """Appends one JSON object per event. A full disk pauses the log, says so once, and is tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._paused = False

    def round_done(self, status: NodeStatus) -> None:
        self._append("round", status)

    def evaluated(self, status: NodeStatus) -> None:
        self._append("evaluation", status)

    def tick(self, status: NodeStatus) -> None:
        pass

    def close(self) -> None:
        pass

    def _append(self, event: str, status: NodeStatus) -> None:
        record = {"event": event, "time": time.time(), "peer": status.peer_id, **measurements(status)}
        try:
            self._write(json.dumps(record))
        except OSError as error:
            if not self._paused:
                logger.warning(
                    "metrics paused: cannot write %s (%s); training goes on", self.path, error.strerror
                )
            self._paused = True
            return
        if self._paused:
            logger.info("metrics resumed: %s can be written again", self.path)
        self._paused = False

    def _write(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > MOST_LOG_BYTES:
            self.path.replace(self.path.with_suffix(".1.jsonl"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class PlainMonitor:
    """One line per round, without escape codes."""

    def __init__(self, stream: TextIO, label: str = "") -> None:
        """`label` says whose rounds these are, where several policies write to one stream."""
        self._stream = stream
        self._label = label

    def round_done(self, status: NodeStatus) -> None:
        self._stream.write(f"{time.strftime('%H:%M:%S')} {self._label}{round_line(status)}\n")
        self._stream.flush()

    def evaluated(self, status: NodeStatus) -> None:
        pass

    def tick(self, status: NodeStatus) -> None:
        pass

    def close(self) -> None:
        self._stream.flush()


class Monitors:
    """Several monitors as one. One whose output is gone (a closed pipe) is dropped; the node goes on."""

    def __init__(self, members: Sequence[Monitor]) -> None:
        self._members = list(members)

    def round_done(self, status: NodeStatus) -> None:
        self._each(lambda member: member.round_done(status))

    def evaluated(self, status: NodeStatus) -> None:
        self._each(lambda member: member.evaluated(status))

    def tick(self, status: NodeStatus) -> None:
        self._each(lambda member: member.tick(status))

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, tell: Callable[[Monitor], None]) -> None:
        for member in tuple(self._members):
            try:
                tell(member)
            except OSError as error:
                self._members.remove(member)
                logger.warning("%s stops showing anything: %s", type(member).__name__, error)


def round_line(status: NodeStatus) -> str:
    """A round in one line: reward, data, speed, swarm."""
    training, progress = status.training, status.progress
    book = f", {training.replayed} of {training.book} answers in the book" if training.book else ""
    limit = f"/{progress.rounds_limit}" if progress.rounds_limit is not None else ""
    return (
        f"round {progress.round}{limit}  reward {shown(status.reward.own)} own"
        f" {shown(status.reward.external)} external"
        f"  trained on {training.own_groups} own + {training.external_groups} external groups{book}"
        f"  {shown(status.speed.tokens_per_s, '.0f')} tokens/s  {status.network.peers} peers"
        f"  accepted {status.exchange.accepted} dropped {sum(status.exchange.dropped.values())}"
    )


def shown(value: float | None, spec: str = ".3f") -> str:
    """A number, or `-` for what is unknown.

    >>> shown(None), shown(0.25)
    ('-', '0.250')
    """
    return "-" if value is None else format(value, spec)
