"""Monitors: what they are told, and that none of them can stop a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import ConfigError
from swarmnode.node.showing import monitors as monitors_module
from swarmnode.node.showing.monitors import (
    MOST_WAITING,
    JsonlMonitor,
    MonitorFeed,
    checked_monitor,
    make_monitors,
    run_info,
)
from swarmnode.node.showing.node_status import Phase, measurements
from swarmnode.node.showing.screen import Screen
from swarmnode.settings.config import Config, NodeConfig
from swarmnode.settings.config_layers import load_config
from tests.monitored import Remembers, at_round, run_in

PATIENCE_S = 60.0


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
    assert "no network" in caplog.text and "training continues" in caplog.text


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
    assert caplog.text.count("too slow") == 1 and "not waiting for it" in caplog.text
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


def test_a_line_that_a_crash_cut_short_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitors_module.append_line(path, {"round": 1})
    path.write_text(path.read_text() + '{"round": 2, "rew')
    monitors_module.append_line(path, {"round": 3})
    assert path.read_text().splitlines() == ['{"round": 1}', '{"round": 2, "rew', '{"round": 3}']


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
    with pytest.raises(ConfigError, match="no such monitor"):
        load_config(environ={}, assignments=["node.monitors=wandbb"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_monitors(["no_such_module:monitor"])
    with pytest.raises(ConfigError, match="is not a monitor") as caught:
        make_monitors(["math:pi"])
    assert "log(event, round, values)" in caught.value.hint
    with pytest.raises(ConfigError, match="is not a monitor"):
        checked_monitor(object())


def test_a_run_is_told_with_all_of_its_settings(tmp_path: Path) -> None:
    config = Config(node=NodeConfig(rounds=7))
    told = run_info(config, name="otter", peer_id="12D", model="tiny", folder=tmp_path)
    assert told.settings["node.rounds"] == 7 and told.settings["training.learning_rate"] == 1e-4
    json.dumps(told.settings)


class NeedsMore(Remembers):
    def __init__(self, project: str) -> None:
        super().__init__()


def test_a_monitor_passed_as_a_class_is_made_or_refused() -> None:
    assert isinstance(checked_monitor(Remembers), Remembers)
    with pytest.raises(ConfigError, match=r"cannot create the monitor .*NeedsMore") as caught:
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
