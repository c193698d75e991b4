import logging
import time
from contextvars import copy_context
from io import StringIO

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from swarmnode.network.finding.invitation import Invitation, read_invitation
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.reach.reachability import Reach
from swarmnode.node.showing.board import RoundLines, Starving, StatusBoard, policy_label, round_line
from swarmnode.node.showing.live_panel import LivePanel
from swarmnode.node.showing.node_status import (
    NodeStatus,
    Saved,
    Sharing,
    invitation,
    joins_from,
    measurements,
)
from swarmnode.node.showing.panel import NodePanel
from swarmnode.node.showing.screen import Screen
from tests.shown_page import STATUS


def test_what_is_unknown_is_absent_and_zero_is_there() -> None:
    numbers = measurements(STATUS)
    assert "reward.external" not in numbers and "reward.eval_tasks.sort" not in numbers
    assert numbers["training.zero_advantage_own"] == 0.0


def test_the_panel_shows_what_a_person_asks_for() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(NodePanel(STATUS, [0.1, 0.2, 0.3], ["12:00:00 hello"], now=1075.0))
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
    console.print(NodePanel(odd, [], [], now=1000.0))
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
    shown = written(NodePanel(odd, [], [STRANGERS], 1000.0))
    for forbidden in ("\x1b[2J", "\x1b]", "\x07", "\r", "\x9b", "\u202e", "\x1b[3", "\n12:00:00"):
        assert forbidden not in shown, ascii(forbidden)
    assert "[red]x[/]" in shown and "[link=http://evil]y[/link]" in shown


def test_restarts_for_memory_are_told() -> None:
    network = replace(STATUS.network, memory_restarts=3)
    told = written(NodePanel(replace(STATUS, network=network), [], [], 1000.0))
    assert "replaced 3 times for its size" in told


def test_a_failed_checkpoint_is_shown_in_place_of_its_age() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(NodePanel(replace(STATUS, checkpoint=Saved(error="the disk is full")), [], [], time.time()))
    assert "the disk is full" in console.export_text()


def test_plain_lines_have_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> None:
        with Screen(terminal=False) as screen:
            screen.start_watcher().see("tick", STATUS)
            screen.start_watcher().see("round", STATUS)

    told()
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line and "round 12/60" in line
    assert line.endswith(f" {round_line(STATUS)}") and "policy" not in line

    def of_several() -> None:
        policy_label.set("policy 1: ")
        told()

    copy_context().run(of_several)
    assert f"policy 1: {round_line(STATUS)}" in capsys.readouterr().err, (
        "of several, each says whose line it is"
    )


def test_rounds_are_in_the_log_and_not_among_the_lines_of_a_panel() -> None:
    with Screen(terminal=True) as screen:
        panel = screen.start_watcher()
        shown = [one for one in logging.getLogger("swarmnode").handlers if isinstance(one, LivePanel)]
        record = logging.LogRecord(RoundLines.logger.name, logging.INFO, "", 0, "round 1", None, None)
        assert shown and not any(one.filter(record) for one in shown)
        panel.close()


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
        assert "in this LAN: swarmnode join" in written(NodePanel(status, (), (), 1000.0))


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
    panel = " ".join(written(NodePanel(await seen_with(nobody), (), (), 1000.0)).split())
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
