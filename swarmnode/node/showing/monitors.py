"""Sends the numbers of a run to a file, always, and to the trackers that the settings name.

node.py -> StatusBoard -> [MonitorFeed] -> a thread for each [Monitor] -> metrics.jsonl | TensorBoard | ...

A monitor is an object with the three methods of `Monitor`. `node.monitors` names ours, or one of your own as
`mymodule:name`; a script passes objects. Each runs in its own thread, so one that hangs, raises or finds a
full disk delays nothing. The failure is logged once and counted as `monitors.failed`; the monitor still
receives the next round.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from swarmnode.errors import ConfigError
from swarmnode.machine.storage import make_folder
from swarmnode.node.showing.board import Occasion
from swarmnode.node.showing.node_status import NodeStatus, Summary, measurements, summary_of
from swarmnode.registry import find
from swarmnode.settings.config import SECTIONS, Config

logger = logging.getLogger(__name__)

MOST_LOG_BYTES = 64 * 2**20
"""Size at which a file is renamed and replaces the previous one, so that months of rounds fill no disk."""
MOST_WAITING = 256
"""Rounds that wait for a slow monitor; it misses any beyond that."""
PATIENCE_S = 30.0
"""Longest wait at the end for monitors that are still writing."""

Event = Literal["round", "evaluation"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as described to its monitors before the first round."""

    name: str
    """The node's name."""
    peer_id: str
    swarm: str
    model: str
    folder: Path
    """The folder of the node's logs, where a monitor may write."""
    settings: Mapping[str, Any]
    """Every setting by its full name, as in "training.learning_rate"."""
    run: str = ""
    """Name of the run; empty in a pipeline."""


@runtime_checkable
class Monitor(Protocol):
    """Follows a run. All three methods are called in one thread, and no error in them stops anything."""

    def start(self, run: RunInfo) -> None:
        """Called before the first `log`, and again before the next one if it raised."""
        ...

    def log(self, event: Event, round: int, values: Mapping[str, float]) -> None:
        """Called after every round and every evaluation, which has the number of the round before it.
        `values`: all known numbers by name (docs/metrics.md)."""
        ...

    def finish(self, summary: Summary) -> None:
        """Called once at the end, if `start` succeeded."""
        ...


class JsonlMonitor:
    """Appends one JSON object per event to metrics.jsonl."""

    def start(self, run: RunInfo) -> None:
        self._path = run.folder / "metrics.jsonl"
        self._whose = {"peer": run.peer_id, "run": run.run}

    def log(self, event: Event, round: int, values: Mapping[str, float]) -> None:
        append_line(self._path, {"event": event, "time": time.time(), **self._whose, **values})

    def finish(self, summary: Summary) -> None:
        pass


def make_monitors(names: Sequence[str]) -> list[Monitor]:
    """Returns the JSONL file and the monitors that `node.monitors` names: objects, or classes or functions
    that need no arguments. Raises ConfigError for anything else, and for a tracker that is not installed."""
    return [JsonlMonitor(), *(checked_monitor(find("monitor", name), name) for name in names)]


def checked_monitor(given: object, name: str = "") -> Monitor:
    """Returns an object as a monitor, or what a class or function makes without arguments. Raises ConfigError
    if it lacks a method or needs arguments."""
    shown = name or repr(given)[:80]
    if isinstance(given, type) or (callable(given) and not isinstance(given, Monitor)):
        try:
            given = cast(Callable[[], object], given)()
        except TypeError as error:
            raise ConfigError(
                f"cannot create the monitor {shown}: {error}",
                hint="pass an object, or a class that needs no arguments",
            ) from error
    if not isinstance(given, Monitor):
        raise ConfigError(
            f"{shown} is not a monitor",
            hint="it needs start(run), log(event, round, values) and finish(summary)",
        )
    return given


# ---- calling them ----


class MonitorFeed:
    """The `Watcher` that calls the monitors."""

    def __init__(self, run: RunInfo, monitors: Sequence[Monitor], patience_s: float = PATIENCE_S) -> None:
        self._told = [_Told(monitor, run) for monitor in monitors]
        self._patience_s = patience_s
        self._last: NodeStatus | None = None

    @property
    def failed(self) -> int:
        """Calls of monitors that raised, or that a slow monitor missed."""
        return sum(one.failed for one in self._told)

    def see(self, event: Occasion, status: NodeStatus) -> None:
        self._last = status
        if event != "tick":
            values = {**measurements(status), "monitors.failed": float(self.failed)}
            for one in self._told:
                one.log(event, status.progress.round, values)

    def close(self) -> None:
        """Let the monitors finish. Any that have not by the deadline are abandoned."""
        for one in self._told:
            # A monitor that was told nothing has not begun.
            one.end(None if self._last is None else summary_of(self._last))
        until = time.monotonic() + self._patience_s
        for one in self._told:
            one.thread.join(max(0.0, until - time.monotonic()))
            if one.thread.is_alive():
                logger.warning("%s has not finished; not waiting for it", one.what)
            elif one.failed:
                logger.info("%s failed %d times in this run", one.what, one.failed)


class _Told:
    """One monitor, and the calls that wait for it."""

    def __init__(self, monitor: Monitor, run: RunInfo) -> None:
        self.what = f"monitor {type(monitor).__name__}"
        self._monitor = monitor
        self._run = run
        self._waiting: queue.Queue[Callable[[], bool] | None] = queue.Queue(MOST_WAITING)
        self._begun = self._failing = False
        self._raised = self._lost = 0  # the monitor's thread counts one, the node's thread the other
        self.thread = threading.Thread(target=self._serve, name=self.what, daemon=True)
        self.thread.start()

    @property
    def failed(self) -> int:
        return self._raised + self._lost

    def log(self, event: Event, round: int, values: Mapping[str, float]) -> None:
        try:
            self._waiting.put_nowait(partial(self._log, event, round, values))
        except queue.Full:
            if not self._lost:
                logger.warning("%s is too slow and misses rounds; training continues", self.what)
            self._lost += 1

    def end(self, summary: Summary | None) -> None:
        """Let it finish after what is queued; if the queue is full, this replaces the oldest entry."""
        for call in (None,) if summary is None else (partial(self._finish, summary), None):
            with suppress(queue.Empty):
                if self._waiting.full():
                    self._waiting.get_nowait()
            self._waiting.put_nowait(call)

    def _serve(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                told = call()
            except (Exception, SystemExit) as error:  # noqa: BLE001  whoever wrote it
                self._raised += 1
                if not self._failing:
                    why = error or type(error).__name__
                    logger.warning("%s failed (%s); training continues", self.what, why)
                self._failing = True
                continue
            if self._failing and told:
                logger.info("%s works again", self.what)
                self._failing = False

    def _log(self, event: Event, round: int, values: Mapping[str, float]) -> bool:
        if not self._begun:
            self._monitor.start(self._run)
            self._begun = True
        self._monitor.log(event, round, values)
        return True

    def _finish(self, summary: Summary) -> bool:
        if self._begun:
            self._monitor.finish(summary)
        return False


def run_info(config: Config, *, name: str, peer_id: str, model: str, folder: Path, run: str = "") -> RunInfo:
    """Returns the description of a run with these settings for its monitors."""
    sections = {section: getattr(config, section).model_dump(mode="json") for section in SECTIONS}
    settings = {
        f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()
    }
    return RunInfo(name, peer_id, config.swarm.name, model, folder, settings, run)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Appends a JSON object to a file of bounded size: a full one becomes NAME.1.jsonl. Raises OSError."""
    make_folder(path.parent)
    if path.exists() and path.stat().st_size > MOST_LOG_BYTES:
        path.replace(path.with_suffix(".1.jsonl"))
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        torn = file.read(1) not in (b"\n", b"")  # A crash left half a line; only that one is lost.
        file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")
