import logging
import re
from contextvars import copy_context

import pytest
from msgspec.structs import replace

from swarmnode.machine.storage import builtin_folder
from swarmnode.network.finding.invitation import Invitation, read_invitation
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.reach import Reach
from swarmnode.node.showing.board import Starving, StatusBoard, policy_label, round_line
from swarmnode.node.showing.node_status import NodeStatus, invitation, joins_from, measurements
from swarmnode.node.showing.screen import Screen
from swarmnode.settings.config_layers import load_config
from tests.shown_page import STATUS


def test_what_is_unknown_is_absent_and_zero_is_there() -> None:
    numbers = measurements(STATUS)
    assert "reward.external" not in numbers and "reward.eval_tasks.sort" not in numbers
    assert numbers["training.zero_advantage_own"] == 0.0


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


PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
AT_HOME = (f"/ip4/192.168.1.20/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}")
SEED = f"/ip4/198.51.100.1/tcp/4001/p2p/{PEER}"


def empty_board() -> StatusBoard:
    config = load_config(environ={}, assignments=["swarm.name=friends"]).config
    return StatusBoard(config, peer_id=PEER, name="otter", model="tiny")


async def seen_with(reach: Reach, board: StatusBoard | None = None, ip: str = "192.168.1.20") -> NodeStatus:
    board = board or empty_board()
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
        assert joins_from(status) == "another machine on this LAN"
        assert status.network.invitation == ""


async def test_a_public_address_that_nobody_can_dial_is_not_told_to_outsiders() -> None:
    assert "203.0.113.9" in (invitation(await seen_with(Reach(), ip="203.0.113.9")) or "")
    assert invitation(await seen_with(Reach("nobody", "nobody"), ip="203.0.113.9")) is None


async def test_a_change_of_the_verdict_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    board = empty_board()
    caplog.set_level(logging.INFO)
    nobody = Reach("nobody", "nobody can reach you", ("forward a port", "join a seed"))
    for _ in range(3):
        await seen_with(nobody, board)
    await seen_with(Reach("reachable", "reachable", (), (SEED,)), board)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("board")]
    assert told[0] == "nobody can reach you: (1) forward a port, (2) join a seed"
    assert told[1] == "reachable" and f"swarmnode join {SEED} --swarm friends" in told[2]
    assert sum("nobody can reach you" in line for line in told) == 1


def test_a_node_that_hears_and_gets_nothing_for_a_minute_says_so_until_something_comes() -> None:
    starving = Starving()
    assert starving.advise(0, {}, 0.0) == ""
    assert starving.advise(0, {"timeout": 3}, 10.0) == ""
    assert starving.advise(0, {"timeout": 9}, 60.0) == ""
    assert "join a seed" in starving.advise(0, {"timeout": 9}, 71.0)
    assert starving.advise(1, {"timeout": 9}, 72.0) == ""
    assert starving.advise(1, {"timeout": 9, "no_spread": 5}, 300.0) == ""
    assert starving.advise(1, {"timeout": 9, "unavailable": 3}, 301.0) == ""
    assert "join a seed" in starving.advise(1, {"timeout": 12, "unavailable": 3}, 362.0)


def test_a_node_that_can_use_nothing_of_what_comes_says_why() -> None:
    starving = Starving()
    assert starving.advise(2, {"timeout": 1, "too_long": 3}, 0.0) == ""
    assert starving.advise(2, {"timeout": 2, "too_long": 4}, 10.0) == ""
    said = starving.advise(2, {"timeout": 2, "too_long": 6}, 71.0)
    assert "none could be used for 60 s" in said and "authors are asked less often" in said
    assert "answers longer in our tokenizer than we accept (rollout.max_tokens), 1 fetched too slowly" in said
    assert starving.advise(3, {"timeout": 2, "too_long": 9}, 72.0) == ""


def test_a_round_tells_what_was_not_needed_from_what_was_not_usable() -> None:
    heard = replace(STATUS.exchange, accepted=1, dropped={"crowded_out": 180, "stale": 1, "malformed": 2})
    assert round_line(replace(STATUS, exchange=heard)).endswith("accepted 1 not needed 181 dropped 2")


def test_the_quick_start_explains_the_line_of_a_round_as_it_is() -> None:
    page = (builtin_folder("configs").parent / "docs" / "quick_start.md").read_text()
    (shown,) = re.findall(r"^round 12/100 .*", page, re.MULTILINE)
    learnt = replace(STATUS.training, replayed=24, book=310)
    line = round_line(replace(STATUS, training=learnt, reward=replace(STATUS.reward, external=0.812)))
    assert re.sub(r"[\d.]+", "N", shown) == re.sub(r"[\d.]+", "N", line)
    explained = [cell for row in re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE) for cell in row.split()]
    assert set(shown.replace(",", "").split()) <= set(explained)
