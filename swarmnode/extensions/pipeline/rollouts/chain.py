"""The interface between an engine and the stages: token ids go in, hidden states come out.

pipeline_engine.py -> [Chain] -> remote_chain.py (members of a pipeline) | tests/local_chain.py (one process)

A chain decides nothing: it says who stopped a feed and why, and the engine chooses what to do about it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.rollouts.routing import PlanNode, Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.refusals import Refusal


class StopReason(StrEnum):
    """Reason why a feed did not come through."""

    LOST = "lost"
    """A node does not answer, or gives an answer that no sound node gives: do not ask it again."""
    FORGOTTEN = "forgotten"
    """A node does not have the session, or not the plan: send everything again."""
    OTHER_PLAN = "other_plan"
    """A node has its stage under another plan, or none: wait until it has come to ours, or we to another."""
    OTHER_POLICY = "other_policy"
    """The weights of a node are of another version; without a node, ours are, since a moment ago."""
    NO_MEMORY = "no_memory"
    """A node has no room for this many tokens."""
    NOT_FINITE = "not_finite"
    """A stage computes NaN or infinity from it."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A feed that did not come through. Tokens that nodes before the stop have kept may be sent again."""

    why: StopReason
    node: int | None
    """The node at which it stopped; None if unknown."""
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
    """Version of the policy that the tokens must be computed under."""


class Chain(Protocol):
    """The stages of a model, as one caller uses them. Calls block."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_feed_tokens(self) -> int:
        """Bound of the tokens of one feed."""
        ...

    def route(self, path: StagePath, around: Collection[PlanNode] = ()) -> Route | None:
        """Return the nodes that take a path now, none of `around` among them, perhaps without a stage that no
        other node holds. None if it is no path here."""
        ...

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        """Run the feeds side by side, each along its route. Returns the hidden states [sequences, D] of
        their last tokens."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return final norm and head applied: [N, vocabulary] in float32."""
        ...

    def give_up(self, route: Route, node: int, why: str) -> None:
        """Stop asking this node of a route until the plan changes."""
        ...

    def close_session(self, route: Route, session: int) -> None:
        """Let nodes forget a session, without waiting for it."""
        ...


@torch.inference_mode()
def embedded(stage: StageModel, ids: Sequence[int]) -> Tensor:
    """Return the hidden states [N, D] of token ids that lie end to end."""
    return stage.embed(torch.tensor(ids, device=stage.device)[None])[0]


@torch.inference_mode()
def logits_of(stage: StageModel, hidden_ND: Tensor) -> Tensor:
    """Return the logits in float32 of hidden states behind the last stage. On the data stage only."""
    hidden_ND = hidden_ND.to(stage.device, stage.settings.dtype)
    return stage.head(stage.final_norm(hidden_ND)).float()


def stopped_by(rejected: Rejected, node: int | None) -> Stopped:
    """Return the stop that the refusal of a stage means for the engine."""
    why = {
        Refusal.UNKNOWN_WORK: StopReason.FORGOTTEN,
        Refusal.UNKNOWN_PLAN: StopReason.FORGOTTEN,
        Refusal.NO_MEMORY: StopReason.NO_MEMORY,
        Refusal.NO_SLOT: StopReason.NO_MEMORY,
        Refusal.NOT_FINITE: StopReason.NOT_FINITE,
    }.get(Refusal(rejected.reason), StopReason.LOST)
    return Stopped(why, node, str(rejected))
