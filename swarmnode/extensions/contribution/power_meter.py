"""Energy that this machine takes, where it tells: the processor by its counters (RAPL), and the card in use.

/sys/class/powercap, nvidia-smi -> [PowerMeter] -> contribution_days.py

Both tell of all that runs on them, not of this node alone, and neither tells of the rest of the machine. Most
kernels let only root read the processor's counters.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swarmnode.machine.hardware import NVIDIA_SMI_PLAIN, ask_nvidia_smi

POWERCAP = Path("/sys/class/powercap")

MOST_WATTS = 4000.0
"""Most that a card or a processor may take; more is no measurement."""

MOST_S = 60.0
"""Longest time that a card's power is taken to have lasted: a machine may have slept."""


class PowerMeter:
    """Adds up energy from look to look. Not to be called in an event loop: a look can take seconds."""

    def __init__(
        self,
        card: str = "",
        *,
        powercap: Path = POWERCAP,
        watts_of: Callable[[str], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`card`: the card in use, as nvidia-smi names it; empty without one. `watts_of`: asks for power."""
        self._card, self._watts_of, self._clock = card, watts_of or card_watts, clock
        # Zones within a package, and that of the whole platform, would count the same energy again.
        zones = powercap.glob("intel-rapl:*")
        self._zones = [zone for zone in sorted(zones) if _text(zone / "name").startswith("package")]
        self._counts: dict[Path, int] = {}
        self._looked_at = clock()
        self._processor(0.0)

    def joules(self) -> float | None:
        """Returns the energy since the last look. None: the machine tells of none."""
        now = self._clock()
        passed_s = max(0.0, now - self._looked_at)
        self._looked_at = now
        found = self._processor(passed_s)
        if self._card and (watts := self._watts_of(self._card)) is not None:
            found.append(watts * min(passed_s, MOST_S))
        return sum(found) if found else None

    def _processor(self, passed_s: float) -> list[float]:
        """Returns what each package took since its counter was read last; a counter begins again when it is
        full."""
        found: list[float] = []
        for zone in self._zones:
            count, full = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
            before = self._counts.pop(zone, None)
            if count is None:
                continue
            self._counts[zone] = count
            if before is not None:
                joules = (count - before if count >= before else count - before + (full or 0)) / 1e6
                if 0 <= joules <= MOST_WATTS * passed_s:
                    found.append(joules)
        return found


def card_watts(card: str) -> float | None:
    """Returns the power that a card takes now, by nvidia-smi. None: it does not tell."""
    return watts_in(ask_nvidia_smi((f"--id={card}", "--query-gpu=power.draw", *NVIDIA_SMI_PLAIN)))


def watts_in(text: str) -> float | None:
    """Returns the power that nvidia-smi printed for one card.

    >>> watts_in("71.35\\n"), watts_in("[N/A]"), watts_in("")
    (71.35, None, None)
    """
    try:
        watts = float(text.strip())
    except ValueError:
        return None
    return watts if math.isfinite(watts) and 0 <= watts <= MOST_WATTS else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path))
    return None
