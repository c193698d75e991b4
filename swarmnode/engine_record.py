"""The facts about an engine before it is made: where it runs, what it takes, how to install it.

registry.py -> [record_of, by_preference] -> rollout/engine_choice.py (which one), models.py, doctor,
    node/building/machine_memory.py (its memory)

A record needs no torch, so that planning and refusing cost nothing. It does not name the `Engine` type that
`make` returns, which belongs to a higher layer (rollout/engine.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnode.errors import ConfigError
from swarmnode.machine.memory_plan import EngineMemory
from swarmnode.registry import find, ours


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments from which an engine is made."""

    base: Any
    """The transformers model, without an adapter. It is read and never changed."""
    eos_token_ids: Sequence[int]
    max_slots: int
    """Most requests that run at once."""
    max_length: int | None
    """Longest prompt and completion together, in tokens. None: the model's own limit."""
    device: Any
    """The torch.device on which it computes."""
    source: str | None
    """The folder or hub name from which the model was loaded."""
    lora_rank: int
    """The largest rank that `set_policy` will receive."""
    policies: int
    max_versions: int
    """Policy versions that have to be live at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord(EngineMemory):
    """An engine that `rollout.engine` can name. EngineMemory in machine/memory_plan.py explains its memory
    (`weights`, `growth`, `card_share`)."""

    make: Callable[[EngineOptions], Any]
    """Makes the `Engine`. Raises EngineError or ModelError; under `auto` another engine then replaces it."""
    fastest_on: Mapping[str, str] = field(default_factory=dict[str, str])
    """Types of devices (cuda, cpu) on which `auto` prefers it, with the reason. {family} is the model's."""
    instead: str = "{family} runs"
    """Beginning of the reason if another engine would be faster."""
    missing: Callable[[str], str | None] = lambda device: None
    """Returns why this machine lacks it for this type of device, if installing something would help."""
    install: str = ""
    """Advice on installing a missing part."""
    refuses: Callable[[Any, str, str | None], str | None] = lambda base, device, source: None
    """Returns why it cannot run a model (perhaps without weights) from `source` on this type of device."""
    takes_quantized: bool = False
    several_policies: bool = False
    """True if it holds the versions of several policies at once."""
    last_resort: bool = False
    """True if `auto` prefers any other engine."""


def record_of(name: str) -> EngineRecord:
    """Imports the record of the engine that `rollout.engine` names. Raises ConfigError.

    >>> record_of("embedded").fastest_on.keys()
    dict_keys(['cpu'])
    """
    found = find("engine", name)
    if not isinstance(found, EngineRecord):
        raise ConfigError(
            f"rollout.engine = {name!r} is a {type(found).__name__}, not an EngineRecord",
            hint="write NAME = EngineRecord(name, make=...), from swarmnode.engine_record",
        )
    return found


def by_preference(device: str) -> list[EngineRecord]:
    """Returns our own engines in the order in which `auto` tries them on this type of device."""
    return sorted(
        map(record_of, ours("engine")),
        key=lambda record: (device not in record.fastest_on, record.last_resort),
    )
