"""The stages as an engine sees them: token ids go in, hidden states behind the last stage come out.

engine.py -> [Chain] -> remote_chain.py (members of a pipeline) | testing/local_chain.py (all in one process)

A chain decides nothing: it says who stopped a feed and why, and the engine chooses what to do about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.pipeline.rollouts.routing import Route
from swarmnode.pipeline.rollouts.stage_cache import Segments
from swarmnode.pipeline.stages.micro_batches import StagePath
from swarmnode.pipeline.stages.stage_model import StageModel
from swarmnode.pipeline.wire.messages import Refusal
from swarmnode.rollout.decode.adapter import LoraPair
from swarmnode.rollout.engine import PolicyUpdate

MAX_FEED_TOKENS = 4096
"""Tokens of one feed at most, unless a chain says less: a prompt of more comes in pieces."""


class StopReason(StrEnum):
    """Why a feed did not come through."""

    LOST = "lost"
    """A node does not answer, or answers what no sound node does: do not ask it again."""
    FORGOTTEN = "forgotten"
    """A node does not have the session, or not the plan: tell it everything again."""
    OTHER_PLAN = "other_plan"
    """A node has its stage under another plan, or none: wait until it has come to ours, or we to another."""
    OTHER_POLICY = "other_policy"
    """A node's weights are of another version."""
    NO_MEMORY = "no_memory"
    """A node has no room for so much."""
    NOT_FINITE = "not_finite"
    """The own stage makes NaN of it."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A feed that did not come through. What nodes before the stop have kept may be sent again."""

    why: StopReason
    node: int | None
    """The node that it stopped at. None: unknown."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChainFeed:
    """One step of one session along one route."""

    route: Route
    session: int
    ids: tuple[int, ...]
    """All tokens, end to end."""
    segments: Segments
    version: int
    """Version of the policy that they must be computed under."""


class Chain(Protocol):
    """Blocking, for one caller."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_feed_tokens(self) -> int:
        """Most tokens of one feed."""
        ...

    @property
    def takes_policies(self) -> bool:
        """Whether `adopt` brings weights to the stages; else they train, and a version only names them."""
        ...

    def route(self, path: StagePath) -> Route | None:
        """Which nodes take a path now: perhaps without a stage that nobody holds. None: it is no path
        here."""
        ...

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        """Each along its route, side by side: hidden states [sum of tails, D] of the tokens wanted."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Final norm and head, [N, vocabulary] in float32."""
        ...

    def give_up(self, node: int, why: str) -> None:
        """The node is not asked again until the plan changes."""
        ...

    def close_session(self, route: Route, session: int) -> None:
        """Let nodes forget a session. Nobody waits for it."""
        ...

    def check(self, update: PolicyUpdate) -> Mapping[str, LoraPair]:
        """What of a policy has to be brought to the stages by `adopt`. Raises EngineError for one that cannot
        be had here."""
        ...

    def adopt(self, pairs: Mapping[str, LoraPair]) -> None:
        """Sample from another policy from now on."""
        ...

    def close(self) -> None: ...


def embedded(stage: StageModel, ids: Sequence[int]) -> Tensor:
    """Token ids, end to end -> hidden states [N, D]."""
    return stage.embed(torch.tensor(ids, device=stage.device)[None])[0]


def logits_of(stage: StageModel, hidden_ND: Tensor) -> Tensor:
    """Logits in float32 of hidden states behind the last stage; on the data stage."""
    return stage.head(stage.final_norm(hidden_ND)).float()


def stopped_by(rejected: Rejected, node: int | None) -> Stopped:
    """What the refusal of a stage means for who asked it."""
    why = {
        Refusal.UNKNOWN_WORK: StopReason.FORGOTTEN,
        Refusal.UNKNOWN_PLAN: StopReason.FORGOTTEN,
        Refusal.NO_MEMORY: StopReason.NO_MEMORY,
        Refusal.NO_SLOT: StopReason.NO_MEMORY,
        Refusal.NOT_FINITE: StopReason.NOT_FINITE,
    }.get(Refusal(rejected.reason), StopReason.LOST)
    return Stopped(why, node, str(rejected))
