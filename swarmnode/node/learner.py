"""The seam between a node and its learning half: policy, engine, trainer, tasks, checkpoints.

node.py (asyncio) -> threads -> [Learner] -> policy_learner.py | pipeline_learner.py | testing.FakeLearner
loaded_memory.py -> [decide_overlap] -> Overlap -> node.py (a second thread) | policy_learner.py (sleep)

Every call blocks. One thread calls at a time, with one exception: `rollouts` of the next round may run beside
`train`. What is generated comes from the policy that `use_newest_policy` took over last: which one does not
depend on which of the two is faster. `interrupt` may come from anywhere.
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
    """The state of generation: the engine, and what waits in it and above it."""

    engine: str = ""
    """The engine's name."""
    mode: str = ""
    """rollout.mode: how a round ends."""
    running: int = 0
    """Completions the engine works on."""
    waiting: int = 0
    """Completions the engine has no room for yet."""
    groups_in_flight: int = 0
    """Groups that have begun and are not complete."""
    surplus_groups: int = 0
    """Complete groups that the next round begins with."""
    concurrency: int | None = None
    """Completions kept in flight."""
    step_base_s: float | None = None
    """Cost of one engine step, whatever runs in it."""
    step_per_request_s: float | None = None
    """Time that each running completion adds to a step."""
    idle_share: float | None = None
    """Share of the wanted completions that were missing in a step, on average."""
    mean_tokens_produced: float | None = None
    """Mean tokens of completions that ended, since the start."""
    mean_tokens_trained: float | None = None
    """Mean tokens of completions handed out; below the other while long answers are still under way."""
    resumed: int = 0
    """Completions that were continued from their tokens, since the start."""
    reprefilled_tokens: int = 0
    """Tokens whose keys and values had to be computed again, since the start."""
    kept_tokens: int = 0
    """Tokens that were not, because their keys and values were kept from a turn before, since the start."""
    unjudged_groups: int = 0
    """Groups without a reward because a task's own judge failed, overran or died, since the start."""
    failure: str = ""
    """Message of the last failure of a task's own judge. Empty: there was none."""
    score_wait_s: float = 0.0
    """Time that rounds waited for scores after the last of their answers, since the start."""
    stale_groups_dropped: int = 0
    """Groups that began again because a token was older than eight versions, since the start."""
    live_versions: int = 1
    """Policy versions that the engine holds."""
    swaps: int = 0
    """New policies that the engine took over, since the start."""
    swap_s: float = 0.0
    """Time spent in taking over new policies, since the start."""
    kv_use: float | None = None
    """Share of the room for keys and values that is taken."""


@dataclass(frozen=True, slots=True)
class RoundRollouts:
    """The groups of one round of generation. `complete` is False when it was interrupted."""

    groups: tuple[RolloutGroup, ...]
    tokens: int
    seconds: float
    complete: bool
    generation: Generation


@dataclass(frozen=True, slots=True)
class Resumed:
    """The contents of a checkpoint: the numbers to continue from, and what is different now."""

    counters: Counters
    changed: tuple[str, ...] = ()
    """Settings that shape learning and are others now, each in words."""
    other_tasks: str = ""
    """The difference in words, where the run was trained on other tasks."""


class Learner(Protocol):
    """The learning half of a node."""

    @property
    @abstractmethod
    def policy_version(self) -> int: ...

    @abstractmethod
    def resume(self) -> Resumed | None:
        """Go on from the newest sound checkpoint, if there is one."""
        ...

    def use_newest_policy(self) -> None:
        """Generate with what has been learnt so far, from now on. Neither of the two below may be running."""
        ...

    def answer_too(self, examples: Sequence[ExampleKey]) -> None:
        """Answer these examples of others among the next ones. `rollouts` may not be running."""
        ...

    def catch_up(self, mix: RoundMix | None) -> None:
        """Make the next rounds of this mix; None: as it is set. `rollouts` may not be running."""
        ...

    def origins(self) -> Mapping[Origin, int]:
        """Returns the number of answers that it keeps to be replayed, by author and example."""
        ...

    def rollouts(self, number: int) -> RoundRollouts:
        """Answer and score the examples of a round."""
        ...

    @abstractmethod
    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport | None:
        """One round of learning, up to a new policy version. None: interrupted before anything was learnt."""
        ...

    def evaluate(self) -> Evaluation | None:
        """Reward on held-out draws; None when it was interrupted."""
        ...

    @abstractmethod
    def save(self, counters: Counters) -> Future[str]:
        """Take a snapshot and have it written; training may go on at once.

        The result is the checkpoint's name once it is on disk, or StorageError, earlier ones being as they
        were. Cancelled: a newer snapshot took its place before its turn came. Rollouts that no round up to
        `counters.round` trained on are part of it, unfinished ones too.
        """
        ...

    def rest(self) -> None:
        """Give back the memory that nobody needs while no round runs. The next call takes it again."""
        ...

    def interrupt(self) -> None:
        """Let `rollouts` and `evaluate` return as soon as they can, for good. Thread-safe."""
        ...

    def close(self) -> None:
        """Finish writing and let go of the engine. Nothing is called after it."""
        ...


@dataclass(frozen=True, slots=True)
class Overlap:
    """The decision, in a sentence for the log. `sleep`: the engine gives its memory back for training."""

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
    """Overlap needs room for generation and training at once, and on a CPU a core for each. It also makes
    every rollout at least one version old. `need_bytes` is None where nobody can tell.

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
