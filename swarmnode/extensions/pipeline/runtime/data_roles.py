"""The two roles of a member of stage 0: reinforcement learning as one node of the swarm, or training on text.

pipeline_node.py -> [RolloutRole] -> NodeLoop, PipelineLearner, PipelineEngine (rollouts through the stages)
                 -> [TextRole]    -> TextFeed (cross-entropy on plain text)
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.errors import EngineError, plain_error
from swarmnode.extensions.pipeline.execution.member_records import CLOSE_TIMEOUT_S, IterationReport
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.rollouts.pipeline_engine import PipelineEngine
from swarmnode.extensions.pipeline.rollouts.remote_chain import RemoteChain
from swarmnode.extensions.pipeline.rollouts.routing import path_of_prompt
from swarmnode.extensions.pipeline.runtime.data_node import DataNode, IterationPlan, RoleChanged, own_paths
from swarmnode.extensions.pipeline.runtime.pipeline_learner import PipelineLearner
from swarmnode.extensions.pipeline.runtime.pipeline_settings import wanted_tokens
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.node.building.assemble import build_exchange
from swarmnode.node.building.machine_memory import longest_sequence
from swarmnode.node.lifecycle import rounds_done
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.showing.figures import figure
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import TrainReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutInputs:
    """The tasks, renderer and checkpoint store for rollouts."""

    tasks: Mapping[str, Task]
    tasks_of_others: Mapping[str, Task]
    """The same tasks, as used to judge rollouts of strangers."""
    renderer: Renderer
    store: CheckpointStore
    seed: int


class RolloutRole:
    """A node of the swarm whose policy is held by the whole pipeline."""

    def __init__(self, data_node: DataNode, inputs: RolloutInputs) -> None:
        self._data_node = data_node
        self._inputs = inputs
        self._paths: tuple[StagePath, ...] = ()
        self._node: NodeLoop | None = None
        self.summary: Summary | None = None

    @property
    def status(self) -> NodeStatus | None:
        return self._node.status if self._node is not None else None

    def stop(self) -> None:
        self._data_node.stop()
        if self._node is not None:
            self._node.request_stop()

    def replanned(self, agreed: AgreedPlan) -> None:
        if agreed.stage_of(self._data_node.peer_id) == 0:
            # Rollouts are sampled along the paths along which they will be trained.
            self._paths = tuple(own_paths(agreed, self._data_node.peer_id).values())

    async def run(self) -> str:
        data_node, agreed = self._data_node, self._data_node.own_stage.agreed
        assert agreed is not None, "data roles begin under a plan"
        self.replanned(agreed)
        if data_node.parts.config.pipeline.trainable == "lora":
            folder = self._inputs.store.folder
            logger.info("we hold the data: from now on the whole adapter is saved here, in %s", folder)
        learner = self._learner()
        config = data_node.parts.config
        board = StatusBoard(
            config,
            peer_id=data_node.peer_id,
            name=data_node.parts.key.name,
            model=data_node.parts.whole.name,
        )
        self._node = node = NodeLoop(
            config,
            learner,
            board,
            data_node.watcher,
            seed=self._inputs.seed,
            network=self._network() if config.exchange.enabled else None,
            pipeline=data_node.pipeline_status,
        )
        try:
            async with node:
                self.summary = await node.run()
        except BaseExceptionGroup as group:
            self._raise_if_moved(group)
            raise
        return self.summary.stopped

    def _raise_if_moved(self, group: BaseExceptionGroup[BaseException]) -> None:
        """Raises RoleChanged if we do not hold stage 0 at the moment: engine and network link cannot continue
        then, but nothing has failed."""
        if group.subgroup((RoleChanged, EngineError)) is None:
            return
        if (changed := group.subgroup(RoleChanged)) is not None:
            raise plain_error(changed) from group
        own_stage = self._data_node.own_stage
        if own_stage.part is None or not own_stage.part.has_ends:
            raise RoleChanged("our stage under the new plan is another one, or not there yet") from group

    def _learner(self) -> PipelineLearner:
        data_node, inputs = self._data_node, self._inputs
        config, whole = data_node.parts.config, data_node.parts.whole
        chain = RemoteChain(
            data_node.own_stage.decode,
            asyncio.get_running_loop(),
            on_lost=data_node.lost,
            step_timeout_s=CLOSE_TIMEOUT_S,
        )
        engine = PipelineEngine(
            chain,
            inputs.renderer.eos_token_ids,
            choose_path=self._choose_path,
            max_running=config.rollout.slots,
            max_length=longest_sequence(config, whole.name, whole.max_positions),
            newest=lambda: data_node.iteration,
        )
        return PipelineLearner(
            data_node,
            engine,
            inputs.renderer,
            inputs.tasks,
            inputs.store,
            seed=inputs.seed,
            choose_path=self._choose_path,
        )

    def _network(self) -> NetworkParts:
        data_node, inputs = self._data_node, self._inputs
        config, whole = data_node.parts.config, data_node.parts.whole
        longest = longest_sequence(config, whole.name, whole.max_positions)
        exchange = build_exchange(
            config,
            data_node.parts.host,
            data_node.parts.key,
            inputs.tasks_of_others,
            inputs.renderer,
            family=whole.family,
            parameters=round(whole.card.parameters),
            longest_prompt=longest - config.rollout.max_tokens,
        )
        return NetworkParts(data_node.parts.host, exchange, discovery=None)

    def _choose_path(self, prompt_ids: Sequence[int]) -> StagePath:
        return path_of_prompt(self._paths, prompt_ids)


class TextRole:
    """Trains with cross-entropy on the text of a folder."""

    status: NodeStatus | None = None
    summary: Summary | None = None

    def __init__(self, data_node: DataNode, tokenizer: Any, seed: int) -> None:
        """Raises ConfigError if the text cannot be read."""
        config, whole = data_node.parts.config, data_node.parts.whole
        batch = wanted_tokens(config)
        tokens = min(batch, whole.max_positions or 1024, 1024)
        settings = TextSettings(
            sequence_tokens=tokens,
            batch_sequences=max(1, batch // tokens),
            seed=seed,
        )
        self._data_node = data_node
        self._source = TextSource.read(
            Path(config.pipeline.text).expanduser(),
            tokenizer,
            settings,
            device=data_node.parts.own_stage.stage.device,
            packed=whole.packs,
        )

    def stop(self) -> None:
        self._data_node.stop()

    def replanned(self, agreed: AgreedPlan) -> None:
        """Do nothing: text does not depend on the plan."""

    async def run(self) -> str:
        data_node = self._data_node
        while not data_node.done:
            report = await data_node.drive(self._feed)
            if report is None:
                return "stopped on request"
            self._tell(report)
        return rounds_done(data_node.iteration)

    def _feed(self, iteration_plan: IterationPlan) -> TextFeed:
        return TextFeed(self._source, self._data_node.peer_id, iteration_plan.iteration)

    def _tell(self, report: IterationReport) -> None:
        loss = report.loss / report.tokens if report.tokens else None
        seconds = report.makespan_s + report.closing_s
        logger.info(
            "iteration %d: loss %s over %d tokens in %.2f s",
            report.iteration + 1, figure(loss, ".4f"), report.tokens, seconds,
        )  # fmt: skip
        self._data_node.trained(
            TrainReport(
                tokens=report.tokens,
                optimizer_steps=int(report.stepped),
                loss=loss,
                grad_norm=report.grad_norm,
                seconds=seconds,
            )
        )


DataRole = RolloutRole | TextRole
