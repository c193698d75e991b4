"""The learning half of a real node: one policy on one engine, its trainer, its tasks, its checkpoints.

node.py -> worker threads -> [PolicyLearner] -> rollout_learner.py (rollouts), training
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.config import Config
from swarmnode.model.policy import Policy
from swarmnode.node.learner import Overlap, Resumed
from swarmnode.node.rollout_learner import RolloutLearner
from swarmnode.node.workers import CheckpointWriter
from swarmnode.rollout.engine import Engine, PolicyUpdate
from swarmnode.rollout.schedule.group import Renderer
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoint import restore, take_snapshot
from swarmnode.training.checkpoint_store import CheckpointStore
from swarmnode.training.foreign.book import BookCandidate
from swarmnode.training.foreign.rules import Rule, make_rule, sharing_rule
from swarmnode.training.forward import Forward
from swarmnode.training.losses import loss_of
from swarmnode.training.records import Counters, TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, RolloutGroup

if TYPE_CHECKING:
    from swarmnode.training.foreign.mender import Mender

TrainJointly = Callable[[RoundOfPolicy], TrainReport]
"""Trains a round together with those of other policies."""


class PolicyLearner(RolloutLearner):
    """A `Learner` over a policy, the engine that samples from it, and tasks by name."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engine: Engine,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        store: CheckpointStore,
        *,
        author: str,
        seed: int,
        overlap: Overlap,
        forward: Forward | None = None,
        train_jointly: TrainJointly | None = None,
        tasks_of_others: Mapping[str, Task] | None = None,
    ) -> None:
        """`forward`: that of the base (None: one of its own). `train_jointly`: where this policy is one of
        several on its base. `tasks_of_others`: as strangers' answers are judged (None: as our own are)."""
        super().__init__(
            config, engine, renderer, tasks, author=author, seed=seed, versions_ahead=int(overlap.on)
        )
        self._policy = policy
        self._store = store
        self._writer = CheckpointWriter(store.write)
        self._sleep_while_training = overlap.sleep
        self._train_jointly = train_jointly
        self._forward = forward or Forward(
            policy, config.training, temperature=config.rollout.temperature, top_p=config.rollout.top_p
        )
        self._tasks_of_others = tasks_of_others or self._tasks
        self.mender: Mender | None = None
        """Cuts right answers of strangers to what they need. None: there was no such answer yet."""
        mend = None if config.exchange.mend == "off" else self._mend
        self._rule: Rule = make_rule(sharing_rule(config), seed, mend)
        if config.exchange.enabled and config.exchange.meet:
            from swarmnode.training.foreign.wide_groups import WideGroups

            self._rule = WideGroups(self._rule, loss_of(config.training.loss).advantage)
        self._trainer = Trainer(
            policy,
            config.training,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_tokens=config.rollout.max_tokens,
            seed=seed,
            render=renderer.prompt_ids,
            forward=self._forward,
            rule=self._rule,
        )

    @property
    def policy_version(self) -> int:
        return self._policy.version

    def resume(self) -> Resumed | None:
        checkpoint = self._store.tidy()
        if checkpoint is None:
            return None
        waiting = restore(checkpoint, self._policy, self._trainer.optimizer)
        self.engine.set_policy(self._policy.update(), "abort")
        self._restore_rollouts(waiting.rollouts)
        self._rule.restore(waiting.rule, {name: task.version for name, task in self._tasks.items()})
        return Resumed(checkpoint.state.counters, waiting.exchange)

    def train(
        self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup], foreign_share: float = 1.0
    ) -> TrainReport:
        if self._sleep_while_training:
            self._rollouts.park()
            self.engine.sleep()
        if self._train_jointly is None:
            return self._trainer.train(own, external, foreign_share)
        return self._train_jointly(self._trainer.prepare(own, external, foreign_share))

    def save(self, counters: Counters, exchange: bytes) -> Future[str]:
        snapshot = take_snapshot(
            self._policy,
            self._trainer.optimizer,
            counters,
            replace(self._waiting(counters, exchange), rule=self._rule.state()),
            self._seed,
            measure=self._measure(),
            task_specs=self._task_specs(),
        )
        return self._writer.submit(snapshot)

    def _mend(self, answers: Sequence[BookCandidate]) -> Sequence[BookCandidate]:
        if self.mender is None:
            from swarmnode.training.foreign.mender import Mender
            from swarmnode.training.foreign.reading import Reader

            reader = Reader(self._forward, self._policy.number)
            self.mender = Mender(reader, self._tasks_of_others, self._renderer)
        return self.mender(answers)

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _update(self) -> PolicyUpdate:
        return self._policy.update()

    def _wanted_examples(self) -> Sequence[Example]:
        return self._rule.wanted_examples()
