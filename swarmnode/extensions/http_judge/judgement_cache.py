"""Judgements of a judge behind a URL, kept on disk so that no question is asked twice."""

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

BUSY_S = 5.0
"""Longest wait for another process that writes."""

AGAIN_S = 30.0
"""Seconds that a node does without the file after a failure. Another process may hold it longer than BUSY_S,
too long a wait for each judgement; and a full disk may have room again later."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS judgements"
    " (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, said BLOB)"
)

T = TypeVar("T")


class JudgementCache:
    """Answers by the digest of the request. Thread-safe."""

    def __init__(
        self,
        path: Path,
        most: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy_s: float = BUSY_S,
    ) -> None:
        """`most`: most answers that are kept."""
        self._path = path
        self._most = most
        self._clock = clock
        self._busy_s = busy_s
        self._lock = threading.Lock()
        """One thread at a time: they would keep each other from the file for longer than BUSY_S."""
        self._without_until = -math.inf

    def get(self, key: bytes) -> bytes | None:
        """Returns the kept answer, or None if there is none."""

        def found(file: sqlite3.Connection) -> bytes | None:
            row = file.execute("SELECT said FROM judgements WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

        return self._with_file(found)

    def put(self, key: bytes, said: bytes) -> None:
        """Keeps an answer and deletes the oldest ones."""

        def keep(file: sqlite3.Connection) -> None:
            file.execute("INSERT OR IGNORE INTO judgements (key, said) VALUES (?, ?)", (key, said))
            (newest,) = file.execute("SELECT COALESCE(MAX(number), 0) FROM judgements").fetchone()
            file.execute("DELETE FROM judgements WHERE number <= ?", (newest - self._most,))

        self._with_file(keep)

    def _with_file(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Returns the result of `work` on the file. None: the cache does without the file for now."""
        with self._lock:
            if self._clock() < self._without_until:
                return None
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(self._path, timeout=self._busy_s)) as file, file:
                    file.execute(_TABLE)
                    return work(file)
            except (sqlite3.Error, OSError) as error:
                self._do_without(error)
        return None

    def _do_without(self, error: Exception) -> None:
        first = self._without_until == -math.inf
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "judgements are not cached for now: %s: %s", self._path, error)
        self._without_until = self._clock() + AGAIN_S
