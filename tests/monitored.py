"""Fakes for what follows a run: what it is told of the run, and a monitor that remembers."""

import threading
from collections.abc import Mapping
from pathlib import Path

from swarmnode.node.showing.monitors import RunInfo
from swarmnode.node.showing.node_status import Summary


def run_in(folder: Path) -> RunInfo:
    return RunInfo(
        "calm-blue-otter", "12D3KooWexample", "commons", "tiny", folder, {"training.learning_rate": 1e-4}
    )


class Remembers:
    """A monitor that keeps all it is told; `broken` makes it raise, `held` makes it wait."""

    def __init__(self) -> None:
        self.runs: list[RunInfo] = []
        self.rounds: list[tuple[str, int]] = []
        self.values: list[Mapping[str, float]] = []
        self.summaries: list[Summary] = []
        self.broken = False
        self.open = threading.Event()
        self.open.set()

    def start(self, run: RunInfo) -> None:
        self.open.wait()
        if self.broken:
            raise ConnectionError("no network")
        self.runs.append(run)

    def log(self, event: str, round: int, values: Mapping[str, float]) -> None:
        self.open.wait()
        if self.broken:
            raise ConnectionError("no network")
        self.rounds.append((event, round))
        self.values.append(values)

    def finish(self, summary: Summary) -> None:
        self.summaries.append(summary)
