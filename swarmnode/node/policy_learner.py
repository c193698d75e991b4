"""The learning half of a real node: one policy on one engine, its trainer, its tasks, its checkpoints.

node.py -> worker threads -> [PolicyLearner] -> tasks, rollout, training

Draws depend on (seed, place in the stream) alone, and what is sampled but not yet trained on is part of a
checkpoint: a node that resumes goes on where it stopped.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import msgspec

from swarmnode.config import Config, RolloutConfig
from swarmnode.errors import CheckpointError, TaskError
from swarmnode.node.dynamic_sampling import more_groups
from swarmnode.node.learner import Generation, Resumed, RoundRollouts
from swarmnode.node.overlap import Overlap
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.group import Answered
from swarmnode.rollout.partial import PartialRollouts
from swarmnode.rollout.partial_records import PartialSettings
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.rounds import ExampleStream, StreamPlace
from swarmnode.tasks.task import Task, redraw, score_strictly
from swarmnode.training.checkpoint import Measure, Waiting, restore, take_snapshot
from swarmnode.training.checkpoint_store import CheckpointStore
from swarmnode.training.checkpoint_writer import CheckpointWriter
from swarmnode.training.evaluation import evaluate
from swarmnode.training.forward import Forward
from swarmnode.training.policy import Policy
from swarmnode.training.records import Counters, Evaluation, TrainReport
from swarmnode.training.round import RoundOfPolicy
from swarmnode.training.trainer import Trainer
from swarmnode.types import Example, ExampleKey, RolloutGroup

log = logging.getLogger(__name__)

TrainJointly = Callable[[RoundOfPolicy], TrainReport]
"""Trains a round together with those of other policies."""


class UntrainedRollouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """rollouts.bin of a checkpoint."""

    place: StreamPlace
    """Where the next example comes from."""
    rollouts: bytes
    """`PartialRollouts.state`."""


class PolicyLearner:
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
    ) -> None:
        """`forward`: that of the base (None: one of its own). `train_jointly`: where this policy is one of
        several on its base."""
        self._config = config
        self._policy = policy
        self.engine = engine
        self._renderer = renderer
        self._tasks = tasks
        self._store = store
        self._writer = CheckpointWriter(store.write)
        self._author = author
        self._seed = seed
        self._sleep_while_training = overlap.sleep
        self._interrupted = threading.Event()
        self._sampling = SamplingParams(
            config.rollout.max_tokens, config.rollout.temperature, config.rollout.top_p
        )
        self._versions_ahead = int(overlap.on)
        self._train_jointly = train_jointly
        settings = partial_settings(config.rollout, self._versions_ahead, alone=config.node.policies == 1)
        self._rollouts = PartialRollouts(engine, renderer, settings, self._sampling, seed=seed)
        self._examples = self._stream()
        self._untrained: dict[int, list[Answered]] = {}
        """Complete groups by the round that got them, for the newest rounds."""
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._trainer = Trainer(
            policy,
            config.training,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            seed=seed,
            render=renderer.prompt_ids,
            forward=forward,
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
        return Resumed(checkpoint.state.counters, waiting.exchange)

    def use_newest_policy(self) -> None:
        if self.engine.policy_version != self._policy.version:
            self._rollouts.set_policy(self._policy.update())

    def rollouts(self, number: int) -> RoundRollouts:
        started = time.perf_counter()
        # This may run beside the training of the round before; all earlier ones are trained on.
        self._untrained = {n: kept for n, kept in self._untrained.items() if n >= number - 1}
        self._untrained[number] = []
        groups: list[RolloutGroup] = []
        useful = 0
        wanted, factor = self._config.rollout.groups, self._config.rollout.dynamic_sampling
        while count := more_groups(wanted, useful, len(groups), factor):
            more = self._scored_groups(number, count)
            groups += more
            useful += sum(group.has_gradient for group in more)
            if len(more) < count:
                break
        complete = not self._interrupted.is_set()
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        seconds = time.perf_counter() - started
        return RoundRollouts(tuple(groups) if complete else (), tokens, seconds, complete, self._generation())

    def _scored_groups(self, number: int, count: int) -> list[RolloutGroup]:
        """So many groups more for a round; fewer when interrupted or out of examples."""
        scoring: list[Future[RolloutGroup]] = []
        for one in self._rollouts.round(self._examples, groups=count, should_stop=self._interrupted.is_set):
            # A judge may be slow, or wait for a subprocess: it works while the engine goes on.
            self._untrained[number].append(one)
            work = copy_context().run, self._score, one, self.engine.policy_version
            scoring.append(self._scorer.submit(*work))
        if not self._interrupted.is_set():
            return [future.result() for future in scoring]
        for future in scoring:
            future.cancel()
        return []

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        if self._sleep_while_training:
            self._rollouts.park()
            self.engine.sleep()
        if self._train_jointly is None:
            return self._trainer.train(own, external)
        return self._train_jointly(self._trainer.prepare(own, external))

    def evaluate(self) -> Evaluation | None:
        self._rollouts.park()
        self.use_newest_policy()
        return evaluate(
            self.engine,
            self._renderer,
            self._tasks,
            self._sampling,
            examples=self._config.tasks.eval_examples,
            should_stop=self._interrupted.is_set,
        )

    def save(self, counters: Counters, exchange: bytes) -> Future[str]:
        later = sorted(number for number in self._untrained if number > counters.round)
        complete = [answered for number in later for answered in self._untrained[number]]
        state = UntrainedRollouts(self._examples.place, self._rollouts.state(complete))
        waiting = Waiting(exchange, msgspec.msgpack.encode(state))
        measure = Measure(tuple(sorted(self._tasks)), self._config.tasks.eval_examples)
        snapshot = take_snapshot(
            self._policy, self._trainer.optimizer, counters, waiting, self._seed, measure=measure
        )
        return self._writer.submit(snapshot)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._writer.close()
        self._scorer.shutdown(cancel_futures=True)
        self.engine.close()

    def _score(self, answered: Answered, version: int) -> RolloutGroup:
        example = answered.example
        texts = [completion.text for completion in answered.completions]
        scores = score_strictly(self._tasks[example.key.task], example, texts)
        return RolloutGroup(example, answered.completions, scores, self._author, version)

    def _restore_rollouts(self, saved: bytes) -> None:
        if not saved:
            return
        try:
            state = msgspec.msgpack.decode(saved, type=UntrainedRollouts)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"the unfinished rollouts of the checkpoint cannot be read: {error}", hint="use --fresh"
            ) from error
        # At a start the trainer is not ahead of the engine yet: what was complete is as fresh as it looks.
        self._rollouts.restore(state.rollouts, self._redraw, older=self._versions_ahead)
        self._examples = self._stream(state.place)

    def _redraw(self, key: ExampleKey) -> Example | None:
        """The example of a saved group; None when its task is gone or has changed."""
        task = self._tasks.get(key.task)
        try:
            return None if task is None else redraw(task, key)
        except TaskError:
            return None

    def _stream(self, place: StreamPlace | None = None) -> ExampleStream:
        return ExampleStream(list(self._tasks.values()), self._seed, self._config.rollout.groups, place)

    def _generation(self) -> Generation:
        engine, rollouts = self.engine.stats(), self._rollouts.stats()
        return Generation(
            engine=self.engine.capabilities.name,
            mode=self._config.rollout.mode,
            running=engine.running,
            waiting=engine.waiting,
            groups_in_flight=rollouts.groups_in_flight,
            surplus_groups=rollouts.surplus_groups,
            concurrency=rollouts.concurrency,
            step_base_s=rollouts.step_base_s,
            step_per_request_s=rollouts.step_per_request_s,
            idle_share=rollouts.idle_share,
            mean_tokens_produced=rollouts.mean_tokens_produced,
            mean_tokens_trained=rollouts.mean_tokens_trained,
            resumed=rollouts.resumed_requests,
            reprefilled_tokens=engine.reprefilled_tokens,
            stale_groups_dropped=rollouts.dropped_stale,
            live_versions=len(engine.live_versions),
            swaps=engine.swaps,
            swap_s=engine.swap_s,
            kv_use=engine.kv_use,
        )


def partial_settings(config: RolloutConfig, versions_ahead: int, *, alone: bool = True) -> PartialSettings:
    """The scheduler's settings out of the node's.

    With overlap the trainer is one version ahead of the engine by the time it sees what was generated, so
    the scheduler has to keep everything that much younger. Who is not `alone` on the engine cannot measure
    what its own requests cost there: then it keeps those of one round in flight.
    """
    concurrency = config.concurrency
    if concurrency is None and not alone:
        concurrency = config.groups * config.group_size
    return PartialSettings(
        mode=config.mode,
        groups=config.groups,
        group_size=config.group_size,
        max_lag=config.max_lag - versions_ahead,
        over_provision=config.over_provision,
        concurrency=concurrency,
    )
