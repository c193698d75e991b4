"""The seam between a node and its learning half: policy, engine, trainer, tasks, checkpoints.

node.py (asyncio) -> threads -> [Learner] -> policy_learner.py | pipeline_learner.py | testing.FakeLearner
loaded_memory.py -> [decide_overlap] -> Overlap -> node.py (a second thread) | policy_learner.py (sleep)

Every call blocks. Only one thread calls at a time, with one exception: `rollouts` of the next round may run
during `train`. Rollouts come from the policy last taken over by `use_newest_policy`, so they do not depend on
which of the two is faster. `interrupt` may be called from any thread.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from swarmnode.exchange.library.signed_group import Origin
from swarmnode.machine.hardware import GIB
from swarmnode.node.catching_up import RoundMix
from swarmnode.training.records import Counters, Evaluation, TrainReport
from swarmnode.types import ExampleKey, RolloutGroup


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of generation: the engine, and the work that is running and waiting."""

    engine: str = ""
    """The engine's name."""
    mode: str = ""
    """rollout.mode: how a round ends."""
    running: int = 0
    """Completions that the engine is working on."""
    waiting: int = 0
    """Completions that the engine has no room for yet."""
    groups_in_flight: int = 0
    """Groups that have been started and are not complete."""
    surplus_groups: int = 0
    """Complete groups left over for the next round."""
    concurrency: int | None = None
    """Completions kept in flight."""
    step_base_s: float | None = None
    """Fixed time of one engine step, whatever runs in it."""
    step_per_request_s: float | None = None
    """Time that each running completion adds to a step."""
    idle_share: float | None = None
    """Share of the wanted completions that were missing in a step, on average."""
    mean_tokens_produced: float | None = None
    """Mean tokens of finished completions, since the start."""
    mean_tokens_trained: float | None = None
    """Mean tokens of completions handed out; lower than the one above while long answers are unfinished."""
    resumed: int = 0
    """Completions that were continued from their tokens, since the start."""
    reprefilled_tokens: int = 0
    """Tokens whose keys and values had to be computed again, since the start."""
    kept_tokens: int = 0
    """Tokens whose keys and values were kept from an earlier turn, since the start."""
    unjudged_groups: int = 0
    """Groups without a reward because a task's own judge failed, overran or died, since the start."""
    failure: str = ""
    """Message of the last failure of a task's own judge. Empty: none."""
    score_wait_s: float = 0.0
    """Time that rounds waited for scores after their last answer, since the start."""
    stale_groups_dropped: int = 0
    """Groups restarted because a token was older than eight versions, since the start."""
    live_versions: int = 1
    """Policy versions that the engine holds."""
    swaps: int = 0
    """New policies that the engine took over, since the start."""
    swap_s: float = 0.0
    """Time spent taking over new policies, since the start."""
    kv_use: float | None = None
    """Share of the memory for keys and values that is in use."""


@dataclass(frozen=True, slots=True)
class RoundRollouts:
    """The groups of one round of generation. `complete` is False if it was interrupted."""

    groups: tuple[RolloutGroup, ...]
    tokens: int
    seconds: float
    complete: bool
    generation: Generation


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint resumed: the counters to continue from, and what has changed since."""

    counters: Counters
    changed: tuple[str, ...] = ()
    """Changed settings that affect learning, each in words."""
    other_tasks: str = ""
    """The difference in words, if the run was trained on other tasks."""


class Learner(Protocol):
    """The learning half of a node."""

    @property
    @abstractmethod
    def policy_version(self) -> int: ...

    @abstractmethod
    def resume(self) -> Resumed | None:
        """Resume from the newest intact checkpoint, if there is one."""
        ...

    def use_newest_policy(self) -> None:
        """Generate with the newest policy from now on. `rollouts` and `train` may not be running."""
        ...

    def answer_too(self, examples: Sequence[ExampleKey]) -> None:
        """Also answer these examples of others in the next rounds. `rollouts` may not be running."""
        ...

    def catch_up(self, mix: RoundMix | None) -> None:
        """Use this mix for the next rounds; None: as configured. Called before the first round as well, if an
        earlier start had caught up. `rollouts` may not be running."""
        ...

    def origins(self) -> Mapping[Origin, int]:
        """Returns the number of answers kept for replay, by author and example."""
        ...

    def rollouts(self, number: int) -> RoundRollouts:
        """Answer and score the examples of a round."""
        ...

    @abstractmethod
    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport | None:
        """Run one round of learning, up to a new policy version. None: interrupted before any learning."""
        ...

    def evaluate(self) -> Evaluation | None:
        """Measure the reward on held-out draws; None if interrupted."""
        ...

    @abstractmethod
    def save(self, counters: Counters) -> Future[str]:
        """Take a snapshot and have it written; training may continue at once.

        The result is the checkpoint's name once it is on disk, or StorageError, which leaves earlier ones
        unchanged. Cancelled: a newer snapshot replaced it before it was written. It includes the rollouts
        that no round up to `counters.round` trained on, also unfinished ones.
        """
        ...

    def rest(self) -> None:
        """Release memory that is not needed while no round runs. The next call allocates it again."""
        ...

    def interrupt(self) -> None:
        """Make `rollouts` and `evaluate` return as soon as they can, permanently. Thread-safe."""
        ...

    def close(self) -> None:
        """Finish writing and release the engine. No other call may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Overlap:
    """The decision, with a sentence for the log. `sleep`: the engine releases its memory for training."""

    on: bool
    sleep: bool
    reason: str


def decide_overlap(
    setting: Literal["auto", "on", "off"],
    *,
    gpu: bool,
    cores: int,
    free_bytes: float,
    need_bytes: float | None,
) -> Overlap:
    """Overlap needs memory for generation and training at once, and on a CPU a core for each. It also makes
    every rollout at least one version old. `need_bytes` is None if unknown.

    >>> decide_overlap("auto", gpu=False, cores=1, free_bytes=9e9, need_bytes=1e9).reason
    'off: this machine has one core'
    """
    tight = need_bytes is None or free_bytes < need_bytes
    if setting != "auto":
        return Overlap(setting == "on", setting == "off" and gpu and tight, f"{setting}: as set")
    if not gpu and cores < 2:
        return Overlap(False, False, "off: this machine has one core")
    if need_bytes is None:
        return Overlap(False, gpu, "off: this model's memory needs are unknown")
    room = f"{need_bytes / GIB:.2f} GiB for generation and training at once, {free_bytes / GIB:.2f} GiB free"
    return Overlap(not tight, gpu and tight, f"{'off' if tight else 'on'}: {room}")
