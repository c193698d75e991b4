"""Our newest wrong answers, from which others' answers and our own finds are seen.

book_rule.py (own groups) -> [Misses] -> teachers.py, and the state of the rule

A restart keeps them: without them authors agree on another scale, and those who teach would be put back.

No torch here.
"""

from collections import deque
from collections.abc import Iterable

from swarmnode.training.rules.book import MAX_TOKENS, Entry
from swarmnode.training.rules.teachers import NEWEST

MAX_MISSES_BYTES = 32 << 20
"""Bytes of all of them, by what a checkpoint takes."""


class Misses:
    """Our newest wrong answers, a few of each task."""

    def __init__(self) -> None:
        self._by_task: dict[str, deque[Entry]] = {}
        self._bytes = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, the newest of each task last."""
        return tuple(entry for of_task in self._by_task.values() for entry in of_task)

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in newer ones. One that a saved book could not hold is left out."""
        for entry in entries:
            if len(entry.token_ids) > MAX_TOKENS:
                continue
            of_task = self._by_task.setdefault(entry.task, deque())
            of_task.append(entry)
            self._bytes += entry.saved_bytes
            if len(of_task) > NEWEST:
                self._remove(of_task)
            while self._bytes > MAX_MISSES_BYTES:
                self._remove(max(self._by_task.values(), key=len))

    def _remove(self, of_task: deque[Entry]) -> None:
        self._bytes -= of_task.popleft().saved_bytes
