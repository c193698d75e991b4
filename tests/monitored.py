"""Fakes for what follows a run: what it is told of the run, a status, and a monitor that remembers."""

import threading
from collections.abc import Mapping
from pathlib import Path

from swarmnode.node.showing.monitors import RunInfo
from swarmnode.node.showing.node_status import NodeStatus, Phase, Progress, Rewards, Summary


def run_in(folder: Path) -> RunInfo:
    return RunInfo(
        "calm-blue-otter", "12D3KooWexample", "commons", "tiny", folder, {"training.learning_rate": 1e-4}
    )


def at_round(number: int) -> NodeStatus:
    return NodeStatus(
        peer_id="12D3KooWexample",
        name="calm-blue-otter",
        swarm="commons",
        model="tiny",
        version="0.1.0",
        pid=7,
        started_at=1000.0,
        phase=Phase("generating", 1000.0),
        progress=Progress(round=number, tokens=10 * number, seconds=float(number)),
        reward=Rewards(own=number / 10, eval_last=0.5, eval_tasks={"rev": 0.5}),
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
