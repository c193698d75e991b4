"""docs/metrics.md: every field of the record is on it, as the code says it, and its scripts run."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import swarmnode
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.node.showing.monitors import checked_monitor
from swarmnode.node.showing.node_status import NodeStatus, measurements, summary_of
from tests.monitored import at_round, run_in

ROOT = Path(__file__).parents[4]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "checks"))
    return importlib.import_module("metrics_page")


def scripts(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_page_is_made_of_the_code_as_it_stands(made: ModuleType) -> None:
    assert made.PAGE.read_text() == made.page(), "python checks/metrics_page.py"


def test_every_field_has_a_sentence(made: ModuleType) -> None:
    assert [name for name, _, told in made.fields_of() if not told] == []


def test_every_reason_why_something_was_not_used_has_a_sentence(made: ModuleType) -> None:
    assert made.sentences(Reason).keys() >= Reason.__members__.keys()


def test_every_number_of_a_full_status_is_on_the_page(made: ModuleType) -> None:
    numbers = {name.removesuffix(".NAME") for name, is_number, _ in made.fields_of() if is_number}
    every = {name for name, _, _ in made.fields_of()}
    seen = filled(msgspec.to_builtins(at_round(1)))
    told = {name for name in measurements(msgspec.convert(seen, NodeStatus)) if name not in numbers}
    assert {name.rpartition(".")[0] for name in told} <= {name.removesuffix(".NAME") for name in every}
    assert len(every) > 100


def filled(tree: Any) -> Any:
    """The record with a number wherever one was unknown, and an entry in each empty map."""
    if isinstance(tree, dict):
        return {key: filled(value) for key, value in tree.items()} or {"some": 1}
    return tree


def test_the_loggers_on_the_pages_log(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(task: str, *, rounds: int, on_round: Any = None, monitors: Any = ()) -> None:
        status = at_round(rounds)
        if on_round is not None:
            on_round(status)
        for monitor in monitors:
            if not isinstance(monitor, str):
                checked_monitor(monitor).start(run_in(ROOT))
                monitor.log("round", rounds, measurements(status))
                monitor.finish(summary_of(status))

    monkeypatch.setattr(swarmnode, "run", run, raising=False)
    (first,) = scripts(made.PAGE.read_text())
    (second,) = scripts((ROOT / "docs" / "trackers.md").read_text())
    exec(first, {})
    assert capsys.readouterr().out.startswith("20 2.0 {'own_groups': 0")
    exec(second, {})
    assert capsys.readouterr().out.splitlines() == ["calm-blue-otter 0.0001", "round 20 2.0", "0.5"]
