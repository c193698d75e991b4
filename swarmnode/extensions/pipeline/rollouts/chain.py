"""The interface between an engine and the stages: token ids in, hidden states out.

pipeline_engine.py -> [Chain] -> remote_chain.py (members of a pipeline) | tests/local_chain.py (one process)

A chain makes no decisions: it reports which node stopped a feed and why, and the engine reacts.
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
    """Reason why a feed was stopped."""

    LOST = "lost"
    """A node does not answer, or gives an answer that no working node gives: do not ask it again."""
    FORGOTTEN = "forgotten"
    """A node does not know the session or the plan: send everything again."""
    OTHER_PLAN = "other_plan"
    """A node holds its stage under another plan, or holds none: wait until both of us have the same plan."""
    OTHER_POLICY = "other_policy"
    """A node's weights have another version. Without a node: our own weights have just changed."""
    NO_MEMORY = "no_memory"
    """A node has no room for this number of tokens."""
    NOT_FINITE = "not_finite"
    """A stage's output has NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A feed that was stopped. Tokens that nodes before the stop have stored may be sent again."""

    why: StopReason
    node: int | None
    """The node at which it stopped, or None if unknown."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChainFeed:
    """One step of one session along one route."""

    route: Route
    session: int
    ids: tuple[int, ...]
    """The tokens of all sequences, end to end."""
    segments: Segments
    version: int
    """Policy version that must compute the tokens."""


class Chain(Protocol):
    """The stages of a model, as one caller uses them. Calls block."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_feed_tokens(self) -> int:
        """Most tokens in one feed."""
        ...

    def route(self, path: StagePath, around: Collection[PlanNode] = ()) -> Route | None:
        """Return the nodes that currently serve a path, without any of `around`. Stages that no other node
        holds are left out. Returns None if this is not a path here."""
        ...

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        """Run the feeds at the same time, each along its route. Returns the hidden states [sequences, D] of
        their last tokens."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Apply final norm and head. Returns [N, vocabulary] in float32."""
        ...

    def report_lost(self, route: Route, node: int, why: str) -> None:
        """Tell the pipeline that this node of a route does not answer."""
        ...

    def close_session(self, route: Route, session: int) -> None:
        """Tell the nodes to forget a session, without waiting for them."""
        ...


@torch.inference_mode()
def embedded(stage: StageModel, ids: Sequence[int]) -> Tensor:
    """Return the hidden states [N, D] of token ids that are given end to end."""
    return stage.embed(torch.tensor(ids, device=stage.device)[None])[0]


@torch.inference_mode()
def logits_of(stage: StageModel, hidden_ND: Tensor) -> Tensor:
    """Return the logits in float32 of hidden states after the last stage. Only on the data stage."""
    hidden_ND = hidden_ND.to(stage.device, stage.settings.dtype)
    return stage.head(stage.final_norm(hidden_ND)).float()


def stopped_by(rejected: Rejected, node: int | None) -> Stopped:
    """Return the stop that a stage's refusal means for the engine."""
    why = {
        Refusal.UNKNOWN_WORK: StopReason.FORGOTTEN,
        Refusal.UNKNOWN_PLAN: StopReason.FORGOTTEN,
        Refusal.NO_MEMORY: StopReason.NO_MEMORY,
        Refusal.NO_SLOT: StopReason.NO_MEMORY,
        Refusal.NOT_FINITE: StopReason.NOT_FINITE,
    }.get(Refusal(rejected.reason), StopReason.LOST)
    return Stopped(why, node, str(rejected))
