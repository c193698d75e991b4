"""The page over real sockets: who is answered, and with what."""

import json
import socket
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.errors import PortInUse
from swarmnode.node.showing.monitors import JsonlMonitor, MonitorFeed
from swarmnode.node.showing.node_status import measurements
from tests.monitored import run_in
from tests.shown_page import STATUS, shown_page

PASSWORD = "correct horse"
KNOWN = f"Authorization: Basic {b64encode(f'any:{PASSWORD}'.encode()).decode()}"


@pytest.fixture
def server() -> Iterator[str]:
    with shown_page(lambda: STATUS) as running:
        yield f"http://127.0.0.1:{running.port}"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def answer_to(server: str, path: str, *headers: str, version: str = "1.1") -> int:
    """The status code of a request written by hand: others would not send a wrong Host."""
    host, _, port = server.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall("\r\n".join((f"GET {path} HTTP/{version}", *headers, "", "")).encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:8080", "[::1]:8080"])
def test_the_page_answers_who_asks_for_this_machine(server: str, host: str) -> None:
    assert answer_to(server, "/status", f"Host: {host}") == 200
    assert answer_to(server, "/metrics", f"Host: {host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "192.0.2.7",
        ),
        *("", "localhost@evil.example", "[::1", "127.0.0.1:80:80", "2130706433"),
    ],
)
def test_a_name_that_somebody_points_at_us_is_not_answered(server: str, host: str) -> None:
    assert answer_to(server, "/status", f"Host: {host}") == 421
    assert answer_to(server, "/metrics", f"Host: {host}") == 421
    assert answer_to(server, "/", f"Host: {host}") == 421


def test_a_request_without_one_host_is_not_answered(server: str) -> None:
    assert answer_to(server, "/status", version="1.0") == 421
    assert answer_to(server, "/status", "Host: 127.0.0.1", "Host: evil.example") == 400


def test_the_health_check_answers_whatever_we_are_called(server: str) -> None:
    for headers in (("Host: node1:8080",), ("Host: evil.example",), ()):
        assert answer_to(server, "/healthz", *headers, version="1.0") == 200


def test_a_page_for_other_machines_is_asked_for_by_address_or_by_this_machines_name() -> None:
    with shown_page(lambda: STATUS, node={"http": "0.0.0.0", "http_password": PASSWORD}) as running:
        server = f"http://127.0.0.1:{running.port}"
        for host in ("192.0.2.7:8080", "[2001:db8::1]", "127.0.0.1", "localhost", socket.gethostname()):
            assert answer_to(server, "/status", f"Host: {host}", KNOWN) == 200
        assert answer_to(server, "/status", "Host: evil.example") == 421


def test_json_metrics_and_log_show_the_same_numbers(server: str, tmp_path: Path) -> None:
    status = json.loads(get(f"{server}/status"))
    assert status["exchange"]["dropped"] == {"bad_signature": 4}
    assert status["reward"]["external"] is None

    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(get(f"{server}/metrics"))
        for sample in family.samples
    }
    assert samples[("swarmnode_exchange_dropped_total", "bad_signature")] == 4
    assert samples[("swarmnode_exchange_trained", "12D3KooWother")] == 2
    assert samples[("swarmnode_reward_own",)] == 0.25
    assert not any(name[0] == "swarmnode_reward_external" for name in samples)

    feed = MonitorFeed(run_in(tmp_path / "logs"), [JsonlMonitor()])
    feed.see("round", STATUS)
    feed.close()
    line = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())
    numbers = measurements(STATUS)
    assert {key: line[key] for key in numbers} == numbers
    assert len(numbers) == len([name for name in samples if name[0] != "swarmnode_info"])


def test_health_answers_and_unknown_pages_do_not(server: str) -> None:
    assert get(f"{server}/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{server}/nothing")
    with caught.value as error:
        assert error.code == 404


def test_a_taken_port_of_the_status_page_is_named(server: str) -> None:
    port = int(server.rpartition(":")[2])
    with pytest.raises(PortInUse, match=f"{port}"), shown_page(lambda: STATUS, node={"http_port": port}):
        pass


def test_restarts_for_memory_and_what_was_skipped_are_told_apart(tmp_path: Path) -> None:
    network = replace(STATUS.network, memory_restarts=3, skipped={"provider_record": 7})
    with shown_page(lambda: replace(STATUS, network=network)) as running:
        metrics = get(f"http://127.0.0.1:{running.port}/metrics")
    assert "swarmnode_network_restarts_total 1.0" in metrics
    assert "swarmnode_network_memory_restarts_total 3.0" in metrics
    assert 'swarmnode_network_skipped_total{cause="provider_record"} 7.0' in metrics
