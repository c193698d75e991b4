"""Judgements of a judge behind a URL, kept on disk so that no question is asked twice."""

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

BUSY_S = 1.0
"""Longest wait for another process that writes: a judge can be asked again."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS judgements"
    " (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, said BLOB)"
)


@dataclass(slots=True)
class JudgementCache:
    """Answers by the digest of the request, for all threads and processes. A file that cannot be used is done
    without, which is said once."""

    path: Path
    most: int
    """Most answers that are kept."""
    busy_s: float = BUSY_S
    _told: bool = False

    def get(self, key: bytes) -> bytes | None:
        """Returns the kept answer, or None if there is none."""
        rows = self._rows(("SELECT said FROM judgements WHERE key = ?", (key,)))
        return rows[0][0] if rows else None

    def put(self, key: bytes, said: bytes) -> None:
        """Keeps an answer and deletes the oldest ones."""
        self._rows(
            ("INSERT OR IGNORE INTO judgements (key, said) VALUES (?, ?)", (key, said)),
            ("DELETE FROM judgements WHERE number <= (SELECT MAX(number) FROM judgements) - ?", (self.most,)),
        )

    def _rows(self, *statements: tuple[str, tuple[object, ...]]) -> list[Any]:
        """Returns the rows that the last of these statements finds; none where the file cannot be used."""
        found: list[Any] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=self.busy_s)) as file, file:
                file.execute(_TABLE)
                for statement, values in statements:
                    found = file.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            if not self._told:
                logger.warning("what judges say is not kept: %s: %s", self.path, error)
            self._told = True
        return found
