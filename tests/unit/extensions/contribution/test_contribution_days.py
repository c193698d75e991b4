"""Hours, energy and groups are kept by day over restarts, and told once a week."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from swarmnode.extensions.contribution.contribution_days import DAY_S, MOST_DAYS, MOST_S, ContributionDays
from swarmnode.extensions.contribution.power_meter import PowerMeter
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.showing.node_status import NodeStatus, Phase, Sharing, WeekContribution
from swarmnode.settings.config import Config
from tests.unit.exchange.conftest import Clock


class Meter(PowerMeter):
    """Tells what it is given."""

    def __init__(self, told: Sequence[float | None] = ()) -> None:
        self._told = list(told)

    def joules(self) -> float | None:
        return self._told.pop(0) if self._told else None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "contribution.json"


def days(path: Path, clock: Clock) -> ContributionDays:
    return ContributionDays(path, Meter, clock)


def status(given: int = 0, learnt: int = 0, phase: str = "training", policy: int = 0) -> NodeStatus:
    board = StatusBoard(Config(), peer_id="p", name="n", model="m", policy=policy)
    sharing = Sharing(published=given, trained={"author": learnt} if learnt else {})
    return msgspec.structs.replace(board.status, exchange=sharing, phase=Phase(phase, 0.0))


def test_time_energy_and_groups_of_a_week_add_up_over_restarts(path: Path, clock: Clock) -> None:
    for life in range(2):
        with days(path, clock) as kept:
            kept.see(status(learnt=5 * life))
            kept.look(Meter([1.8e6]), 60.0)
            clock.advance(DAY_S)
            kept.look(Meter([1.8e6]), 60.0)
            found = kept.see(status(given=10, learnt=5 * life + 5))
    assert found.hours == pytest.approx(4 / 60, rel=1e-3)
    assert msgspec.structs.replace(found, hours=None) == WeekContribution(None, 2.0, given=20, learnt=10)


def test_what_is_older_than_a_week_is_not_in_it(path: Path, clock: Clock) -> None:
    with days(path, clock) as kept:
        kept.see(status())
        kept.see(status(given=3))
        clock.advance(7 * DAY_S)
        assert kept.see(status(given=3)).given == 0


@pytest.mark.parametrize("phase", ["paused", "resting", "starting", "waiting for a place in the pipeline"])
def test_a_pause_or_a_wait_costs_no_hours(path: Path, clock: Clock, phase: str) -> None:
    with days(path, clock) as kept:
        kept.see(status(phase=phase))
        kept.look(Meter([500.0]), 60.0)
        assert (kept.see(status()).hours, kept.see(status()).kwh) == (0.0, None)


def test_the_policies_of_a_process_share_its_hours_and_add_up_their_groups(path: Path, clock: Clock) -> None:
    with days(path, clock) as kept:
        for policy in range(2):
            kept.see(status(policy=policy))
        kept.look(Meter([3.6e6]), 36.0)
        for policy in range(2):
            found = kept.see(status(given=4, policy=policy))
    assert (found.hours, found.kwh, found.given) == (0.01, 1.0, 8)


def test_a_sleep_between_two_looks_is_not_work(path: Path, clock: Clock) -> None:
    with days(path, clock) as kept:
        kept.see(status())
        kept.look(Meter(), 86_400.0)
        assert kept.see(status()).hours == MOST_S / 3600


def test_it_is_told_once_a_week(path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with days(path, clock) as kept:
        kept.see(status())
        for _ in range(15):
            kept.look(Meter([3.6e5]), 60.0)
            clock.advance(DAY_S)
        kept.look(Meter(), 60.0)
    with days(path, clock) as kept:
        kept.see(status())
        kept.look(Meter(), 60.0)
    told = [record.message for record in caplog.records]
    assert told == ["this week: 0.1 h, 0.7 kWh, 0 groups given, 0 learnt from"] * 2


def test_the_file_is_bounded_and_a_clock_that_jumps_breaks_nothing(path: Path, clock: Clock) -> None:
    with days(path, clock) as kept:
        for _ in range(MOST_DAYS + 50):
            kept.see(status())
            clock.advance(DAY_S)
        clock.advance(-3000 * DAY_S)
        assert kept.see(status(given=1)).hours == 0.0
        kept.look(Meter([1.0]), 15.0)
    assert len(msgspec.json.decode(path.read_bytes())["days"]) <= MOST_DAYS


@pytest.mark.parametrize("content", [b"not json", b'{"days": {"1": {"seconds": -1}}}', b'{"days": [1]}'])
def test_a_damaged_file_is_set_aside(
    content: bytes, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with days(path, clock) as kept:
        assert kept.see(status()).hours == 0.0
    assert "starting without it" in caplog.text and path.with_name("contribution.json.damaged").exists()


def test_a_full_disk_is_said_once_and_stops_nothing(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.touch()
    kept = days(path.parent / "nowhere" / "contribution.json", clock)
    with pytest.raises(NotADirectoryError):
        (path.parent / "nowhere").mkdir()
    with kept:
        kept.see(status())
        kept._write()
    assert caplog.text.count("cannot save hours and energy") == 1
