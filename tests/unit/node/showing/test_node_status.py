import json
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, RenderableType

from swarmnode.errors import PortInUse
from swarmnode.network.finding.invitation import Invitation, read_invitation
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.reach.reachability import Reach
from swarmnode.node.showing.board import PlainWatcher, Starving, StatusBoard, round_line
from swarmnode.node.showing.http import StatusServer
from swarmnode.node.showing.monitors import JsonlMonitor, MonitorFeed
from swarmnode.node.showing.node_status import (
    Network,
    NodeStatus,
    Phase,
    Progress,
    Rewards,
    Saved,
    Sharing,
    Speed,
    invitation,
    joins_from,
    measurements,
)
from swarmnode.node.showing.panel import render
from swarmnode.node.showing.policies_panel import render_policies
from swarmnode.training.records import TrainReport
from tests.monitored import run_in

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


def answer_to(server: str, path: str, *headers: str, version: str = "1.1") -> int:
    """The status code of a request written by hand: urllib would not send a wrong Host."""
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
    assert answer_to(server, "/status", "Host: 127.0.0.1", "Host: evil.example") == 421


def test_the_health_check_answers_whatever_we_are_called(server: str) -> None:
    for headers in (("Host: node1:8080",), ("Host: evil.example",), ()):
        assert answer_to(server, "/healthz", *headers, version="1.0") == 200


def test_a_page_for_other_machines_is_asked_for_by_address_or_by_this_machines_name() -> None:
    with StatusServer(lambda: STATUS, "0.0.0.0", 0) as running:
        server = f"http://127.0.0.1:{running.port}"
        for host in ("192.0.2.7:8080", "[2001:db8::1]", "127.0.0.1", "localhost", socket.gethostname()):
            assert answer_to(server, "/status", f"Host: {host}") == 200
        assert answer_to(server, "/status", "Host: evil.example") == 421


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

    feed = MonitorFeed(run_in(tmp_path / "logs"), [JsonlMonitor()])
    feed.see("round", STATUS)
    feed.close()
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
        "4 bad signature",
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


STRANGERS = (
    "ready\x1b[2J\x1b]0;owned\x07\r\n12:00:00 all is well\u202e\x9b31m [red]x[/] [link=http://evil]y[/link]"
)


def texts_replaced(tree: object, text: str) -> object:
    if isinstance(tree, str):
        return text
    if isinstance(tree, dict):
        return {key: texts_replaced(value, text) for key, value in tree.items()}
    return [texts_replaced(value, text) for value in tree] if isinstance(tree, list) else tree


def written(renderable: RenderableType) -> str:
    """The very characters that a terminal would get, escape codes of ours among them."""
    stream = StringIO()
    Console(width=200, file=stream, force_terminal=True, color_system=None).print(renderable)
    return stream.getvalue()


def test_whatever_text_a_status_holds_the_panel_writes_no_control_character_of_it() -> None:
    everything = texts_replaced(msgspec.to_builtins(STATUS, builtin_types=()), STRANGERS)
    odd = msgspec.convert(everything, NodeStatus)
    odd = replace(odd, exchange=Sharing(dropped={STRANGERS: 1}, unpublished={STRANGERS: 1}))
    for picture in (
        render(odd, [], [STRANGERS], 1000.0),
        render_policies({0: odd, 1: odd}, [STRANGERS], 1000.0),
    ):
        shown = written(picture)
        for forbidden in ("\x1b[2J", "\x1b]", "\x07", "\r", "\x9b", "\u202e", "\x1b[3", "\n12:00:00"):
            assert forbidden not in shown, ascii(forbidden)
        assert "[red]x[/]" in shown and "[link=http://evil]y[/link]" in shown


def test_restarts_for_memory_and_what_was_skipped_are_told_apart(tmp_path: Path) -> None:
    network = replace(STATUS.network, memory_restarts=3, skipped={"provider_record": 7})
    with StatusServer(lambda: replace(STATUS, network=network), "127.0.0.1", 0) as running:
        metrics = get(f"http://127.0.0.1:{running.port}/metrics")
    assert "swarmnode_network_restarts 1.0" in metrics
    assert "swarmnode_network_memory_restarts 3.0" in metrics
    assert 'swarmnode_network_skipped{cause="provider_record"} 7.0' in metrics
    assert "replaced 3 times for its size" in written(
        render(replace(STATUS, network=network), [], [], 1000.0)
    )


def test_a_failed_checkpoint_is_shown_in_place_of_its_age() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(replace(STATUS, checkpoint=Saved(error="the disk is full")), [], [], time.time()))
    assert "the disk is full" in console.export_text()


def test_plain_lines_have_no_escape_codes() -> None:
    stream = StringIO()
    PlainWatcher(stream).see("round", STATUS)
    assert "\x1b" not in stream.getvalue()
    assert round_line(STATUS) in stream.getvalue()
    assert "round 12/60" in stream.getvalue()
    assert "policy 1: round" not in stream.getvalue()
    PlainWatcher(stream).see("round", replace(STATUS, policy=1, policies=2))
    assert f"policy 1: {round_line(STATUS)}" in stream.getvalue(), "of several, each says whose line it is"


PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
AT_HOME = (f"/ip4/192.168.1.20/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}")
SEED = f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}"


async def seen_with(reach: Reach, board: StatusBoard | None = None, ip: str = "192.168.1.20") -> NodeStatus:
    board = board or StatusBoard(peer_id=PEER, name="otter", swarm="friends", model="tiny", rounds_limit=None)
    async with MemoryNetwork().host(PEER, ip=ip) as host:
        await board.look_at(host, reach)
    return board.status


async def test_a_home_invites_through_the_seed_that_hands_on_its_groups() -> None:
    status = await seen_with(Reach("relayed", "behind a NAT", (), (SEED,)))
    assert invitation(status) == f"swarmnode join {SEED} --swarm friends"
    assert joins_from(status) == "another machine"
    assert read_invitation(status.network.invitation) == Invitation(name="friends", seeds=(SEED,))


async def test_an_address_of_the_local_network_is_marked_and_is_in_no_short_invitation() -> None:
    for reach in (Reach(), Reach("nobody", "nobody can reach you", ("forward a port",))):
        status = await seen_with(reach)
        assert "192.168.1.20" in (invitation(status) or "")
        assert joins_from(status) == "another machine in this LAN"
        assert status.network.invitation == ""
        assert "in this LAN: swarmnode join" in written(render(status, (), (), 1000.0))


async def test_a_public_address_that_nobody_can_dial_is_not_told_to_outsiders() -> None:
    assert "203.0.113.9" in (invitation(await seen_with(Reach(), ip="203.0.113.9")) or "")
    assert invitation(await seen_with(Reach("nobody", "nobody"), ip="203.0.113.9")) is None


async def test_a_change_of_the_verdict_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    board = StatusBoard(peer_id=PEER, name="otter", swarm="friends", model="tiny", rounds_limit=None)
    caplog.set_level(logging.INFO)
    nobody = Reach("nobody", "nobody can reach you", ("forward a port", "join a seed"))
    for _ in range(3):
        await seen_with(nobody, board)
    await seen_with(Reach("reachable", "reachable", (), (SEED,)), board)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("board")]
    assert told[0] == "nobody can reach you: (1) forward a port, (2) join a seed"
    assert told[1] == "reachable" and f"swarmnode join {SEED} --swarm friends" in told[2]
    assert sum("nobody can reach you" in line for line in told) == 1
    panel = " ".join(written(render(await seen_with(nobody), (), (), 1000.0)).split())
    assert "nobody can reach you: (1) forward a port, (2) join a seed" in panel


def test_a_node_that_hears_and_gets_nothing_for_a_minute_says_so_until_something_comes() -> None:
    starving = Starving()
    assert starving.look(0, 0, 0.0) == ""
    assert starving.look(0, 3, 10.0) == ""
    assert starving.look(0, 9, 60.0) == ""
    assert "join a seed" in starving.look(0, 9, 71.0)
    assert starving.look(1, 9, 72.0) == ""
    assert starving.look(1, 9, 300.0) == ""
    assert starving.look(1, 12, 301.0) == ""
    assert "join a seed" in starving.look(1, 15, 362.0)


def test_a_round_tells_what_was_not_needed_from_what_was_not_usable() -> None:
    heard = replace(STATUS.exchange, accepted=1, dropped={"crowded_out": 180, "stale": 1, "malformed": 2})
    assert round_line(replace(STATUS, exchange=heard)).endswith("accepted 1 not needed 181 dropped 2")
