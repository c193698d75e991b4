"""Whether the next round is generated while this one is trained on.

config, hardware, models -> [decide_overlap] -> node.py (a second thread) | policy_learner.py (sleep)
"""

from dataclasses import dataclass
from typing import Literal

from swarmnode.hardware import GIB


@dataclass(frozen=True, slots=True)
class Overlap:
    """The decision, in a sentence for the log. `sleep`: the engine gives its memory back for training."""

    on: bool
    sleep: bool
    reason: str


def decide_overlap(
    setting: Literal["auto", "on", "off"],
    *,
    max_lag: int,
    gpu: bool,
    cores: int,
    free_bytes: float,
    need_bytes: float | None,
) -> Overlap:
    """Overlap needs room for generation and training at once, and on a CPU a core for each. It also makes
    every rollout at least one version old. `need_bytes` is None where nobody can tell.

    >>> decide_overlap("auto", max_lag=8, gpu=False, cores=1, free_bytes=9e9, need_bytes=1e9).reason
    'off: this machine has one core'
    """
    tight = need_bytes is None or free_bytes < need_bytes
    if max_lag == 0:
        return Overlap(False, gpu and tight, "off: rollout.max_lag is 0, only the newest version may train")
    if setting != "auto":
        return Overlap(setting == "on", setting == "off" and gpu and tight, f"{setting}: as set")
    if not gpu and cores < 2:
        return Overlap(False, False, "off: this machine has one core")
    if need_bytes is None:
        return Overlap(False, gpu, "off: the memory that this model needs is not known")
    room = f"{need_bytes / GIB:.2f} GiB for generation and training at once, {free_bytes / GIB:.2f} GiB free"
    return Overlap(not tight, gpu and tight, f"{'off' if tight else 'on'}: {room}")
