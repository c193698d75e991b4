"""Readings of a machine: what it tells of itself and of whoever else uses it: processes, battery, heat.

psutil, nvidia-smi -> [read_machine] -> Readings -> reasons_to_pause.py

Each look takes some 10 ms, and up to a second more where nvidia-smi is asked. Nothing here needs rights.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from swarmnode.extensions.limits.reasons_to_pause import Readings
from swarmnode.machine.hardware import NVIDIA_SMI_PLAIN, ask_nvidia_smi
from swarmnode.printable import printable
from swarmnode.settings.config import Config, LimitsConfig

BUSY_PERCENT = 10
"""Share of the card's time from which on a program uses it. Drawing a desktop takes some percent."""

CPU_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp"})
"""Names that Linux has for the sensors of a CPU."""

Ask = Callable[[Sequence[str]], str]
"""Runs nvidia-smi with these arguments and returns what it prints; empty where it cannot."""


def read_machine(config: Config, card: str, ask: Ask = ask_nvidia_smi) -> Readings:
    """Returns what the limits have to know now. `card`: the card that this node uses, as nvidia-smi names
    it, or empty; what no limit asks for is not looked at."""
    limits = config.limits
    gives_way = config.node.rounds is None if limits.give_way is None else limits.give_way
    which = (f"--id={card}",) if card else ()
    return Readings(
        datetime.now().time(),
        on_battery=on_battery() if gives_way else None,
        programs=listed_programs(limits, _names_of_others()) if limits.programs else (),
        card_users=_others_on_card(ask(("pmon", "-c", "1", "-s", "u", *which)))
        if which and gives_way
        else None,
        temperature_c=None if limits.temperature is None else _temperature(which, ask),
    )


def busy_processes(text: str) -> dict[int, str]:
    """Returns the names of processes that keep a card busy, by pid, from what `nvidia-smi pmon` prints. Its
    columns are not the same with every driver: the first line names them.

    >>> head = "# gpu    pid  type    sm    mem    enc    dec    command\\n# Idx  #  C/G  %  %  %  %  name\\n"
    >>> busy_processes(head + "  0  41  G  4  0  -  -  Xorg\\n  0  77  C  96  40  -  -  blender\\n")
    {77: 'blender'}
    """
    lines = text.splitlines()
    columns = lines[0].lstrip("# ").split() if lines else []
    if not {"pid", "sm", "command"} <= set(columns):
        return {}
    found: dict[int, str] = {}
    for line in lines[1:]:
        cells = dict(zip(columns, line.split(maxsplit=len(columns) - 1), strict=False))
        pid, share = cells.get("pid", ""), cells.get("sm", "")
        if pid.isdecimal() and share.isdecimal() and int(share) >= BUSY_PERCENT:
            found[int(pid)] = cells.get("command", "").strip()
    return found


def listed_programs(limits: LimitsConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the programs among `names` that limits.programs lists, whatever their case.

    >>> listed_programs(LimitsConfig(programs=("Blender", "obs")), ["sh", "blender", "blender"])
    ('Blender',)
    """
    running = {name.casefold() for name in names}
    return tuple(name for name in limits.programs if name and name.casefold() in running)


def on_battery() -> bool | None:
    """Returns True while this machine runs on its battery. None: it has none."""
    try:
        battery = psutil.sensors_battery()
    except OSError:  # Containers may have no /sys/class/power_supply.
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _names_of_others() -> list[str]:
    """Returns the names of all processes but our own."""
    own = _own_processes()
    return [one.info["name"] or "" for one in psutil.process_iter(["name"]) if one.pid not in own]


def _others_on_card(printed: str) -> tuple[str, ...] | None:
    """Returns the programs that keep the card busy and are neither of this node nor of another one: two nodes
    on one card would wait for each other. None: the driver does not tell."""
    if not printed:
        return None
    busy, own = busy_processes(printed), _own_processes()
    return tuple(
        printable(name, max_chars=40) for pid, name in busy.items() if pid not in own and _is_foreign(pid)
    )


def _is_foreign(pid: int) -> bool:
    """Returns False for other nodes, for what they started (vLLM's engine has a name of its own), and for
    numbers of processes that are another container's."""
    try:
        process = psutil.Process(pid)
        family = (process, *process.parents())
        return not any(Path(word).name == "swarmnode" for one in family for word in one.cmdline())
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _own_processes() -> set[int]:
    own = psutil.Process()
    with suppress(psutil.AccessDenied):  # Where /proc hides the processes of others (hidepid=1).
        return {own.pid, *(child.pid for child in own.children(recursive=True))}
    return {own.pid}


def _temperature(which: Sequence[str], ask: Ask) -> float | None:
    """Returns that of the card in use, or of the hottest sensor of the CPU."""
    if which:
        printed = ask(("--query-gpu=temperature.gpu", *NVIDIA_SMI_PLAIN, *which)).strip()
        return float(printed) if printed.isdecimal() else None
    sensors = psutil.sensors_temperatures() if psutil.LINUX else {}
    found = [one.current for name, ones in sensors.items() if name in CPU_SENSORS for one in ones]
    return max(found, default=None)
