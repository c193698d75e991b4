"""A node under its guard: it pauses with the reason named, goes on, and obeys people."""

import asyncio
import threading
from contextlib import AsyncExitStack
from datetime import time
from pathlib import Path

import pytest

from swarmnode.extensions.limits import machine_guard
from swarmnode.extensions.limits.machine_guard import PauseWatch
from swarmnode.extensions.limits.reasons_to_pause import Readings
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.guards import open_guards
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.settings.config import Config
from swarmnode.testing import FakeLearner
from tests.shown_page import STATUS
from tests.unit.node.test_node import node
from tests.unit.node.test_run_control import PATIENCE_S, reached

NIGHT, NOON = Readings(time(23, 0)), Readings(time(12, 0))


def source(control: RunControl, **limits: object) -> NodeSource:
    config = Config.model_validate({"limits": limits})
    return NodeSource(lambda: STATUS, control, config, {}, resolve_paths(Path("/nowhere")))


class Watched:
    """A run control, and the machine that a test makes up for it."""

    def __init__(self, **limits: object) -> None:
        self.control = RunControl(lambda: None)
        self.seen = NIGHT
        self._watch = PauseWatch(source(self.control, **limits), lambda: self.seen)

    def sees(self, seen: Readings) -> str:
        """Returns why the run is paused after a look."""
        self.seen = seen
        self._watch.look()
        return self.control.until


def test_a_run_is_paused_by_what_is_seen_and_goes_on_by_itself() -> None:
    machine = Watched(hours="22-7")
    assert machine.sees(NIGHT) == ""
    assert machine.sees(NOON) == "outside 22-7" and machine.control.paused
    assert machine.sees(NIGHT) == "" and not machine.control.paused


def test_all_reasons_are_named() -> None:
    machine = Watched(hours="22-7")
    assert machine.sees(Readings(time(12), on_battery=True)) == "outside 22-7, on battery"
    assert machine.sees(Readings(time(23), on_battery=True)) == "on battery"


def test_a_pause_of_a_person_outlasts_every_reason() -> None:
    machine = Watched(hours="22-7")
    machine.sees(NOON)
    machine.control.ask("pause")
    assert machine.sees(NIGHT) == "until resumed"
    assert machine.control.ask("resume") == "resuming" and not machine.control.paused


def test_who_resumes_overrules_the_reasons_of_now_until_they_are_gone() -> None:
    machine = Watched(hours="22-7")
    machine.sees(NOON)
    assert machine.control.ask("resume") == "resuming despite this: outside 22-7"
    assert machine.sees(NOON) == ""
    assert machine.sees(Readings(time(12), on_battery=True)) == "on battery", "another reason counts at once"
    assert machine.sees(NIGHT) == ""
    assert machine.sees(NOON) == "outside 22-7", "and the first one counts again once it was gone"


def test_a_look_that_fails_lets_go_is_told_of_once_and_the_next_one_counts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control, seen_enough = RunControl(lambda: None), threading.Event()
    looks = iter([NOON, None, None, NOON])
    found: list[str] = []

    def read(config: Config, card: str) -> Readings:
        seen = next(looks, NOON)
        found.append(control.held)
        if len(found) == 5:
            seen_enough.set()
        if seen is None:
            raise RuntimeError("the driver is gone")
        return seen

    monkeypatch.setattr(machine_guard, "read_machine", read)
    monkeypatch.setattr(machine_guard, "LOOK_S", 0.001)
    with machine_guard.guard_machine(source(control, hours="22-7")):
        assert seen_enough.wait(PATIENCE_S)
    assert found[:5] == ["", "outside 22-7", "", "", "outside 22-7"]
    assert caplog.text.count("cannot monitor this machine") == 1 and "the driver is gone" in caplog.text


async def test_a_node_that_is_held_back_says_why_and_ends_its_rounds_when_it_is_not() -> None:
    one = node(FakeLearner("me"), "node.rounds=3")
    one.control.hold("programs", "blender runs")
    async with one:
        running = asyncio.ensure_future(one.run())
        await reached(one, "paused")
        assert (one.status.phase.detail, one.status.progress.round) == ("blender runs", 0)
        one.control.hold("programs", "")
        async with asyncio.timeout(PATIENCE_S):
            assert (await running).rounds == 3


async def test_a_guard_looks_at_this_machine_and_ends_with_its_node() -> None:
    control = RunControl(lambda: None)
    async with AsyncExitStack() as stack:
        await open_guards(stack, source(control, programs=["no-such-program"]))
        assert "limits" in [thread.name for thread in threading.enumerate()]
    assert "limits" not in [thread.name for thread in threading.enumerate()]
    assert not control.paused
