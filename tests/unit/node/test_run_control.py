"""Requests of people to a node, and what its loop makes of them."""

import asyncio

import pytest

from swarmnode.node.node import NodeLoop
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.board import Occasion
from swarmnode.node.showing.node_status import NodeStatus
from swarmnode.testing import FakeLearner
from tests.unit.node.test_node import Recorder, node, run

PATIENCE_S = 30.0


async def reached(one: NodeLoop, phase: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while one.status.phase.name != phase:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_paused_node_saves_waits_and_goes_on() -> None:
    learner = FakeLearner("me")
    one = node(learner, "node.rounds=6", "node.checkpoint_every=100")

    class PausesAtTwo(Recorder):
        def see(self, event: Occasion, status: NodeStatus) -> None:
            if event == "round" and status.progress.round == 2:
                one.control.ask("pause")

    one._watcher = PausesAtTwo()
    async with one:
        running = asyncio.ensure_future(one.run())
        await reached(one, "paused")
        assert (one.status.progress.round, one.status.phase.detail) == (2, "until resumed")
        assert one.status.checkpoint.round == 2
        assert learner.rests == 1, "its memory is given back once a pause"
        one.control.ask("resume")
        async with asyncio.timeout(PATIENCE_S):
            summary = await running
    assert summary.rounds == 6


async def test_a_pause_ends_by_itself_and_a_stop_ends_it_at_once() -> None:
    one = node(FakeLearner("me"), "node.rounds=3")
    one.control.ask("pause", 0.1)
    async with asyncio.timeout(PATIENCE_S):
        assert (await run(one)).rounds == 3
    two = node(FakeLearner("me"))
    two.control.ask("pause")
    async with two, asyncio.timeout(PATIENCE_S):
        running = asyncio.ensure_future(two.run())
        await reached(two, "paused")
        two.control.ask("stop")
        assert (await running).stopped == "stopped on request"


async def test_a_node_with_half_the_power_rests_as_long_as_it_works() -> None:
    one = node(FakeLearner("me", round_s=0.05), "node.rounds=3", "limits.power=50%")
    recorder = Recorder()
    one._watcher = recorder
    async with asyncio.timeout(PATIENCE_S):
        assert (await run(one)).rounds == 3
    resting = [phase for phase in one.status.earlier if phase.name == "resting"]
    assert len(resting) == 2 and resting[0].detail == "limits.power is 50%"


async def test_a_finished_round_is_whole_and_the_last() -> None:
    learner = FakeLearner("me")
    one = node(learner, overlap=True)

    class FinishesInTwo(Recorder):
        def see(self, event: Occasion, status: NodeStatus) -> None:
            if event == "round" and status.progress.round == 2:
                one.control.ask("finish")

    one._watcher = FinishesInTwo()
    async with asyncio.timeout(PATIENCE_S):
        summary = await run(one)
    assert (summary.rounds, summary.saved_round, summary.stopped) == (2, 2, "stopped on request")


def test_a_node_takes_what_its_kind_can_follow() -> None:
    stopped: list[int] = []
    seed = RunControl(lambda: stopped.append(1), ("stop",), stopping="stopping now")
    with pytest.raises(ValueError, match="this node takes stop, not pause"):
        seed.ask("pause")
    assert not seed.paused
    assert seed.ask("stop") == "stopping now" and stopped == [1] and seed.ending, "it has no checkpoint"


def test_who_resumes_what_is_not_paused_is_told_so() -> None:
    control = RunControl(lambda: None)
    assert control.ask("resume") == "not paused; it keeps running"
    control.hold("program", "blender runs")
    assert control.ask("resume") == "resuming despite this: blender runs"
    assert control.ask("resume") == "not paused; it keeps running"


def test_the_log_has_what_a_person_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    control = RunControl(lambda: None)
    control.ask("pause")
    control.hold("program", "blender runs")
    control.ask("resume")
    assert caplog.messages == [
        "pausing after this round, as requested: until resumed",
        "pausing after this round: blender runs",
        "as requested, resuming despite this: blender runs",
    ]
