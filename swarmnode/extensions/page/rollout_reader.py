"""The rollouts of a run, back to its start.

rollouts.jsonl (rollout_log.py) -> [RolloutReader] -> routes.py
"""

from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.extensions.page.growing_file import GrowingFile
from swarmnode.extensions.page.rollout_log import RolloutLine
from swarmnode.identity.memorable_name import memorable_name

MOST_OF_A_ROUND = 16


class RolloutReader:
    """Finds the rollouts of a round in the file. None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else GrowingFile(path)
        self._places: dict[int, list[tuple[int, int]]] = {}
        """Place and length of each line, by round, in order."""

    def at(self, wanted: int | None = None) -> dict[str, Any]:
        """Returns the rollouts of this round, or of the nearest one before it that is kept, and the numbers
        of all rounds that are. None: of the newest."""
        self._look()
        rounds = sorted(self._places)
        if not rounds or self._file is None:
            return {"round": None, "rounds": [], "rollouts": []}
        place = len(rounds) - 1 if wanted is None else max(0, bisect_right(rounds, wanted) - 1)
        found: list[dict[str, Any]] = []
        try:
            with self._file.path.open("rb") as file:
                for begin, length in self._places[rounds[place]][:MOST_OF_A_ROUND]:
                    file.seek(begin)
                    found.append(_named(msgspec.json.decode(file.read(length), type=dict[str, Any])))
        except (OSError, msgspec.DecodeError):
            pass  # It is being replaced: the next look finds the new one.
        return {"round": rounds[place], "rounds": rounds, "rollouts": found}

    def _look(self) -> None:
        if self._file is None:
            return
        if self._file.replaced():
            self._places.clear()
        for place, line in self._file.new_lines():
            try:
                number = msgspec.json.decode(line, type=RolloutLine).round
            except msgspec.DecodeError:
                continue
            self._places.setdefault(number, []).append((place, len(line)))


def _named(rollout: dict[str, Any]) -> dict[str, Any]:
    author = str(rollout.get("author", ""))
    return {**rollout, "author_name": "own" if author == "own" else memorable_name(author)}
