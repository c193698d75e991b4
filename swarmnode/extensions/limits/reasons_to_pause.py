"""The decision to hold a run back, from what is seen of the machine: pure.

machine_readings.py: Readings -> [reasons_to_pause] -> Reasons -> machine_guard.py -> RunControl.hold
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import time

from swarmnode.settings.config import LimitsConfig

COOLER_C = 8.0
"""Degrees below limits.temperature at which a run goes on."""

LOOKS_BUSY = 2
"""Looks in a row that find the card used by others before the run is held back: one may be a moment."""

LOOKS_FREE = 12
"""Looks in a row, a minute, that find it free before the run goes on: a renderer rests between pictures."""


@dataclass(frozen=True, slots=True)
class Readings:
    """This machine at one moment. None: it does not tell, or nobody asked."""

    clock: time
    """Local time of the day."""
    on_battery: bool | None = None
    programs: tuple[str, ...] = ()
    """Programs that run and that limits.programs names."""
    card_users: tuple[str, ...] | None = None
    """Programs of others that keep the card busy."""
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons of one decision, and what the next one has to know of it."""

    words: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons in words, by the setting that makes them some."""
    looks_busy: int = 0
    looks_free: int = 0
    """Looks in a row that found the card used by others, and not used."""


def reasons_to_pause(limits: LimitsConfig, seen: Readings, before: Reasons) -> Reasons:
    """Returns what holds the run back now.

    >>> dict(reasons_to_pause(LimitsConfig(hours="22-7"), Readings(time(7, 0)), Reasons()).words)
    {'hours': 'outside 22-7'}
    """
    words = {
        "hours": "" if within(limits.hours, seen.clock) else f"outside {limits.hours}",
        "programs": f"{seen.programs[0]} runs" if seen.programs else "",
        "battery": "on battery" if seen.on_battery else "",
        "temperature": _too_hot(limits.temperature, seen.temperature_c, "temperature" in before.words),
    }
    busy, free = before.looks_busy, before.looks_free
    if seen.card_users is not None:
        busy, free = (busy + 1, 0) if seen.card_users else (0, free + 1)
        goes_on = "card" in before.words and free < LOOKS_FREE
        if seen.card_users and (goes_on or busy >= LOOKS_BUSY):
            words["card"] = f"{seen.card_users[0]} uses the card"
        elif goes_on:
            words["card"] = before.words["card"]
    return Reasons({name: why for name, why in words.items() if why}, busy, free)


def within(hours: str, clock: time) -> bool:
    """Returns True within these hours, which may go over midnight; empty ones are the whole day.

    >>> within("22-7", time(23, 59)), within("22-7", time(7)), within("8:30-17", time(8, 30))
    (True, False, True)
    """
    if not hours:
        return True
    begin, end = (_minutes(part) for part in hours.split("-"))
    now = 60 * clock.hour + clock.minute
    return begin <= now < end if begin < end else now >= begin or now < end


def _minutes(clock: str) -> int:
    hour, _, minute = clock.partition(":")
    return 60 * int(hour) + int(minute or 0)


def _too_hot(limit: float | None, found: float | None, is_held: bool) -> str:
    if limit is None or found is None:
        return ""
    below = limit - COOLER_C
    hot = found > (below if is_held else limit)
    return f"{found:.0f} \u00b0C, resumes below {below:.0f}" if hot else ""
