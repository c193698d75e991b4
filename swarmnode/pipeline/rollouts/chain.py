"""The stages as an engine sees them: token ids go in, hidden states behind the last stage come out.

engine.py -> [Chain] -> LocalChain (all stages in this process) | remote_chain.py (members of a pipeline)

A chain decides nothing: it says who stopped a feed and why, and the engine chooses what to do about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from swarmnode.errors import EngineError, Rejected
from swarmnode.pipeline.rollouts.routing import Route, StageHolders, route_along
from swarmnode.pipeline.rollouts.stage_cache import Segments, StageCaches, tails_of
from swarmnode.pipeline.stages.micro_batches import StagePath
from swarmnode.pipeline.stages.stage_model import StageModel
from swarmnode.pipeline.wire.messages import Refusal
from swarmnode.rollout.decode.adapter import LoraPair, lora_pairs
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


LOCAL = "local"


class LocalChain:
    """All stages of a model in this process, one node each: the reference that members are tested against,
    and a way to sample at partial depth without a network."""

    def __init__(self, stages: Sequence[StageModel], *, max_cache_bytes: int) -> None:
        """`max_cache_bytes`: of each stage."""
        self._stages = tuple(stages)
        self._caches = [StageCaches(stage, max_bytes=max_cache_bytes) for stage in stages]
        numbers = tuple(range(len(stages)))
        self._members = StageHolders("", tuple(map(str, numbers)), numbers, own=0)
        self._lost: set[int] = set()
        self.max_feed_tokens = MAX_FEED_TOKENS
        self.takes_policies = True

    @property
    def device(self) -> torch.device:
        return self._stages[0].device

    @property
    def vocabulary(self) -> int:
        return self._stages[0].vocabulary

    def route(self, path: StagePath) -> Route | None:
        return route_along(self._members, path, self._lost)

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        return [self._run(feed) for feed in feeds]

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        return logits_of(self._stages[0], hidden_ND)

    def give_up(self, node: int, why: str) -> None:
        self._lost.add(node)

    def close_session(self, route: Route, session: int) -> None:
        for node in route.nodes:
            self._caches[node].close((LOCAL, session))

    def check(self, update: PolicyUpdate) -> Mapping[str, LoraPair]:
        """All or part of the adapter, of the rank that the stages have."""
        factors = {
            name.removesuffix(".lora_A.weight"): (parameter, parameters[name.replace("lora_A", "lora_B")])
            for parameters in (stage.trainable() for stage in self._stages)
            for name, parameter in parameters.items()
            if name.endswith(".lora_A.weight")
        }
        shapes = {
            name.removeprefix("base_model.model."): (b.shape[0], a.shape[1])
            for name, (a, b) in factors.items()
        }
        pairs = lora_pairs(update, shapes)
        ranks = {a.shape[0] for a, _ in factors.values()} | {pair.a.shape[0] for pair in pairs.values()}
        if len(ranks) > 1:
            raise EngineError(f"policy {update.version} has LoRA of another rank than the stages ({ranks})")
        return pairs

    @torch.no_grad()
    def adopt(self, pairs: Mapping[str, LoraPair]) -> None:
        for stage in self._stages:
            scaling = stage.settings.adapter.lora_alpha / stage.settings.adapter.lora_rank
            for name, parameter in stage.trainable().items():
                module, _, factor = (
                    name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".")
                )
                pair = pairs.get(module)
                if factor == "lora_B":
                    value = torch.zeros_like(parameter) if pair is None else pair.b * (pair.scaling / scaling)
                    parameter.copy_(value)
                elif pair is not None:
                    parameter.copy_(pair.a)

    def close(self) -> None:
        for caches in self._caches:
            caches.clear()

    @torch.inference_mode()
    def _run(self, feed: ChainFeed) -> Tensor | Stopped:
        hidden_ND = embedded(self._stages[0], feed.ids)
        for node in feed.route.nodes:
            try:
                hidden_ND = self._caches[node].run((LOCAL, feed.session), feed.segments, hidden_ND)
            except Rejected as rejected:
                return stopped_by(rejected, node)
        return tails_of(hidden_ND, feed.segments)


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
