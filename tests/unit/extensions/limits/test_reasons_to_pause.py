"""Decisions to pause, from readings that a test makes up."""

from datetime import time
from typing import Any

import pytest

from swarmnode.extensions.limits.reasons_to_pause import (
    LOOKS_FREE,
    Readings,
    Reasons,
    reasons_to_pause,
    within,
)
from swarmnode.settings.config import LimitsConfig

NOON = time(12, 0)


def after(limits: LimitsConfig, *seen: Readings) -> dict[str, str]:
    found = Reasons()
    for one in seen:
        found = reasons_to_pause(limits, one, found)
    return dict(found.words)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22-7", ["22:00", "00:00", "06:59"], ["07:00", "21:59"]),
        ("8:30-17", ["08:30", "16:59"], ["08:29", "17:00", "00:00"]),
        ("0-24", ["00:00", "23:59"], []),
        ("7-7", ["07:00", "06:59"], []),
        ("", ["03:00"], []),
    ],
)
def test_hours_begin_at_the_first_and_end_before_the_second(
    hours: str, inside: list[str], outside: list[str]
) -> None:
    assert [within(hours, time.fromisoformat(one)) for one in inside] == [True] * len(inside)
    assert [within(hours, time.fromisoformat(one)) for one in outside] == [False] * len(outside)


def test_outside_its_hours_a_run_is_held_back() -> None:
    assert after(LimitsConfig(hours="22-7"), Readings(NOON)) == {"hours": "outside 22-7"}
    assert after(LimitsConfig(hours="22-7"), Readings(NOON), Readings(time(23, 0))) == {}


def test_a_machine_that_tells_nothing_is_never_held_back() -> None:
    assert after(LimitsConfig(temperature=50, programs=("obs",)), Readings(NOON)) == {}


def test_a_battery_holds_until_it_is_one_no_more() -> None:
    seen = Readings(NOON, on_battery=True)
    assert after(LimitsConfig(), seen) == {"battery": "on battery"}
    assert after(LimitsConfig(), seen, Readings(NOON, on_battery=False)) == {}


def test_heat_holds_until_it_is_eight_degrees_cooler() -> None:
    limits = LimitsConfig(temperature=84)
    heat = [Readings(NOON, temperature_c=degrees) for degrees in (84.0, 85.0, 77.0, 76.0, 84.0)]
    told = [after(limits, *heat[: count + 1]).get("temperature") for count in range(len(heat))]
    assert told == [None, "85 \u00b0C, resumes below 76", "77 \u00b0C, resumes below 76", None, None]


def test_a_listed_program_holds_while_it_runs() -> None:
    limits = LimitsConfig(programs=("blender",))
    assert after(limits, Readings(NOON, programs=("blender",))) == {"programs": "blender runs"}
    assert after(limits, Readings(NOON, programs=("blender",)), Readings(NOON)) == {}


BUSY, FREE = Readings(NOON, card_users=("blender",)), Readings(NOON, card_users=())


def test_whoever_uses_the_card_once_does_not_hold_a_run_and_twice_does() -> None:
    assert after(LimitsConfig(), BUSY) == {}
    assert after(LimitsConfig(), BUSY, FREE, BUSY) == {}
    assert after(LimitsConfig(), BUSY, BUSY) == {"card": "blender uses the card"}


def test_a_card_has_to_be_free_for_a_minute_before_a_run_goes_on() -> None:
    resting = [BUSY, BUSY, *[FREE] * (LOOKS_FREE - 1)]
    assert after(LimitsConfig(), *resting) == {"card": "blender uses the card"}
    assert after(LimitsConfig(), *resting, BUSY, FREE) == {"card": "blender uses the card"}
    assert after(LimitsConfig(), *resting, FREE) == {}


def test_a_driver_that_stops_telling_does_not_hold_a_run() -> None:
    assert after(LimitsConfig(), BUSY, BUSY, Readings(NOON, card_users=None)) == {}


@pytest.mark.parametrize("hours", ["25-7", "22", "22-7-8", "-", "7:60-8", "24:30-3", "22 - 7", "8-9\n"])
def test_what_are_no_hours_is_refused_with_an_example(hours: str) -> None:
    with pytest.raises(ValueError, match="22-7 or 8:30-17"):
        LimitsConfig(hours=hours)


@pytest.mark.parametrize("power", ["60", "0%", "160%", "-5%", "nan%", "x%", "half", 0, None])
def test_what_is_no_share_is_refused_with_an_example(power: Any) -> None:
    with pytest.raises(ValueError, match=r"60% or 0\.6"):
        LimitsConfig(power=power)
