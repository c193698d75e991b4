"""The lines of a file that another thread appends to, and may replace by another one.

metrics.jsonl, rollouts.jsonl -> [GrowingFile] -> extensions/page/; node.log -> logs_command.py
"""

from collections.abc import Iterator
from pathlib import Path


class GrowingFile:
    """Reads what was appended since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0
        """Bytes that were read."""
        self.number: int | None = None
        """Inode of the file: another one under the same name is read from its beginning."""

    def replaced(self) -> bool:
        """Returns True if what was read so far is no longer in the file. What comes next is its beginning."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        was_read = self.number is not None
        if found.st_ino == self.number and found.st_size >= self.place:
            return False
        self.number, self.place = found.st_ino, 0
        return was_read

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields each whole line that is new, with its place in the file. Half a line comes when it is
        whole."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    place, self.place = self.place, self.place + len(line)
                    yield place, line
        except OSError:
            return
