"""Monitors: what they are told, that none of them can stop a run, and the trackers as they really are."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.errors import ConfigError
from swarmnode.node.showing import monitors as monitors_module
from swarmnode.node.showing.monitors import (
    MOST_WAITING,
    JsonlMonitor,
    MonitorFeed,
    TensorBoardMonitor,
    TrackioMonitor,
    WandbMonitor,
    checked_monitor,
    make_monitors,
    run_info,
)
from swarmnode.node.showing.node_status import NodeStatus, Phase, Progress, Rewards, measurements
from swarmnode.node.showing.screen import Screen
from swarmnode.registry import SEAMS
from swarmnode.settings.config import Config, NodeConfig
from swarmnode.settings.config_layers import load_config
from tests.monitored import Remembers, run_in

PATIENCE_S = 60.0


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


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_a_monitor_is_told_of_the_run_of_every_round_and_of_the_end(tmp_path: Path) -> None:
    told = Remembers()
    feed = MonitorFeed(run_in(tmp_path), [told])
    feed.see("evaluation", at_round(0))
    feed.see("round", at_round(1))
    feed.see("tick", msgspec.structs.replace(at_round(1), phase=Phase("stopped", 1000.0, "all rounds done")))
    feed.close()
    assert told.runs == [run_in(tmp_path)]
    assert told.rounds == [("evaluation", 0), ("round", 1)]
    assert told.values[1] == {**measurements(at_round(1)), "monitors.failed": 0.0}
    (summary,) = told.summaries
    assert (summary.rounds, summary.reward_last, summary.stopped) == (1, 0.5, "all rounds done")


def test_a_run_that_breaks_off_before_its_first_round_has_nothing_to_finish(tmp_path: Path) -> None:
    told = Remembers()
    MonitorFeed(run_in(tmp_path), [told]).close()
    assert (told.runs, told.summaries) == ([], [])


def test_a_monitor_that_fails_is_said_once_counted_and_told_again_when_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, beside = Remembers(), Remembers()
    broken.broken = True
    feed = MonitorFeed(run_in(tmp_path), [broken, beside])
    with caplog.at_level("INFO", "swarmnode"):
        for number in (1, 2):
            feed.see("round", at_round(number))
        until(lambda: feed.failed == 2)
        broken.broken = False
        feed.see("round", at_round(3))
        feed.close()
    assert broken.rounds == [("round", 3)] and len(broken.runs) == len(broken.summaries) == 1
    assert beside.rounds == [("round", 1), ("round", 2), ("round", 3)]
    assert beside.values[2]["monitors.failed"] == 2.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert "no network" in caplog.text and "training goes on" in caplog.text


def test_a_monitor_that_hangs_holds_up_neither_the_rounds_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hung, beside = Remembers(), Remembers()
    hung.open.clear()
    feed = MonitorFeed(run_in(tmp_path), [hung, beside], patience_s=0.1)
    for number in range(MOST_WAITING + 5):
        feed.see("round", at_round(number))
        until(lambda number=number: len(beside.rounds) == number + 1)
    feed.close()
    assert len(beside.summaries) == 1
    assert feed.failed >= 4, "what it had no room for is counted"
    assert caplog.text.count("too slow") == 1 and "not waited for" in caplog.text
    hung.open.set()


def test_a_log_that_cannot_be_written_says_so_once_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "logs"
    blocked.write_text("a file where a folder should be")
    feed = MonitorFeed(run_in(blocked), [JsonlMonitor()])
    with caplog.at_level("INFO", "swarmnode"):
        feed.see("round", at_round(1))
        feed.see("round", at_round(2))
        until(lambda: feed.failed == 2)
        blocked.unlink()
        feed.see("round", at_round(3))
        feed.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    (line,) = (blocked / "metrics.jsonl").read_text().splitlines()
    assert (json.loads(line)["progress.round"], json.loads(line)["monitors.failed"]) == (3.0, 2.0)


def test_a_full_log_is_put_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors_module, "MOST_LOG_BYTES", 100)
    path = tmp_path / "lines.jsonl"
    for number in range(100):
        monitors_module.append_line(path, {"number": number, "text": "x" * 40})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lines.1.jsonl", "lines.jsonl"]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 500
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 99


# ---- how they are named ----


def made_by_a_function() -> Remembers:
    return Remembers()


AS_IT_IS = Remembers()


@pytest.mark.parametrize("name", ["Remembers", "made_by_a_function", "AS_IT_IS"])
def test_a_monitor_of_ones_own_is_a_class_a_function_or_an_object(name: str) -> None:
    (path,) = load_config(environ={}, assignments=[f"node.monitors={__name__}:{name}"]).config.node.monitors
    first, second = make_monitors([path])
    assert isinstance(first, JsonlMonitor) and isinstance(second, Remembers)
    assert (second is AS_IT_IS) == (name == "AS_IT_IS")


def test_what_is_no_monitor_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="no such monitor: there are tensorboard, trackio, wandb"):
        load_config(environ={}, assignments=["node.monitors=wandbb"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_monitors(["no_such_module:monitor"])
    with pytest.raises(ConfigError, match="is no monitor") as caught:
        make_monitors(["math:pi"])
    assert "log(event, round, values)" in caught.value.hint
    with pytest.raises(ConfigError, match="is no monitor"):
        checked_monitor(object())


@pytest.mark.parametrize("name", SEAMS["monitor"].ours)
def test_a_tracker_that_is_not_installed_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(monitors_module.importlib, "import_module", without)
    with pytest.raises(ConfigError, match=f"the monitor {name} cannot be used") as caught:
        make_monitors([name])
    assert "pip install " in caught.value.hint and name in caught.value.hint


def test_a_run_is_told_with_all_of_its_settings(tmp_path: Path) -> None:
    config = Config(node=NodeConfig(rounds=7))
    told = run_info(config, name="otter", peer_id="12D", model="tiny", folder=tmp_path)
    assert told.settings["node.rounds"] == 7 and told.settings["training.learning_rate"] == 1e-4
    json.dumps(told.settings)


# ---- the trackers as they are ----


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
    monkeypatch.setattr(monitors_module.importlib, "import_module", lambda module: tracker)
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
    monkeypatch.setattr(monitors_module.importlib, "import_module", lambda module: tracker)
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


class NeedsMore(Remembers):
    def __init__(self, project: str) -> None:
        super().__init__()


def test_a_monitor_passed_as_a_class_is_made_or_refused() -> None:
    assert isinstance(checked_monitor(Remembers), Remembers)
    with pytest.raises(ConfigError, match=r"NeedsMore.* cannot be made") as caught:
        checked_monitor(NeedsMore)
    assert "a class that needs no arguments" in caught.value.hint


def test_a_monitor_that_fails_to_the_end_does_not_work_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    broken = Remembers()
    broken.broken = True
    feed = MonitorFeed(run_in(tmp_path), [broken])
    feed.see("round", at_round(1))
    until(lambda: feed.failed == 1)
    broken.broken = False
    feed.close()
    assert [one.message for one in caplog.records if "works again" in one.message] == []


def test_a_monitor_that_fails_is_said_where_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Screen(tmp_path / "node.log", terminal=False, shows=False):
        monitors_module.logger.warning("monitor Mine fails")
        monitors_module.logger.info("monitor Mine works again")
    assert capsys.readouterr().err == "monitor Mine fails\n"


def test_a_name_that_a_module_lacks_is_answered_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        make_monitors(["math:pie"])
    assert caught.value.hint.startswith("math has: ") and "PYTHONPATH" not in caught.value.hint
