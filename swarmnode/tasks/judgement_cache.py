"""What a judge behind a URL said, kept on disk: the same question is not asked twice.

http_judge.py -> [JudgementCache] -> judgements.sqlite

Several processes share the file. It is bounded, the oldest go first, and a node does without it for a while
where it cannot be used.
"""

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

BUSY_S = 5.0
"""Longest wait for another process that writes."""

AGAIN_S = 30.0
"""So long a node does without the file once it failed: another process may hold it longer than BUSY_S, which
nobody waits for with each judgement, and a full disk may have room again."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS judgements"
    " (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, said BLOB)"
)

T = TypeVar("T")


class JudgementCache:
    """Answers by the digest of what was asked. May be used by several threads."""

    def __init__(
        self,
        path: Path,
        most: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy_s: float = BUSY_S,
    ) -> None:
        """`most`: answers that are kept. 0: none."""
        self._path = path
        self._most = most
        self._clock = clock
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        self._without_until = -math.inf

    def get(self, key: bytes) -> bytes | None:
        """What was said then; None: it is not known."""

        def found(file: sqlite3.Connection) -> bytes | None:
            row = file.execute("SELECT said FROM judgements WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

        return self._with_file(found)

    def put(self, key: bytes, said: bytes) -> None:
        """Keep it, and let go of the oldest."""

        def keep(file: sqlite3.Connection) -> None:
            with file:
                file.execute("INSERT OR IGNORE INTO judgements (key, said) VALUES (?, ?)", (key, said))
                (newest,) = file.execute("SELECT COALESCE(MAX(number), 0) FROM judgements").fetchone()
                file.execute("DELETE FROM judgements WHERE number <= ?", (newest - self._most,))

        self._with_file(keep)

    def _with_file(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns. None: we do without the file."""
        with self._lock:
            if not self._most or self._clock() < self._without_until:
                return None
            try:
                return work(self._opened())
            except (sqlite3.Error, OSError) as error:
                self._do_without(error)
        return None

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path, timeout=self._busy_s, check_same_thread=False)
            self._file.execute(_TABLE)
        return self._file

    def _do_without(self, error: Exception) -> None:
        first = self._without_until == -math.inf
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "what judges say is not kept for now: %s: %s", self._path, error)
        self._without_until = self._clock() + AGAIN_S
        if self._file is not None:
            self._file.close()
            self._file = None
