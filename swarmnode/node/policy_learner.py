"""The learning half of a real node: one policy on one engine, its trainer, its tasks, its checkpoints.

node.py -> worker threads -> [PolicyLearner] -> rollout_learner.py (rollouts), training
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from swarmnode.exchange.exchange_settings import STRANGERS_TIMEOUT_S
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.model.policy import Policy
from swarmnode.node.catching_up import RoundMix
from swarmnode.node.demonstrating import Demonstrating
from swarmnode.node.learner import Overlap, Resumed
from swarmnode.node.rollout_learner import RolloutLearner
from swarmnode.node.workers import CheckpointWriter
from swarmnode.rollout.engine import Engine, PolicyUpdate
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.task import Task, may_be_exchanged
from swarmnode.training.checkpoints.checkpoint import restore, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoints.learning_settings import changes, learning_settings
from swarmnode.training.checkpoints.run_folders import TrainingRun
from swarmnode.training.forward import Forward
from swarmnode.training.records import Counters, TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.rules.book import BookCandidate
from swarmnode.training.rules.gradients import Gradients
from swarmnode.training.rules.lessons import Rule
from swarmnode.training.rules.mending.mender import Mender
from swarmnode.training.rules.mending.reading import Reader
from swarmnode.training.rules.rules import make_rule, sharing_rule
from swarmnode.training.trainer import Trainer
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

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
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """`forward`: that of the base (None: its own). `train_jointly`: set if this policy is one of several
        on its base. `tasks_of_others`: they judge strangers' answers (None: the same as ours).
        `demonstrations`: answers that people wrote for this node."""
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
        """Trims right answers of strangers to the part that is needed. None: there was no such answer yet."""
        self._rule: Rule = make_rule(sharing_rule(config), seed, self._mend)
        if self._rule.measures_teachers:
            longest = config.rollout.max_tokens
            self._rule.measure_by(Gradients(self._forward, policy, renderer.prompt_ids, max_tokens=longest))
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
            rounds=config.node.rounds,
        )
        self._demonstrating = Demonstrating(
            demonstrations or Demonstrations(), self._own_tasks, renderer, config.rollout.max_tokens
        )
        self._warned_of_no_book = False

    @property
    def policy_version(self) -> int:
        return self._policy.version

    def resume(self) -> Resumed | None:
        checkpoint = self._store.tidy()
        if checkpoint is None:
            return None
        waiting = restore(checkpoint, self._policy, self._trainer.optimizer)
        self.engine.set_policy(self._policy.update())
        self._restore_rollouts(waiting.rollouts)
        forgotten = self._rule.restore(waiting.rule, self._versions())
        # The checkpoint may date from before such groups were refused.
        at_home = {name for name, task in self._tasks_of_others.items() if not may_be_exchanged(task)}
        self._rule.forget_strangers(at_home)
        counters = checkpoint.state.counters
        run = TrainingRun(checkpoint.folder.parent, checkpoint.state, 0.0)
        other_tasks = "" if run.is_of(self._versions()) else run.difference(self._versions())
        if other_tasks:
            counters = counters.of_other_tasks()
            dropped = forgotten or 0, self._rollouts.stats().dropped_not_redrawable
            logger.warning(
                "run %s continues, but %s: rewards are measured again, and %d answers in its book and %d"
                " unfinished groups are dropped",
                *(run.name, other_tasks, *dropped),
            )
        changed = changes(checkpoint.state.settings, learning_settings(self._config, self._seed))
        return Resumed(counters, changed, other_tasks)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        if self._sleep_while_training:
            self._rollouts.park()
            self.engine.sleep()
        try:
            self._demonstrate(own)
            if self._train_jointly is None:
                return self._trainer.train(own, external)
            return self._train_jointly(self._trainer.prepare(own, external))
        finally:
            self.engine.submit(())  # Keep it awake: others may ask it before we do.

    def rest(self) -> None:
        super().rest()
        self._forward.release_memory()

    def catch_up(self, mix: RoundMix | None) -> None:
        super().catch_up(mix)
        self._rule.replayed = None if mix is None else mix.replayed
        self._rule.step_answers = None if mix is None else mix.step_answers
        self._trainer.rate_share = 1.0 if mix is None else mix.rate
        self._trainer.kept_share = 1.0 if mix is None else mix.kept

    def origins(self) -> Mapping[Origin, int]:
        return self._rule.origins()

    def save(self, counters: Counters) -> Future[str]:
        snapshot = take_snapshot(
            self._policy,
            self._trainer.optimizer,
            counters,
            replace(self._waiting(counters), rule=self._rule.state()),
            self._seed,
            measure=self._measure(),
            task_specs=self._task_specs(),
            tasks=self._versions(),
            settings=learning_settings(self._config, self._seed),
        )
        return self._writer.submit(snapshot)

    def _demonstrate(self, own: Sequence[RolloutGroup]) -> None:
        """Give the rule the demonstrations of these examples."""
        judged = self._demonstrating.judge_new(own, self.policy_version)
        if judged and not self._rule.demonstrate(judged) and not self._warned_of_no_book:
            self._warned_of_no_book = True
            logger.warning(
                "demonstrations are not used: exchange.rule=%s has no book", sharing_rule(self._config).name
            )

    def _mend(self, answers: Sequence[BookCandidate]) -> Sequence[BookCandidate]:
        if self.mender is None:
            reader = Reader(self._forward, self._policy.number)
            self.mender = Mender(
                reader, self._tasks_of_others, self._renderer, judge_limit_s=STRANGERS_TIMEOUT_S
            )
        return self.mender(answers)

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _update(self) -> PolicyUpdate:
        return self._policy.update()
