"""`swarmnode peers` says who is there, what they gave, and what they are worth."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import SwarmnodeError
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import MOST_SHOWN, Reputation
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.node_status import ConnectedPeer, NodeStatus
from tests.shown_page import STATUS, shown_page

GIVER, LIAR, NEW = (f"12D3KooW{name}" for name in ("giver", "liar", "new"))


def with_peers() -> NodeStatus:
    """A status with a peer that gives, one that lies and one that has just come."""
    ledger = Ledger(Reputation(), lambda: 0.0)
    for _ in range(3):
        ledger.accept(GIVER)
    for _ in range(9):
        ledger.drop(Reason.FALSE_CLAIM, LIAR)
    ledger.drop(Reason.DUPLICATE, GIVER)
    ledger.drop(Reason.OTHER_VERSION, LIAR)
    ledger.reputation.note_failure(GIVER, 0.0)
    exchange = msgspec.structs.replace(
        STATUS.exchange, trained={GIVER: 2}, peers=ledger.reputation.figures(0.0)
    )
    connected = (ConnectedPeer(GIVER, "lan"), ConnectedPeer(NEW, "public"))
    network = msgspec.structs.replace(STATUS.network, connected=connected)
    return msgspec.structs.replace(STATUS, exchange=exchange, network=network)


def run(home: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["peers", "--home", str(home), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_peers_have_what_they_gave_and_their_reputation(tmp_path: Path) -> None:
    with shown_page(with_peers) as page:
        note = RunningNode(os.getpid(), STATUS.peer_id, "127.0.0.1", page.port, (), page.token)
        write_running(resolve_paths(tmp_path).running, note)
        lines = run(tmp_path).splitlines()
        found = {one["peer"]: one for one in json.loads(run(tmp_path, "--json"))["peers"]}
        with pytest.raises(SwarmnodeError, match="no policy 1 is running here"):
            run(tmp_path, "--policy", "1")
    assert [line.split()[0] for line in lines[1:4]] == list(map(memorable_name, (GIVER, NEW, LIAR)))
    assert lines[1].split()[1:] == [*["this", "LAN", "3", "0", "2", "100,", "paused", "5", "s"], GIVER]
    assert lines[2].split()[1:] == [*["internet", "-", "-", "0", "-"], NEW]
    assert lines[3].split()[1:] == [*["not", "connected", "0", "9", "0", "10,", "banned"], LIAR]
    assert lines[4] == (
        f"not used, or counted against {memorable_name(LIAR)}: 9 claimed other rewards than ours,"
        " 1 of other versions of our tasks"
    )
    assert found[LIAR]["connected"] is None and found[LIAR]["figures"]["dropped"] == 9


def test_strangers_without_end_take_no_room() -> None:
    reputation = Reputation(max_peers=1000)
    for number in range(500):
        reputation.punish(f"stranger {number}", 1.0, 0.0)
        reputation.count_header(f"quiet {number}", 0.0)
    reputation.note_accepted("friend")
    figures = reputation.figures(0.0)
    assert len(figures) == MOST_SHOWN and figures[0].peer == "friend"
