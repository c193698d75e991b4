"""What benchmarks say when a node or a machine does not do as they would like."""

import asyncio
import importlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest

from swarmnode.identity.node_key import NodeKey
from swarmnode.node.showing.node_status import NodeStatus

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a benchmark as it is when it is run: its folder is the first that Python looks in."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def attacks(load) -> ModuleType:
    return load("attacks")


def row(attacks: ModuleType, name: str, quiet: float, under: float):
    return attacks.Row(name, quiet, under, None, 0, 0, 0.0, None)


def test_an_attack_is_judged_by_all_of_its_windows_together(attacks):
    rows = [row(attacks, "crowd", 4.0, 3.0), row(attacks, "crowd", 6.0, 6.0)]
    assert attacks.ratio_of(rows) == 0.9


def test_a_core_that_others_use_measures_nothing(attacks):
    calm = [[row(attacks, attacks.CONTROL, 4.0, 4.0)]]
    assert attacks.why_not_measurable([0.01, 0.02, None], calm) is None
    assert attacks.why_not_measurable([0.3, 0.2, 0.4], calm) == "others used 30 % of the victim's core"
    assert "no core to itself" in attacks.why_not_measurable([None], calm)


def test_a_machine_where_a_busy_neighbour_slows_the_victim_measures_nothing(attacks):
    slowed = [[row(attacks, attacks.CONTROL, 4.0, 3.0)]]
    why = attacks.why_not_measurable([0.01], slowed)
    assert why is not None and "0.75" in why
    # An attack may slow it: that is what is measured.
    assert attacks.why_not_measurable([0.01], [[row(attacks, "crowd", 4.0, 1.0)]]) is None


def test_where_nothing_could_be_measured_no_pace_is_claimed(attacks, tmp_path, capsys):
    rows = [[row(attacks, "crowd", 4.0, 1.0)]]
    attacks.finish(rows, {}, {}, "others used it", None)
    assert "worst_rounds_ratio" not in capsys.readouterr().out.split('"spread"')[0]
    attacks.finish(rows, {}, {}, None, None)
    assert '"worst_rounds_ratio": 0.25' in capsys.readouterr().out


def test_what_there_was_no_time_for_fails_the_claims_that_need_it(attacks, capsys):
    found = attacks.Findings(rows=[[row(attacks, "crowd", 4.0, 4.0)]])
    left_out = found.left_out(["crowd", "half_open"], whole=True)
    assert left_out == ["half_open", "replay_victim", "reward", "replayed_after_kill"]
    attacks.finish(found.rows, {}, {}, None, None, left_out)
    told = json.loads(capsys.readouterr().out)
    assert told["claims"] == {} and told["left_out"] == left_out
    assert found.left_out(["crowd"], whole=False) == []


def test_what_is_under_way_when_the_time_is_over_is_given_up(attacks):
    with pytest.raises(attacks.TimeIsOver), attacks.at_most(0.0):
        threading.Event().wait(60)


async def test_a_flood_stops_writing_to_a_victim_that_hung_up(load, tmp_path, monkeypatch, caplog):
    """asyncio warns of each write to a connection that is lost."""
    flood = load("attackers.attacks").provider_flood
    stage = load("attackers.stage").Stage(
        ("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGzBXWNvHpLALvWhjtsAhvcbjoYnWqtvGz8xwWC7aCpzS",),
        "commons",
        0.5,
        tmp_path,
        asyncio.StreamReader(),
    )
    key = NodeKey.generate()

    class Hangs:
        """An identity whose streams are closed on the other side before anything is written."""

        def __init__(self) -> None:
            self.key = key
            self.opened = 0

        async def open(self, peer: str, protocol: str):
            ours, theirs = socket.socketpair()
            theirs.close()
            self.opened += 1
            return await asyncio.open_connection(sock=ours)

        async def connect(self, target: str) -> str:
            return target

        async def is_connected(self, peer: str) -> bool:
            return False

    one = Hangs()

    @asynccontextmanager
    async def attacker() -> AsyncIterator[Hangs]:
        yield one

    async def dialled(*_: object) -> None:
        """No daemon: nothing to dial with."""

    monkeypatch.setattr(stage, "attacker", attacker)
    monkeypatch.setitem(flood.__globals__, "reconnect", dialled)
    await flood(stage)
    assert one.opened > 0 and stage.sent["records"] == 0
    assert "socket.send()" not in caplog.text


def test_rounds_that_a_node_did_not_finish_are_lost(load):
    scoring = load("scoring")
    status = NodeStatus(
        peer_id="", name="", swarm="", model="", version="", pid=1, started_at=0.0, phase="training"
    )
    seen = [(float(second), status) for second in range(5)]
    assert scoring.summed_up(seen, 3).lost_rounds == 0
    assert scoring.summed_up(seen, 8).lost_rounds == 5
    with pytest.raises(SystemExit, match="too few"):
        scoring.summed_up(seen[:2], 3)
