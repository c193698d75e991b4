"""The reports of training and the state of a checkpoint. No torch here: node and tests read these without it.

trainer.py, evaluation.py, checkpoint.py -> [records] -> node
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.errors import CheckpointError


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one round of training. None means that there was nothing to measure.

    Own tokens are the tokens of our own completions in every optimizer step taken.
    """

    own_groups: int = 0
    """Own groups that were trained on."""
    external_groups: int = 0
    """Groups of others that were learned from: trained on, or read for the book."""
    zero_advantage_own: int = 0
    """Own groups of the round without a gradient: all rewards equal, or unknown."""
    zero_advantage_external: int = 0
    """Such groups of others."""
    replayed: int = 0
    """Answers of the book that were trained on."""
    book: int = 0
    """Answers in the book."""
    book_foreign: int = 0
    """Answers in the book that others gave."""
    mended: int = 0
    """Right answers of others that were cut before the book kept them."""
    refused: int = 0
    """Right answers of others that it did not keep: doubtful, and not to be mended."""
    pass_rates: dict[str, float] = {}
    """Running share of own answers with full marks, by task, as far as the rule counts and knows it."""
    teaching: int = 0
    """Authors whose answers are learnt from."""
    waiting: int = 0
    """Authors whose answers wait until they agree with what we found ourselves (rules/teachers.py)."""
    doubted: tuple[str, ...] = ()
    """Waiting authors that were measured; they are fetched from as newcomers are."""
    tokens: int = 0
    """Completion tokens trained on, in each inner epoch anew."""
    optimizer_steps: int = 0
    """Optimizer steps taken."""
    learning_rate: float | None = None
    """Learning rate of the round, by training.schedule; lower for a while after catching up."""
    loss: float | None = None
    """Mean loss of the steps."""
    grad_norm: float | None = None
    """Mean gradient norm of the steps, before it is clipped."""
    clipped_share: float | None = None
    """Share of the tokens that the clip acted on."""
    entropy: float | None = None
    """Mean entropy of the policy at the trained tokens, in nats."""
    reference_kl: float | None = None
    """Estimate of the KL divergence from the policy to the base model per token, in nats; None without
    training.kl_coef."""
    micro_batch_tokens: int | None = None
    """Most tokens of one forward pass; less than at the start when memory ran out."""
    off_policy_share: float | None = None
    """Share of own tokens that another version sampled than the newest at the start of the round."""
    mean_age: float | None = None
    """Mean number of versions by which an own token is older than the newest."""
    max_age: int | None = None
    """Number of versions by which the oldest own token is older than the newest."""
    stale_kv_share: float | None = None
    """Share of own tokens that were sampled with keys and values of an older version."""
    effective_sample_size: float | None = None
    """(sum k)^2 / (n sum k^2) over the n own tokens, k = prox / mu: 1 on policy, 1 / n where one has all."""
    corrected_share: float | None = None
    """Share of own tokens whose weight the correction truncated or set to zero."""
    behaviour_kl: float | None = None
    """KL divergence from what sampled the own tokens to the trainer's policy before the round, in nats."""
    engine_kl: float | None = None
    """KL divergence over own tokens of the newest version with fresh keys and values, in nats: the engine's
    arithmetic against the trainer's, without staleness."""
    engine_gap: float | None = None
    """Mean |log-probability of the engine - of the trainer before the round| over the tokens of engine_kl, in
    nats."""
    seconds: float = 0.0
    """Time that this took."""


PassAt = Mapping[int, float | None]
"""k -> pass@k: the chance that at least one of k answers passes (evaluation.py). None: nobody knows."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward per task on held-out examples, and the mean over tasks. None: nothing was scored."""

    per_task: Mapping[str, float | None]
    mean: float | None
    pass_at: Mapping[str, PassAt] = field(default_factory=dict[str, PassAt])
    """pass@k by task."""
    pass_at_mean: PassAt = field(default_factory=dict[int, float | None])
    majority_at: Mapping[str, PassAt] = field(default_factory=dict[str, PassAt])
    """maj@k by task: how often what most of k answers say is right (tasks/judging/votes.py). None where only
    the vote of other answers says what is right."""
    judged_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Names of the rewards by task."""
    asked: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples by task that were asked and answered."""


class Counters(msgspec.Struct, kw_only=True):
    """Numbers that continue over restarts. None: not measured yet."""

    round: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    evaluated_round: int | None = None
    external_groups_trained: dict[str, int] = {}
    rate_share: float = 1.0
    """Factor on the learning rate, other than 1 once a node catches up with its swarm
    (node/catching_up.py)."""

    def of_other_tasks(self) -> "Counters":
        """Returns the numbers for a run that continues with other tasks, without measurements of the former
        ones."""
        anew = {"reward_first": None, "reward_last": None, "evaluated_round": None}
        return msgspec.structs.replace(self, **anew)


MOST_AUTHORS = 256
OTHERS = "others"


def tally(counts: Mapping[str, int], authors: Iterable[str]) -> dict[str, int]:
    """Adds one per author, keeping the largest MOST_AUTHORS separate and the rest together.

    Peer ids cost nothing, so a swarm could name any number of them, and every count is kept for good.

    >>> tally({"a": 1}, ["a", "b"])
    {'a': 2, 'b': 1}
    """
    total = Counter(counts)
    total.update(authors)
    rest = total.pop(OTHERS, 0)
    kept = dict(total.most_common(MOST_AUTHORS))
    rest += sum(total.values()) - sum(kept.values())
    return {**kept, OTHERS: rest} if rest else kept


# ---- state.json ----

FORMAT = 3
STATE = "state.json"


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files differ from those that were written."""


class Measure(msgspec.Struct, frozen=True):
    """The examples that a held-out reward is a mean over. Rewards of different measures cannot be
    compared."""

    tasks: tuple[str, ...] = ()
    examples: int = 0
    """Held-out examples per task."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """state.json."""

    format: int
    base_model: str
    base_fingerprint: str
    policy_version: int
    seed: int
    counters: Counters
    reward: float | None
    """Mean reward of exactly this policy on held-out draws. None: it was not evaluated in this round."""
    measure: Measure = Measure()
    task_specs: tuple[str, ...] = ()
    """Tasks that it was trained on: built-in names, and paths of files on the machine that wrote this."""
    tasks: dict[str, str] = {}
    """The version of each task, by name, its rewards included. Empty: an earlier version of this program did
    not note them."""
    settings: dict[str, Any] = {}
    """Settings that shaped learning (learning_settings.py). Empty: as with `tasks`."""
    digests: dict[str, str]


def read_state(folder: Path) -> State:
    """Returns the content of state.json without reading the other files. Raises as `read_checkpoint` does."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_Versioned)
        if state.format != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder.name} has format {state.format}, this version reads {FORMAT}",
                hint="use the version that wrote it, or start over with --fresh (nothing is deleted)",
            )
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder.name} is damaged: {error}") from error
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: OSError) -> CheckpointError:
    """Returns the error for a disk that cannot be read now, which does not mean damage."""
    return CheckpointError(f"checkpoint {folder.name} cannot be read: {error}", hint="check the disk")


class _Versioned(msgspec.Struct, frozen=True):
    """The part of state.json that every format has."""

    format: int
