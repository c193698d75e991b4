"""The learning half of a data node: rollouts through the stages, and groups trained along their paths.

pipeline_node.py -> threads -> [PipelineLearner] -> rollout_learner.py (rollouts), data_node.py ->
    extensions/pipeline/

All members together hold the policy, and they agree on one optimizer step per round. A checkpoint holds the
adapter of all stages under PEFT's names: `swarmnode eval` and `swarmnode export` can read it, and a pipeline
with another division into stages, or a single machine, can continue from it. With full training the
checkpoint holds the rounds and the rollouts that wait for training; the weights are in the members' own
checkpoints.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from swarmnode.errors import CheckpointError, PipelineError, StorageError
from swarmnode.extensions.pipeline.execution.member_records import Feed
from swarmnode.extensions.pipeline.feeds.rollout_feed import PathSamples, RolloutFeed
from swarmnode.extensions.pipeline.rollouts.routing import ChoosePath
from swarmnode.extensions.pipeline.runtime.data_node import DataNode, IterationPlan
from swarmnode.extensions.pipeline.states.stage_checkpoints import whole_snapshot
from swarmnode.node.learner import Resumed
from swarmnode.node.rollout_learner import RolloutLearner
from swarmnode.node.workers import CheckpointWriter
from swarmnode.rollout.engine import Engine, PolicyUpdate
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.checkpoint import read_waiting, state_of
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoints.learning_settings import learning_settings
from swarmnode.training.records import Counters, TrainReport
from swarmnode.training.round import MeasuredRound, SampleRules, lesson_samples
from swarmnode.training.rules.rules import GroupLesson, make_rule, sharing_rule
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)


class PipelineLearner(RolloutLearner):
    """A `Learner` whose policy is held by the members of a pipeline."""

    def __init__(
        self,
        data_node: DataNode,
        engine: Engine,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        store: CheckpointStore,
        *,
        seed: int,
        choose_path: ChoosePath,
    ) -> None:
        """`choose_path`: the engine's own, used for groups of strangers."""
        config = data_node.parts.config
        super().__init__(config, engine, renderer, tasks, author=data_node.peer_id, seed=seed)
        self._data_node = data_node
        self._store = store
        self._writer = CheckpointWriter(store.write)
        self._whole = data_node.parts.whole
        self._own_stage = data_node.parts.own_stage
        self._choose_path = choose_path
        # A rule that replays nothing (rules.py): no path is known for samples that it would replay.
        rule = sharing_rule(config)
        if rule.name != config.exchange.rule:
            logger.info("in a pipeline exchange.rule=%s means %s", config.exchange.rule, rule.name)
        self._rule = make_rule(rule, seed)

    @property
    def policy_version(self) -> int:
        return self._data_node.iteration

    def resume(self) -> Resumed | None:
        checkpoint = self._store.tidy()
        if checkpoint is None:
            # A data node that is new in a pipeline continues with the pipeline's rounds.
            iteration = self._data_node.iteration
            return Resumed(Counters(round=iteration)) if iteration else None
        waiting = read_waiting(checkpoint)
        self.use_newest_policy()
        self._restore_rollouts(waiting.rollouts)
        counters = checkpoint.state.counters
        # The pipeline may be ahead of our checkpoint, or a single machine may have had rounds without a step.
        counters.round = self._data_node.iteration
        return Resumed(counters)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport | None:
        feeds: list[RolloutFeed] = []

        def feed(iteration_plan: IterationPlan) -> Feed:
            # Made again if the iteration has to start again under another plan.
            feeds.append(self._feed(iteration_plan, own, external))
            return feeds[-1]

        report = self._data_node.train(feed)
        if report is None:
            return None
        return feeds[-1].report(weight=report.tokens, grad_norm=report.grad_norm)

    def interrupt(self) -> None:
        super().interrupt()
        self._data_node.stop()

    def save(self, counters: Counters) -> Future[str]:
        waiting = self._waiting(counters)
        try:
            held, base = self._data_node.whole_state(), (self._whole.name, self._whole.fingerprint)
            measured = self._measure(), self._task_specs(), self._versions()
            settings = learning_settings(self._config, self._seed)
            state = state_of(*base, held.iteration, counters, self._seed, *measured, settings)
            snapshot = whole_snapshot(held.tensors, state, self._config.policy, waiting=waiting)
        except (PipelineError, CheckpointError) as error:
            failed: Future[str] = Future()
            failed.set_exception(StorageError(f"no checkpoint: {error.message}", hint=error.hint))
            return failed
        return self._writer.submit(snapshot)

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _update(self) -> PolicyUpdate:
        # The stages hold the weights: this only names the version that they have reached.
        return PolicyUpdate(self._data_node.iteration, {}, 1.0)

    def _feed(
        self, iteration_plan: IterationPlan, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]
    ) -> RolloutFeed:
        lessons = self._rule.lessons(own, external, version=iteration_plan.iteration)
        measured = MeasuredRound()
        measured.groups.update(("own", group.has_gradient) for group in own)
        measured.groups.update(("external", group.has_gradient) for group in external)
        return RolloutFeed(
            self._samples([*lessons.own, *lessons.external], shaped=lessons.shaped),
            iteration_plan.paths,
            iteration_plan.waves,
            self._config,
            version=iteration_plan.iteration,
            micro_batch_tokens=self._own_stage.max_tokens,
            device=self._own_stage.stage.device,
            seed=self._seed,
            packed=self._whole.packs,
            choose_path=self._choose_path,
            measured=measured,
        )

    def _samples(self, lessons: Sequence[GroupLesson], *, shaped: bool) -> Iterator[PathSamples]:
        rules = SampleRules(
            self._renderer.prompt_ids,
            self._config.training,
            self._config.rollout.max_tokens,
            end=lambda: self._renderer.eos_token_ids[0],
        )
        for lesson in lessons:
            if samples := lesson_samples(lesson, rules, shaped=shaped):
                yield PathSamples(lesson.group.completions[0].path, samples)
