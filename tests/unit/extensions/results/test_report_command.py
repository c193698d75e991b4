"""The report of a run is one file in which nothing loads, runs or is markup but ours."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import CheckpointError
from swarmnode.extensions.results.html import element, plot
from swarmnode.extensions.results.run_record import status_of
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.node.showing.monitors import append_line
from swarmnode.node.showing.node_status import NodeStatus, Rewards, measurements
from swarmnode.node.showing.used_settings import keep_settings
from swarmnode.settings.config import Config
from swarmnode.training.checkpoints.run_folders import PREFIX
from swarmnode.training.records import FORMAT, STATE, Counters, State
from tests.shown_page import STATUS, shown_page

RUN = "letters"
EVIL = "<script>alert(1)</script><img src=x onerror=y>\x1b[2J\u202e"
VOID = {"meta"}


class Outline(HTMLParser):
    """The elements of a page, which must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def status(round: int = 12) -> NodeStatus:
    reward = Rewards(own=round / 100, external=0.5, groups=32, without_gradient={"all_zero": 17})
    progress = msgspec.structs.replace(STATUS.progress, round=round)
    return msgspec.structs.replace(STATUS, run=RUN, reward=reward, progress=progress)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A home with a run of twelve rounds that has ended, and strangers in it."""
    paths = resolve_paths(tmp_path / "home")
    for round in range(1, 13):
        values = {**measurements(status(round)), "speed.round_s": 2.0, "reward.own_tasks.rev": round / 100}
        line = {"event": "round", "time": 1e9, "peer": STATUS.peer_id, "run": RUN, **values}
        append_line(paths.logs / "metrics.jsonl", line)
    folder = paths.checkpoints / RUN
    (folder / f"{PREFIX}00000012").mkdir(parents=True)
    state = State(
        format=FORMAT, base_model="tiny", base_fingerprint="f", policy_version=1, seed=0,
        counters=Counters(round=12), reward=None, settings={"training.loss": "grpo"}, digests={},
    )  # fmt: skip
    (folder / f"{PREFIX}00000012" / STATE).write_bytes(msgspec.json.encode(state))
    for round in (1, 5, 6, 12):
        of_stranger = {
            "author": "12D3KooWother",
            "task": EVIL,
            "prompt": EVIL,
            "completion": f"{round}{EVIL}",
        }
        append_line(folder / FILE, {"round": round, "reward": None, **of_stranger})
    return paths


def written(paths: Paths, *arguments: str) -> tuple[Any, str]:
    """Returns what the command said, and the file."""
    assert paths.home is not None
    out = paths.home / "report.html"
    told = ["report", "--out", str(out), "--home", str(paths.home), "--json", *arguments]
    result = CliRunner().invoke(app, told)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout), out.read_text()


def test_the_report_of_an_ended_run_has_all_that_is_known_of_it(paths: Paths) -> None:
    keep_settings(paths.checkpoints / RUN, Config(), {"training.loss": "--set"})
    told, page = written(paths)
    assert (told["run"], told["round"], told["running"]) == (RUN, 12, False)
    for part in (
        *("Is it learning?", "17 of 32 groups have no gradient: all answers fail", "own answers"),
        *("answers of others", "whole round", "a round takes 2.00 s", "bad signature", "12D3KooWother"),
        *("training.loss", "--set", "round 1<", "round 6<", "round 12<", "<polyline", "model tiny"),
    ):
        assert part in page, part
    assert "round 5<" not in page, "three rounds are enough"


def test_a_strangers_text_is_text(paths: Paths) -> None:
    _, page = written(paths)
    outline = Outline(page)
    assert outline.open == [] and not {"script", "img", "link", "iframe"} & set(outline.seen)
    assert not {"src", "href", "onerror", "style"} & set(outline.attributes)
    assert "&lt;script&gt;" in page and "\\x1b[2J\\u202e" in page
    assert "\x1b" not in page and "\u202e" not in page
    assert not re.search(r"https?://|@import|url\(", page), "it loads nothing"
    assert "default-src 'none'" in page


def test_a_running_node_tells_of_itself(paths: Paths, tmp_path: Path) -> None:
    with shown_page(status, paths=paths) as page:
        note = RunningNode(os.getpid(), STATUS.peer_id, "127.0.0.1", page.port, (), page.token)
        write_running(paths.running, note)
        told, found = written(paths)
        other, _ = written(paths, "--run", RUN)
    assert told["running"] and other["running"] and "running, generating" in found
    assert "network.port" in found, "settings with origins come from the node"


def test_without_a_run_that_is_said(tmp_path: Path, paths: Paths) -> None:
    with pytest.raises(CheckpointError, match="no run gone"):
        written(paths, "--run", "gone")
    (paths.logs / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="nothing is recorded about run letters"):
        written(paths)
    with pytest.raises(CheckpointError, match="no run in this home"):
        written(resolve_paths(tmp_path / "empty"))


def test_settings_of_a_run_of_before_are_those_that_its_checkpoint_notes(paths: Paths) -> None:
    assert ">training.loss<" in written(paths)[1] and ">checkpoint<" in written(paths)[1]


def test_a_line_of_metrics_is_a_status_again() -> None:
    line = {**measurements(status()), "peer": STATUS.peer_id, "run": RUN, "of.a.later": 1.0}
    assert measurements(status_of(line)) == measurements(status())
    with pytest.raises(msgspec.ValidationError):
        status_of({"progress.round": "many"})


def test_a_curve_has_gaps_where_nothing_is_known_and_may_be_flat_or_empty() -> None:
    page = plot("a", {"x": [(1, 0.5), (2, 0.5), (3, None), (4, 0.5)], "y": [(1, None)]})
    assert page.count("<polyline") == 1 and page.count("<circle") == 1
    assert "nothing was measured" in plot("a", {"x": [(1, None)]})
    assert element("p", "<&\"'>", title='"') == '<p title="&quot;">&lt;&amp;&quot;&#x27;&gt;</p>'
