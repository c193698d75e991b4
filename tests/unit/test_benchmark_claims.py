"""What benchmarks say when a node or a machine does not do as they would like."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from swarmnode.node.status import NodeStatus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
