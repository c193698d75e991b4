"""A home that grows too large: what goes first, what never does, and what is said."""

import os
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import StorageError
from swarmnode.extensions.limits.disk_limit import home_bytes, make_room
from swarmnode.extensions.limits.machine_guard import guard_machine
from swarmnode.machine.hardware import GIB
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.settings.config import Config
from swarmnode.training.records import FORMAT, STATE, Counters, Measure, State
from tests.shown_page import STATUS

PIECE = 100_000
"""Bytes of each checkpoint and each file of rollouts."""


def checkpoint(folder: Path, number: int, reward: float | None, written_at: int) -> None:
    place = folder / f"round-{number:08d}"
    place.mkdir(parents=True)
    state = State(
        format=FORMAT,
        base_model="model",
        base_fingerprint="base",
        policy_version=number,
        seed=0,
        counters=Counters(round=number),
        reward=reward,
        measure=Measure(),
        tasks={},
        digests={},
    )
    (place / STATE).write_bytes(msgspec.json.encode(state))
    (place / "adapter").write_bytes(bytes(PIECE))
    os.utime(place / STATE, (written_at, written_at))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A home with an old run and the one that is trained, three checkpoints each, the second the best."""
    found = resolve_paths(tmp_path)
    for age, run in enumerate(("old", "new")):
        for number, reward in ((1, 0.1), (2, 0.9), (3, None)):
            checkpoint(found.checkpoints / run, number, reward, 1_000_000 * (1 + age) + number)
        (found.checkpoints / run / FILE).write_bytes(bytes(PIECE))
    return found


def left(paths: Paths) -> list[str]:
    return sorted(
        f"{run.name}/{one.name.removeprefix('round-0000000')}"
        for run in paths.checkpoints.iterdir()
        for one in run.iterdir()
    )


ALL = [*(f"new/{one}" for one in ("1", "2", "3", FILE)), *(f"old/{one}" for one in ("1", "2", "3", FILE))]


def test_a_home_within_its_limit_is_left_alone(paths: Paths) -> None:
    assert make_room(paths, home_bytes(paths), "new") == "" and left(paths) == ALL


def test_the_oldest_run_loses_what_it_does_not_need_first(paths: Paths) -> None:
    assert make_room(paths, home_bytes(paths) - 1, "new") == ""
    assert left(paths) == [one for one in ALL if one != "old/1"]


def test_rollouts_of_other_runs_go_after_the_checkpoints(paths: Paths) -> None:
    assert make_room(paths, home_bytes(paths) - 2.5 * PIECE, "new") == ""
    assert left(paths) == ["new/2", "new/3", f"new/{FILE}", "old/2", "old/3"]


def test_rollouts_of_a_policy_that_runs_stay_whatever_its_run_is_called(paths: Paths) -> None:
    for number in (1, 2):
        checkpoint(paths.policy(number).checkpoints / "new", 3, None, 1)
        (paths.policy(number).checkpoints / "new" / FILE).write_bytes(bytes(PIECE))
    write_running(paths.policy(1).running, RunningNode(os.getpid(), "peer", "127.0.0.1", 0))
    make_room(paths, 0, "new")
    shown = [paths.policy(number).checkpoints / "new" / FILE for number in range(3)]
    assert [file.exists() for file in shown] == [True, True, False]


def test_the_newest_and_the_best_of_every_run_stay_whatever_the_limit(paths: Paths) -> None:
    assert make_room(paths, 0, "new").startswith("its home takes 0.")
    assert left(paths) == ["new/2", "new/3", f"new/{FILE}", "old/2", "old/3"]


def test_a_node_whose_home_is_too_large_does_not_start(paths: Paths) -> None:
    config = Config.model_validate({"limits": {"disk_gb": PIECE / GIB}})
    source = NodeSource(lambda: STATUS, RunControl(lambda: None), config, {}, paths)
    with pytest.raises(StorageError, match="nothing is left to delete automatically"), guard_machine(source):
        pass
