"""The trackers that a run may be shown in: TensorBoard, trackio, Weights & Biases.

node.monitors -> [TensorBoardMonitor, TrackioMonitor, WandbMonitor] <- told by node/showing/monitors.py

Each imports its library when it is made, before a model is loaded.
"""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from swarmnode.errors import ConfigError
from swarmnode.machine.installing import how_to_install
from swarmnode.node.showing.monitors import Event, RunInfo
from swarmnode.node.showing.node_status import Summary


class TensorBoardMonitor:
    """Writes curves for `tensorboard --logdir`, in the folder `tensorboard` beside metrics.jsonl."""

    def __init__(self) -> None:
        self._module = _imported("tensorboard.summary", "tensorboard")

    def start(self, run: RunInfo) -> None:
        self._writer = self._module.Writer(str(run.folder / "tensorboard"))

    def log(self, event: Event, round: int, values: Mapping[str, float]) -> None:
        for name, value in _curves(event, values).items():
            self._writer.add_scalar(name, value, step=round)
        self._writer.flush()

    def finish(self, summary: Summary) -> None:
        self._writer.close()


class TrackioMonitor:
    """Logs to trackio's local database: `trackio show` is its page."""

    package = "trackio"

    def __init__(self) -> None:
        self._module = _imported(self.package, self.package)

    def start(self, run: RunInfo) -> None:
        self._run = self._module.init(
            project=f"swarmnode-{run.swarm}", name=_start_name(run), config=_plain(run), embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, event: Event, round: int, values: Mapping[str, float]) -> None:
        self._run.log(_curves(event, values), step=round)

    def finish(self, summary: Summary) -> None:
        self._run.finish()


class WandbMonitor(TrackioMonitor):
    """Logs to Weights & Biases, whose runs are told as trackio's are; without an API key offline, into the
    folder `wandb` for `wandb sync`."""

    package = "wandb"

    def start(self, run: RunInfo) -> None:
        # It would ask for a key on the terminal, and take stdout and stderr, which are the panel's.
        online = self._module.setup().settings.mode == "online"
        keyless = online and not self._module.login(prompt=False, verify=False)
        offline = {"mode": "offline"} if keyless else {}
        quiet = self._module.Settings(silent=True, console="off", save_code=False)
        self._run = self._module.init(
            project=f"swarmnode-{run.swarm}", name=_start_name(run), config=_plain(run), dir=str(run.folder),
            settings=quiet, reinit="create_new", **offline,
        )  # fmt: skip


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the monitor {package} cannot be used: {error}",
            # The others pin libraries that ours pin otherwise, so they are no extras.
            hint=how_to_install(package) if package == "tensorboard" else f"pip install {package}",
        ) from error


def _start_name(run: RunInfo) -> str:
    """The name of one start: trackers refuse steps that go back, as they do after a crash."""
    return f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _plain(run: RunInfo) -> dict[str, Any]:
    """The settings of a run, but for its addresses: trackers may be public."""
    told = {key: value for key, value in run.settings.items() if not key.startswith("network.")}
    return {"model": run.model, "peer": run.peer_id, "run": run.run, **told}


def _curves(event: Event, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are new with an event, by names that trackers group."""
    return {
        name.replace(".", "/"): value
        for name, value in values.items()
        if event == "round" or name.startswith("reward.eval")
    }
