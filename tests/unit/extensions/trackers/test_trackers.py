"""The trackers as they really are, and with fakes of their libraries where these are not installed."""

from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import ConfigError
from swarmnode.extensions.trackers import PARTS, trackers
from swarmnode.extensions.trackers.trackers import TensorBoardMonitor, TrackioMonitor, WandbMonitor
from swarmnode.node.showing.monitors import MonitorFeed, checked_monitor, make_monitors
from swarmnode.settings.config_layers import load_config
from tests.monitored import at_round, run_in

PATIENCE_S = 60.0


def test_a_tracker_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no such monitor; available: tensorboard, trackio, wandb"):
        load_config(environ={}, assignments=["node.monitors=wandbb"])


@pytest.mark.parametrize("name", PARTS["monitor"])
def test_a_tracker_that_is_not_installed_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(trackers.importlib, "import_module", without)
    with pytest.raises(ConfigError, match=f"the monitor {name} cannot be used") as caught:
        make_monitors([name])
    assert "pip install " in caught.value.hint and name in caught.value.hint


def followed(monitor: Any, folder: Path) -> None:
    feed = MonitorFeed(run_in(folder), [checked_monitor(monitor)], patience_s=PATIENCE_S)
    feed.see("evaluation", at_round(0))
    for number in (1, 2, 3):
        feed.see("round", at_round(number))
    feed.see("evaluation", at_round(3))
    feed.close()
    assert feed.failed == 0


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    followed(TensorBoardMonitor(), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"reward/own", "progress/tokens", "reward/eval_tasks/rev"} <= set(events.Tags()["tensors"])
    curve = [(point.step, float(point.tensor_proto.float_val[0])) for point in events.Tensors("reward/own")]
    assert curve == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, pytest.approx(0.3))]


class FakeRun:
    """A run of trackio or W&B as far as we use one."""

    def __init__(self, **asked: Any) -> None:
        self.asked = asked
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.logged or step >= self.logged[-1][0], "trackers refuse steps that go back"
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeTracker:
    """The names of trackio and wandb that we use."""

    def __init__(self, key: str | None = None, mode: str = "online") -> None:
        self.runs: list[FakeRun] = []
        self._key = key
        self.mode = mode

    @property
    def settings(self) -> "FakeTracker":
        return self

    def setup(self) -> "FakeTracker":
        return self

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify, "nobody is asked, and nothing is waited for"
        return self._key is not None

    def Settings(self, **chosen: Any) -> dict[str, Any]:
        return chosen

    def init(self, **asked: Any) -> FakeRun:
        self.runs.append(FakeRun(**asked))
        return self.runs[-1]


@pytest.mark.parametrize("kind", [TrackioMonitor, WandbMonitor])
def test_a_tracker_gets_the_curves_of_rounds_and_only_what_is_new_of_evaluations(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = FakeTracker()
    monkeypatch.setattr(trackers.importlib, "import_module", lambda module: tracker)
    followed(kind(), tmp_path)
    (run,) = tracker.runs
    assert run.asked["project"] == "swarmnode-commons" and run.asked["name"].startswith("calm-blue-otter-")
    assert run.asked["config"]["training.learning_rate"] == 1e-4 and run.finished
    assert [step for step, _ in run.logged] == [0, 1, 2, 3, 3]
    assert run.logged[1][1]["reward/own"] == pytest.approx(0.1)
    assert run.logged[4][1] == {"reward/eval_last": 0.5, "reward/eval_tasks/rev": 0.5}


@pytest.mark.parametrize(
    ("key", "mode", "asked"), [(None, "online", "offline"), ("k", "online", None), (None, "disabled", None)]
)
def test_weights_and_biases_is_offline_without_a_key_and_asks_nobody(
    key: str | None, mode: str, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = FakeTracker(key, mode)
    monkeypatch.setattr(trackers.importlib, "import_module", lambda module: tracker)
    followed(WandbMonitor(), tmp_path)
    assert tracker.runs[0].asked.get("mode") == asked
    assert tracker.runs[0].asked["settings"]["console"] == "off", "the terminal is the panel's"


def test_weights_and_biases_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    followed(WandbMonitor(), tmp_path)
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/own" in kept.read_bytes()


def test_trackio_keeps_a_run_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    followed(TrackioMonitor(), tmp_path)
    (run,) = SQLiteStorage.get_runs("swarmnode-commons")
    assert len(SQLiteStorage.get_logs("swarmnode-commons", run)) == 5
