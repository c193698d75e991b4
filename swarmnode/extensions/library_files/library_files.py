"""Libraries as files: looked through, copied and added to a home's, each row verified by itself.

library_commands.py -> [look_through, copy_verified, add_verified] -> signed_group.py -> LibraryReport
task -> [Judging] -> check_header, check_body: what a node would make of a row

A damaged row is told with its line and left out; it costs no other. These functions block.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmnode.chat import written_prompt
from swarmnode.errors import JudgementLost, JudgementOverran, Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.shelf import MAX_SHELF_BYTES, MAX_SHELF_GROUPS
from swarmnode.exchange.library.signed_group import SignedGroup, line_of, read_rows
from swarmnode.exchange.limits import MAX_COMPLETION_CHARS
from swarmnode.exchange.messages import Arrival
from swarmnode.exchange.validation.body_check import BodyRules, check_body
from swarmnode.exchange.validation.header_check import check_header
from swarmnode.machine.storage import replace_file
from swarmnode.tasks.task import Task
from swarmnode.types import FinishReason

MAX_DAMAGED_TOLD = 1000
"""Damaged rows that are told apart; the others are counted."""

ANY_LENGTH = ExchangeSettings(max_prompt_tokens=MAX_COMPLETION_CHARS * 4, max_tokens=MAX_COMPLETION_CHARS * 4)
"""No policy reads these answers, so none is too long for it."""


@dataclass(slots=True)
class LibraryReport:
    """The content of a file, or what became of its rows."""

    rows: int = 0
    """Groups that were verified."""
    answers: int = 0
    size_bytes: int = 0
    tasks: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Groups by task and version."""
    authors: Counter[str] = field(default_factory=Counter[str])
    right: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Answers that our own judge gave a reward above 0, of those tasks that were judged."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Groups that were judged and are of no use, by reason."""
    damaged: list[str] = field(default_factory=list[str])
    """Damaged lines, each with what is wrong with it."""
    damaged_rows: int = 0
    known: int = 0
    """Groups that were in the library already."""
    no_room: int = 0
    """Groups that did not fit into it any more."""

    @property
    def taken(self) -> int:
        return self.rows - self.known - self.no_room

    def as_json(self) -> dict[str, Any]:
        """Return it for a program to read."""
        return {
            "groups": self.rows,
            "answers": self.answers,
            "size_bytes": self.size_bytes,
            "tasks": [
                {"task": task, "version": version, "groups": count, "right": self.right.get((task, version))}
                for (task, version), count in sorted(self.tasks.items())
            ],
            "authors": dict(self.authors),
            "refused": dict(self.refused),
            "damaged": self.damaged,
            "damaged_rows": self.damaged_rows,
        }


class Judging:
    """Judges rows by tasks of ours, as a node does, but whatever their length and swarm."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._rules = BodyRules(
            tasks,
            _as_bytes,
            lambda prompt: tuple(written_prompt(prompt).encode()),
            max_prompt_tokens=ANY_LENGTH.max_prompt_tokens,
            max_tokens=ANY_LENGTH.max_tokens,
        )

    def knows(self, group: SignedGroup) -> bool:
        """Return True if we have the task of the group, in its version."""
        task = self._tasks.get(group.header.task)
        return task is not None and task.version == group.header.version

    def right(self, group: SignedGroup) -> int:
        """Return how many answers get a reward above 0. Raises Rejected where a node could not use it."""
        settings = replace(ANY_LENGTH, swarm=group.header.swarm)
        announcement = check_header(group.sealed, Arrival(0.0, 0), settings=settings, tasks=self._tasks)
        rewards = check_body(group.body, announcement, self._rules).group.rewards
        return sum(reward is not None and reward > 0 for reward in rewards)


def look_through(path: Path, *, judging: Judging | None = None) -> LibraryReport:
    """Verify each row of a file, and have those judged that `judging` knows the task of. Raises OSError."""
    report = LibraryReport()
    for group in _verified(path, report):
        if judging is None or not judging.knows(group):
            continue
        task = group.header.task, group.header.version
        report.right.setdefault(task, 0)
        try:
            report.right[task] += judging.right(group)
        except Rejected as rejected:
            report.refused[rejected.reason] += 1
        except JudgementLost as lost:
            overran = isinstance(lost, JudgementOverran)
            report.refused[Reason.SCORE_TIMEOUT if overran else Reason.UNSCORABLE] += 1
    return report


def copy_verified(source: Path, target: Path) -> LibraryReport:
    """Write the verified rows of a file, each once, to another, whole or not at all. Raises OSError."""
    report = LibraryReport()
    rows = {group.name: line_of(group) for group in _verified(source, report)}
    replace_file(target, b"".join(rows.values()))
    return report


def add_verified(source: Path, target: Path) -> LibraryReport:
    """Add the verified rows of a file to the library of a home that no node uses now, as far as there is
    room. Raises OSError."""
    report = LibraryReport()
    there = (
        [found for _, found in read_rows(target) if not isinstance(found, Rejected)]
        if target.is_file()
        else []
    )
    rows = {group.name: line_of(group) for group in there}
    size_bytes = sum(group.size_bytes for group in there)
    for group in _verified(source, report):
        if group.name in rows:
            report.known += 1
        elif len(rows) >= MAX_SHELF_GROUPS or size_bytes + group.size_bytes > MAX_SHELF_BYTES:
            report.no_room += 1
        else:
            rows[group.name] = line_of(group)
            size_bytes += group.size_bytes
    replace_file(target, b"".join(rows.values()))
    return report


def _verified(path: Path, report: LibraryReport) -> Iterator[SignedGroup]:
    """Yields the sound rows of a file, and notes in the report what is in it."""
    for number, found in read_rows(path):
        if isinstance(found, Rejected):
            report.damaged_rows += 1
            if len(report.damaged) < MAX_DAMAGED_TOLD:
                report.damaged.append(f"line {number}: {found}")
            continue
        report.rows += 1
        report.answers += found.header.group_size
        report.size_bytes += found.size_bytes
        report.tasks[found.header.task, found.header.version] += 1
        report.authors[found.author] += 1
        yield found


def _as_bytes(text: str, finish: FinishReason) -> tuple[int, ...]:
    return tuple(text.encode())
