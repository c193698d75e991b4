"""Writes a node's log lines to a file, and to a live panel on a terminal or as plain lines elsewhere.

run.py -> [Screen] -> node.log, stderr (stdout is kept for the last line)
                   -> [find_panel] -> registry.py -> extensions/panel/
"""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from textwrap import indent
from typing import Any, Self

from swarmnode.machine.storage import make_folder
from swarmnode.node.showing.board import Occasion, RoundLines, Watcher, Watchers, policy_label
from swarmnode.node.showing.monitors import MOST_LOG_BYTES
from swarmnode.node.showing.monitors import logger as monitors_logger
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.printable import printable, printable_lines
from swarmnode.registry import first

logger = logging.getLogger(__name__)

LOG_FILE = "node.log"
"""Its name in the log folder. A full one becomes node.log.1."""

CHATTER = ("bitsandbytes.backends.cpu.ops",)
"""Loggers of libraries that warn about something we do not use (a kernel from the hub)."""

PROGRESS_LINES = 5
"""Lines about a long preparation."""


class LiveHandler(logging.Handler):
    """A `Watcher` that also shows the lines of the log."""

    def see(self, event: Occasion, status: NodeStatus) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TerminalPanel:
    """The panel of a node on a terminal."""

    live: Callable[[], LiveHandler]
    """Starts to draw on stderr, until it is closed."""
    picture: Callable[[NodeStatus], object]
    """Returns a picture that rich prints."""


def find_panel() -> TerminalPanel | None:
    """Returns the first installed panel, or None."""
    return first("panel")


class _Showing:
    """Counts the screens of a program that show log lines: nodes that overlap need not end in the order in
    which they began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._propagates = True

    def begin(self, ours: logging.Logger) -> None:
        with self._lock:
            if not self._count:
                self._propagates = ours.propagate
            self._count += 1
            ours.propagate = False

    def end(self, ours: logging.Logger) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                ours.propagate = self._propagates


_showing = _Showing()


class Screen:
    """Sets up logging for the duration of a command. `start_watcher` hands the terminal to the panel."""

    def __init__(
        self, log_file: Path | None = None, *, terminal: bool | None = None, shows: bool = True
    ) -> None:
        """`terminal`: stderr is one; None: detect it. `shows` False: log lines go to the file only; without
        one, a program's own logging stays as it is."""
        self._log_file = log_file
        self._terminal = shows and (sys.stderr.isatty() if terminal is None else terminal)
        self._shows = shows
        self._logger = logging.getLogger("swarmnode")
        self._level = self._logger.level
        self._least = self._level or logging.INFO
        self._handlers: list[logging.Handler] = []
        self._lines: logging.Handler | None = None

    def __enter__(self) -> Self:
        # A level that a program chose for our logger is about stderr; the file has all lines.
        if self._shows or self._log_file is not None:
            self._logger.setLevel(min(self._least, logging.INFO))
        # Lines that we show are not shown twice; otherwise they still reach a program's own logging.
        if self._shows:
            _showing.begin(self._logger)
        for name in CHATTER:
            logging.getLogger(name).setLevel(logging.ERROR)
        if self._shows:
            self._lines = self._add(logging.StreamHandler(sys.stderr), "%(asctime)s %(policy)s%(message)s")
            self._lines.setLevel(self._least)
        elif self._log_file is not None:
            # People who read a tracker instead of the log still learn when it fails.
            self._add(logging.StreamHandler(sys.stderr), "%(message)s").addFilter(_of_monitors)
        if self._log_file is not None:
            self._keep_file(self._log_file)
        return self

    def __exit__(self, *error: object) -> None:
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        if self._shows:
            _showing.end(self._logger)
        if self._shows or self._log_file is not None:
            self._logger.setLevel(self._level)

    def _keep_file(self, path: Path) -> None:
        try:
            make_folder(path.parent)
            handler = LogFile(path, maxBytes=MOST_LOG_BYTES, backupCount=1, encoding="utf-8")
        except OSError as error:
            logger.warning("no log file: cannot write %s (%s)", path, error.strerror)
        else:
            line = "%(asctime)s %(levelname)s %(name)s: %(policy)s%(message)s"
            self._add(handler, line, "%Y-%m-%d %H:%M:%S")

    def progress(self, done: int, total: int, what: str) -> None:
        """Logs in a few lines how far a preparation is. Raises StoppedEarly."""
        STOP_SIGNALS.check()
        if done == 0 or done * PROGRESS_LINES // total > (done - 1) * PROGRESS_LINES // total:
            logger.info("%s: %d of %d", what, done, total)

    def panel(self) -> TerminalPanel | None:
        """Returns the panel that `start_watcher` shows. None: plain lines. Raises ConfigError."""
        shows = self._terminal and self._lines is not None and self._least <= logging.INFO
        return find_panel() if shows else None

    def start_watcher(self) -> Watcher:
        """Returns a watcher that logs a line for each round. On a terminal it includes the live panel, one
        for all policies, which also shows the other log lines there."""
        panels = self.panel()
        if self._lines is None or panels is None:
            return RoundLines()
        self._logger.removeHandler(self._lines)
        panel = panels.live()
        self._add(panel, "%(message)s").addFilter(lambda record: record.name != RoundLines.logger.name)
        return Watchers([panel, RoundLines()])

    def _add(self, handler: logging.Handler, line: str, clock: str = "%H:%M:%S") -> logging.Handler:
        handler.setFormatter(PrintableFormatter(line, datefmt=clock))
        handler.addFilter(_with_policy)
        self._logger.addHandler(handler)
        self._handlers.append(handler)
        return handler


class LogFile(RotatingFileHandler):
    """The log file. Lines that do not fit on a full disk are left out, which is reported once."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.said:
            self.said = True
            logger.warning("cannot write %s (%s): some log lines are lost", self.baseFilename, error.strerror)

    def close(self) -> None:
        with suppress(OSError):  # It tries once more to write what a full disk did not take.
            super().close()


class PrintableFormatter(logging.Formatter):
    """Formats records so that no text in them can begin a line or control a terminal, whoever wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        # The record may carry a traceback that another formatter has written.
        theirs, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = theirs

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        # Every line of a traceback is indented, so none can be taken for a line of the log.
        return indent(printable_lines(super().formatException(ei)), "    ")


def _of_monitors(record: logging.LogRecord) -> bool:
    return record.name == monitors_logger.name and record.levelno >= logging.WARNING


def _with_policy(record: logging.LogRecord) -> bool:
    record.policy = policy_label.get()
    return True
