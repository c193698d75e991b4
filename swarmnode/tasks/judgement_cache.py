"""What a judge behind a URL said, kept on disk: the same question is not asked twice.

http_judge.py -> [JudgementCache] -> judgements.sqlite

Several processes share the file. It is bounded, the oldest go first, and a node does without it where it
cannot be written.
"""

import logging
import sqlite3
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

BUSY_S = 5.0
"""Longest wait for another process that writes."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS judgements"
    " (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, said BLOB)"
)


class JudgementCache:
    """Answers by the digest of what was asked. May be used by several threads."""

    def __init__(self, path: Path, most: int) -> None:
        """`most`: answers that are kept. 0: none."""
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None

    def get(self, key: bytes) -> bytes | None:
        """What was said then; None: it is not known."""
        with self._lock:
            try:
                row = self._opened().execute("SELECT said FROM judgements WHERE key = ?", (key,)).fetchone()
            except (sqlite3.Error, OSError) as error:
                return self._do_without(error)
        return None if row is None else row[0]

    def put(self, key: bytes, said: bytes) -> None:
        """Keep it, and let go of the oldest."""
        with self._lock:
            try:
                file = self._opened()
                with file:
                    file.execute("INSERT OR IGNORE INTO judgements (key, said) VALUES (?, ?)", (key, said))
                    (newest,) = file.execute("SELECT COALESCE(MAX(number), 0) FROM judgements").fetchone()
                    file.execute("DELETE FROM judgements WHERE number <= ?", (newest - self._most,))
            except (sqlite3.Error, OSError) as error:
                self._do_without(error)

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            if self._most:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            place = self._path if self._most else ":memory:"
            self._file = sqlite3.connect(place, timeout=BUSY_S, check_same_thread=False)
            self._file.execute(_TABLE)
        return self._file

    def _do_without(self, error: Exception) -> None:
        logger.warning("what judges say is not kept: %s: %s", self._path, error)
        self._most, self._file = 0, None
