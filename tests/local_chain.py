"""All stages of a model in one process, as an engine sees them: the reference for members over the network.

LocalPipelineEngine -> [LocalChain] -> StageCaches of every stage
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import EngineError, Rejected
from swarmnode.extensions.pipeline.rollouts.chain import (
    ChainFeed,
    Stopped,
    embedded,
    logits_of,
    stopped_by,
)
from swarmnode.extensions.pipeline.rollouts.pipeline_engine import PipelineEngine
from swarmnode.extensions.pipeline.rollouts.remote_chain import MAX_FEED_TOKENS
from swarmnode.extensions.pipeline.rollouts.routing import PlanNode, Route, route_along
from swarmnode.extensions.pipeline.rollouts.stage_caches import StageCaches, last_rows
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.rollout.decode.adapters.adapter import LoraPair, lora_pairs
from swarmnode.rollout.decode.running_rows import DecodePolicy
from swarmnode.rollout.decode.torch_engine import LoraPairs
from swarmnode.rollout.decode.weights import Layers
from swarmnode.rollout.engine import BASE_VERSION, PolicyUpdate

LOCAL = "local"


class LocalPipelineEngine(PipelineEngine):
    """An engine that brings its policies to the stages by itself: those of members are trained there."""

    def __init__(self, chain: "LocalChain", eos_token_ids: Sequence[int], **more: Any) -> None:
        super().__init__(chain, eos_token_ids, **more)
        self._local = chain

    def _pairs(self, update: PolicyUpdate) -> LoraPairs:
        return self._local.check(update)

    def _merge(self, pairs: LoraPairs, former: Layers | None) -> Layers:
        self._local.adopt(pairs)
        return []

    def _base(self) -> DecodePolicy:
        if not self._newest.is_base:
            raise EngineError(f"the stages carry policy {self._newest.version}")
        return DecodePolicy(BASE_VERSION, [], is_base=True)


class LocalChain:
    """All stages of a model in this process, one node each: the reference that members are tested against,
    and a way to sample at partial depth without a network."""

    def __init__(self, stages: Sequence[StageModel], *, max_cache_bytes: int) -> None:
        """`max_cache_bytes`: of each stage."""
        self._stages = tuple(stages)
        self._caches = [StageCaches(stage, max_bytes=max_cache_bytes) for stage in stages]
        numbers = tuple(range(len(stages)))
        self._members = PlanMembers("", tuple(map(str, numbers)), 0, numbers)
        self.max_feed_tokens = MAX_FEED_TOKENS

    @property
    def device(self) -> torch.device:
        return self._stages[0].device

    @property
    def vocabulary(self) -> int:
        return self._stages[0].vocabulary

    def route(self, path: StagePath, around: Collection[PlanNode] = ()) -> Route | None:
        return route_along(self._members, path, {node for _, node in around})

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        return [self._run(feed) for feed in feeds]

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        return logits_of(self._stages[0], hidden_ND)

    def report_lost(self, route: Route, node: int, why: str) -> None:
        """Nobody plans here."""

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

    @torch.inference_mode()
    def _run(self, feed: ChainFeed) -> Tensor | Stopped:
        hidden_ND = embedded(self._stages[0], feed.ids)
        for node in feed.route.nodes:
            try:
                hidden_ND = self._caches[node].run((LOCAL, feed.session), feed.segments, hidden_ND)
            except Rejected as rejected:
                return stopped_by(rejected, node)
        return last_rows(hidden_ND, feed.segments)
