"""The rollouts of a run that are kept for people, as the core sees them: the file, and its keeper.

members.py -> [find_keeper] -> registry.py -> extensions/page/rollout_log.py -> the file in the run's folder
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from swarmnode.registry import first
from swarmnode.types import RolloutGroup

FILE = "rollouts.jsonl"

Credit = Callable[[RolloutGroup], "Sequence[float | None] | None"]
"""Returns the advantages of a group, or None if it has no gradient."""
Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Returns the text of each token."""
KeepRollouts = Callable[[int, Sequence[RolloutGroup], Sequence[RolloutGroup]], None]
"""Called with the number of each round, its own groups, and those of others."""


def find_keeper(path: Path, credit: Credit, seed: int, pieces: Pieces) -> KeepRollouts | None:
    """Returns the function that stores the rollouts of a run in this file. None: no keeper is installed."""
    make = first("rollouts")
    return None if make is None else make(path, credit, seed, pieces).keep
