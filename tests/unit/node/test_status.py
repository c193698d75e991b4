import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from swarmnode.errors import PortInUse
from swarmnode.node.http import StatusServer
from swarmnode.node.monitors import JsonlMonitor, PlainMonitor, round_line
from swarmnode.node.panel import render
from swarmnode.node.status import (
    Network,
    NodeStatus,
    Phase,
    Progress,
    Rewards,
    Saved,
    Sharing,
    Speed,
    measurements,
)
from swarmnode.training.records import TrainReport

STATUS = NodeStatus(
    peer_id="12D3KooWexample",
    name="calm-blue-otter",
    swarm="commons",
    model="tiny",
    version="0.1.0",
    pid=7,
    started_at=1000.0,
    phase=Phase("generating", 1000.0, "32 groups of 8"),
    progress=Progress(round=12, rounds_limit=60, policy_version=11, tokens=4096, seconds=3.5),
    reward=Rewards(own=0.25, eval_first=0.2, eval_tasks={"rev": 0.1, "sort": None}),
    speed=Speed(tokens_per_s=900.0),
    network=Network("up", 1000.0, 1, "", 2, ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWexample",)),
    exchange=Sharing(published=3, accepted=2, dropped={"bad_signature": 4}, trained={"12D3KooWother": 2}),
    training=TrainReport(own_groups=5, external_groups=2, loss=-0.01),
    checkpoint=Saved(10, 1000.0),
)


@pytest.fixture
def server() -> Iterator[str]:
    with StatusServer(lambda: STATUS, "127.0.0.1", 0) as running:
        yield f"http://127.0.0.1:{running.port}"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def test_what_is_unknown_is_absent_and_zero_is_there() -> None:
    numbers = measurements(STATUS)
    assert "reward.external" not in numbers and "reward.eval_tasks.sort" not in numbers
    assert numbers["training.zero_advantage_own"] == 0.0


def test_json_metrics_and_log_show_the_same_numbers(server: str, tmp_path: Path) -> None:
    status = json.loads(get(f"{server}/status"))
    assert status["exchange"]["dropped"] == {"bad_signature": 4}
    assert status["reward"]["external"] is None

    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(get(f"{server}/metrics"))
        for sample in family.samples
    }
    assert samples[("swarmnode_exchange_dropped", "bad_signature")] == 4
    assert samples[("swarmnode_exchange_trained", "12D3KooWother")] == 2
    assert samples[("swarmnode_reward_own",)] == 0.25
    assert not any(name[0] == "swarmnode_reward_external" for name in samples)

    JsonlMonitor(tmp_path / "logs" / "metrics.jsonl").round_done(STATUS)
    line = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())
    numbers = measurements(STATUS)
    assert {key: line[key] for key in numbers} == numbers
    assert len(numbers) == len([name for name in samples if name[0] != "swarmnode_info"])


def test_health_answers_and_unknown_pages_say_what_there_is(server: str) -> None:
    assert get(f"{server}/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{server}/nothing")
    with caught.value as error:
        assert error.code == 404 and b"/metrics" in error.read()


def test_a_taken_port_of_the_status_page_is_named(server: str) -> None:
    port = int(server.rpartition(":")[2])
    with pytest.raises(PortInUse, match=f"{port}"), StatusServer(lambda: STATUS, "127.0.0.1", port):
        pass


def test_the_panel_shows_what_a_person_asks_for() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(STATUS, [0.1, 0.2, 0.3], ["12:00:00 hello"], now=1075.0))
    text = console.export_text()
    for expected in (
        "calm-blue-otter",
        "generating for 1 min 15 s",
        "12/60",
        "own 0.250",
        "external -",
        "5 own + 2 external groups",
        "900 tokens/s",
        "2 peers, up",
        "restarted 1 times",
        "bad_signature 4",
        "round 10, 1 min 15 s ago",
        "hello",
        "swarmnode join /ip4/127.0.0.1/tcp/1/p2p/12D3KooWexample",
    ):
        assert expected in text, expected


def test_markup_in_a_name_or_a_reason_is_text_and_not_style() -> None:
    odd = replace(STATUS, model="[red]m[/]", network=replace(STATUS.network, detail="[bold]down[/nope]"))
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(odd, [], [], now=1000.0))
    assert "[red]m[/]" in console.export_text()


def test_a_failed_checkpoint_is_shown_in_place_of_its_age() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(replace(STATUS, checkpoint=Saved(error="the disk is full")), [], [], time.time()))
    assert "the disk is full" in console.export_text()


def test_plain_lines_have_no_escape_codes() -> None:
    stream = StringIO()
    PlainMonitor(stream).round_done(STATUS)
    assert "\x1b" not in stream.getvalue()
    assert round_line(STATUS) in stream.getvalue()
    assert "round 12/60" in stream.getvalue()


def test_a_log_that_cannot_be_written_says_so_once_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "logs"
    blocked.write_text("a file where a folder should be")
    monitor = JsonlMonitor(blocked / "metrics.jsonl")
    with caplog.at_level("INFO", "swarmnode"):
        monitor.round_done(STATUS)
        monitor.round_done(STATUS)
        blocked.unlink()
        monitor.round_done(STATUS)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert len((blocked / "metrics.jsonl").read_text().splitlines()) == 1
