"""The generating half of a learner: an engine answers examples, tasks score them, training takes them.

policy_learner.py (a policy of our own), pipeline_learner.py (one held with others)
        -> [RolloutLearner] -> tasks, rollout -> scored groups -> [more_groups] -> as many more, or train

Draws depend only on (seed, place in the stream), and a checkpoint contains all rollouts that are not trained
on yet: a node that resumes continues where it stopped.

A group whose rewards are all equal has no gradient. If kept, it makes the batch smaller and its gradient
noisier, and a better policy produces more of them. So the learner asks for more groups: DAPO's dynamic
sampling as a decision (Yu et al. 2025, section 3.2).
"""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from math import floor

import msgspec

from swarmnode.errors import CheckpointError, EngineError, JudgementLost, TaskError
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.model.budget import is_out_of_memory
from swarmnode.node.catching_up import RoundMix
from swarmnode.node.learner import Generation, Learner, RoundRollouts
from swarmnode.rollout.engine import Engine, PolicyUpdate, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import Config, RolloutConfig
from swarmnode.tasks.drawing.curriculum import Curriculum
from swarmnode.tasks.drawing.example_stream import ExampleStream, StreamPlace
from swarmnode.tasks.drawing.wanted_examples import WantedExamples
from swarmnode.tasks.judging.own_judge import JudgedEnvironment, OwnJudge
from swarmnode.tasks.loader import spec_of
from swarmnode.tasks.task import Task, judges_groups, redraw, score_completions
from swarmnode.training.checkpoints.checkpoint import Measure, Waiting
from swarmnode.training.evaluation import conversation_rules, evaluate
from swarmnode.training.records import Counters, Evaluation
from swarmnode.types import Example, ExampleKey, RolloutGroup

logger = logging.getLogger(__name__)

MAX_LAG = 8
"""How many versions older than the newest a trained token of our own may be."""


class UntrainedRollouts(msgspec.Struct, frozen=True):
    """rollouts.bin of a checkpoint. Older ones have more fields, which are ignored."""

    place: StreamPlace
    """Place in the stream of the next example."""
    rollouts: bytes
    """`PartialRollouts.state`."""
    levels: bytes = b""
    """The policy's levels in tasks with levels (tasks/drawing/curriculum.py)."""


class RolloutLearner(Learner):
    """A learner without the learning: an engine, tasks by name, and the rollouts that wait in between."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        *,
        author: str,
        seed: int,
        versions_ahead: int = 0,
    ) -> None:
        """`versions_ahead`: how many versions the trainer is ahead when it receives what was generated."""
        self._config = config
        self.engine = engine
        self._renderer = renderer
        self._judge = OwnJudge(tasks, config.tasks.score_timeout_s, max_failures=config.tasks.max_failures)
        self._tasks = self._judge.tasks
        self._own_tasks = tasks
        self._author = author
        self._seed = seed
        self._interrupted = threading.Event()
        self._sampling = SamplingParams(
            config.rollout.max_tokens, config.rollout.temperature, config.rollout.top_p
        )
        self._versions_ahead = versions_ahead
        self._groups = config.rollout.groups
        """Own groups of a round."""
        settings = partial_settings(config.rollout, versions_ahead, alone=config.node.policies == 1)
        self._conversations = conversation_rules(self._tasks, config)
        self._rollouts = PartialRollouts(
            engine, renderer, settings, self._sampling, seed=seed, conversations=self._conversations
        )
        self._curriculum = Curriculum(self._tasks)
        self._examples = WantedExamples(self._stream())
        self._untrained: dict[int, list[Answered]] = {}
        """Complete groups of the newest rounds, by the round that received them."""
        self._scorer = ThreadPoolExecutor(self._judge.width, thread_name_prefix="scorer")
        self._score_wait_s = 0.0

    @abstractmethod
    def _update(self) -> PolicyUpdate:
        """Returns everything learnt so far, for the engine."""

    def use_newest_policy(self) -> None:
        if self.engine.policy_version != self.policy_version:
            self._rollouts.set_policy(self._update())

    def answer_too(self, examples: Sequence[ExampleKey]) -> None:
        for key in examples:
            try:
                example = self._redraw(key)
            except JudgementLost as lost:
                logger.info(
                    "skipping an example that others asked for help with; it cannot be drawn: %s", lost
                )
                continue
            if example is not None:
                self._examples.want([example])

    def catch_up(self, mix: RoundMix | None) -> None:
        self._groups = self._config.rollout.groups if mix is None else mix.groups

    def origins(self) -> Mapping[Origin, int]:
        return {}

    def rollouts(self, number: int) -> RoundRollouts:
        with _memory_errors_explained():
            try:
                return self._generate(number)
            except JudgementLost:
                # It was drawing in a process that `interrupt` has ended.
                if not self._interrupted.is_set():
                    raise
                return RoundRollouts((), 0, 0.0, False, self._generation())

    def _generate(self, number: int) -> RoundRollouts:
        started = time.perf_counter()
        # This may run beside the training of the previous round; all earlier ones are trained on.
        self._untrained = {n: kept for n, kept in self._untrained.items() if n >= number - 1}
        self._untrained[number] = []
        self._curriculum.begin(number)
        groups: list[RolloutGroup] = []
        useful = 0
        wanted, factor = self._groups, self._config.rollout.dynamic_sampling
        while count := more_groups(wanted, useful, len(groups), factor):
            more = self._scored_groups(number, count)
            groups += more
            useful += sum(group.has_gradient for group in more)
            if len(more) < count:
                break
        complete = not self._interrupted.is_set()
        if complete:
            self._curriculum.end(groups)
        tokens = sum(completion.sampled_tokens for group in groups for completion in group.completions)
        seconds = time.perf_counter() - started
        return RoundRollouts(tuple(groups) if complete else (), tokens, seconds, complete, self._generation())

    def _scored_groups(self, number: int, count: int) -> list[RolloutGroup]:
        """Returns `count` more groups for a round; fewer if interrupted or out of examples."""
        scoring: list[Future[RolloutGroup]] = []
        for one in self._rollouts.round(self._examples, groups=count, should_stop=self._interrupted.is_set):
            # A judge may be slow, or wait for a subprocess: it works while the engine continues.
            self._untrained[number].append(one)
            work = copy_context().run, self._score, one, self.engine.policy_version
            scoring.append(self._scorer.submit(*work))
        since_s = time.perf_counter()
        groups = [future.result() for future in scoring]
        self._score_wait_s += time.perf_counter() - since_s
        return [] if self._interrupted.is_set() else groups

    def rest(self) -> None:
        self._rollouts.park()
        self.engine.sleep()
        self.engine.submit(())  # Keep it awake: people may ask it before we do.

    def evaluate(self) -> Evaluation | None:
        self._rollouts.park()
        self.use_newest_policy()
        with _memory_errors_explained():
            try:
                return evaluate(
                    self.engine,
                    self._renderer,
                    self._tasks,
                    self._sampling,
                    examples=self._config.tasks.eval_examples,
                    samples=self._evaluation_samples(),
                    should_stop=self._interrupted.is_set,
                    conversations=self._conversations,
                )
            except JudgementLost:
                if not self._interrupted.is_set():
                    raise
                return None

    def _evaluation_samples(self) -> int:
        """Returns the answers per held-out question: one, or a group if the task compares answers."""
        return self._config.rollout.group_size if any(map(judges_groups, self._tasks.values())) else 1

    def interrupt(self) -> None:
        self._interrupted.set()
        self._judge.stop()

    def close(self) -> None:
        self._scorer.shutdown(cancel_futures=True)
        self.engine.close()

    def _waiting(self, counters: Counters) -> Waiting:
        """Returns everything that a checkpoint keeps besides the policy, without what rounds up to
        `counters.round` used."""
        later = sorted(number for number in self._untrained if number > counters.round)
        complete = [answered for number in later for answered in self._untrained[number]]
        levels = self._curriculum.state(later[0] if later else None)
        state = UntrainedRollouts(self._examples.place, self._rollouts.state(complete), levels)
        return Waiting(msgspec.msgpack.encode(state))

    def _measure(self) -> Measure:
        """Returns what its evaluations are made of."""
        return Measure(tuple(sorted(self._tasks)), self._config.tasks.eval_examples)

    def _versions(self) -> dict[str, str]:
        """Returns the versions of its tasks, by name."""
        return {name: task.version for name, task in self._tasks.items()}

    def _task_specs(self) -> tuple[str, ...]:
        """Returns the specs by which this machine can load the tasks again."""
        found = (spec_of(task) for task in self._own_tasks.values())
        return tuple(spec for spec in found if spec is not None)

    def _score(self, answered: Answered, version: int) -> RolloutGroup:
        task = self._tasks[answered.example.key.task]
        if isinstance(task, JudgedEnvironment) and all(one.broken_off for one in answered.completions):
            task.broke_off()
        example, completions = answered.example, answered.completions
        scores = score_completions(task, example, completions)
        return RolloutGroup(example, completions, scores, self._author, version)

    def _restore_rollouts(self, saved: bytes) -> None:
        if not saved:
            return
        try:
            state = msgspec.msgpack.decode(saved, type=UntrainedRollouts)
            if state.levels:
                self._curriculum.restore(state.levels)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"cannot read the unfinished rollouts of the checkpoint: {error}", hint="use --fresh"
            ) from error
        # At the start the trainer is not ahead of the engine yet: complete groups are as fresh as they look.
        self._rollouts.restore(state.rollouts, self._redraw, older=self._versions_ahead)
        self._examples = WantedExamples(self._stream(state.place))

    def _redraw(self, key: ExampleKey) -> Example | None:
        """Returns the example of a saved group, or None if its task is gone or has changed."""
        task = self._own_tasks.get(key.task)
        try:
            return None if task is None else redraw(task, key)
        except TaskError:
            return None

    def _stream(self, place: StreamPlace | None = None) -> ExampleStream:
        per_round = self._config.rollout.groups
        tasks = list(self._tasks.values())
        return ExampleStream(tasks, self._seed, per_round, place, lambda: self._curriculum.levels)

    def _generation(self) -> Generation:
        engine, rollouts = self.engine.stats(), self._rollouts.stats()
        found = {
            **msgspec.to_builtins(engine),
            **msgspec.to_builtins(rollouts),
            "engine": self.engine.capabilities.name,
            "mode": self._config.rollout.mode,
            "live_versions": len(engine.live_versions),
            "resumed": rollouts.resumed_requests,
            "stale_groups_dropped": rollouts.dropped_stale,
            "unjudged_groups": self._judge.lost,
            "failure": self._judge.failure,
            "score_wait_s": self._score_wait_s,
        }
        return msgspec.convert(found, Generation)


def more_groups(wanted: int, with_gradient: int, asked_so_far: int, factor: float) -> int:
    """Returns the number of groups to ask for now. 0: enough have a gradient, or the bound is reached.

    `wanted` groups should have a gradient, `with_gradient` of the `asked_so_far` in this round have one, and
    at most `factor * wanted` are asked for in all. The number follows from the useful share so far, with one
    imagined useful group added to the measured ones. So a round begins with `wanted` groups, the share exists
    before any measurement, and a round without luck does not ask for all the rest at once. Every result above
    0 uses up part of the bound, so repeated calls end.

    >>> more_groups(8, 0, 0, factor=3.0), more_groups(8, 4, 8, factor=3.0), more_groups(8, 8, 16, factor=3.0)
    (8, 8, 0)
    >>> more_groups(8, 4, 8, factor=1.0)
    0
    """
    missing = wanted - with_gradient
    left = floor(factor * wanted) - asked_so_far
    if missing <= 0 or left <= 0:
        return 0
    # missing / useful share, rounded up, in integers: the same on every machine.
    needed = -(-missing * (asked_so_far + 1) // (with_gradient + 1))
    return min(left, needed)


def partial_settings(config: RolloutConfig, versions_ahead: int, *, alone: bool = True) -> PartialSettings:
    """Returns the scheduler's settings, derived from the node's.

    With overlap the trainer is one version ahead of the engine when it receives what was generated, so the
    scheduler has to keep everything that much younger. A policy that is not `alone` on the engine cannot
    measure the cost of its own requests there, so it keeps those of one round in flight.
    """
    return PartialSettings(
        mode=config.mode,
        groups=config.groups,
        group_size=config.group_size,
        max_lag=MAX_LAG - versions_ahead,
        concurrency=None if alone else config.groups * config.group_size,
    )


@contextmanager
def _memory_errors_explained() -> Generator[None, None, None]:
    """Raises EngineError with advice if generation runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "generation ran out of memory",
            hint="lower rollout.slots or rollout.max_tokens, choose a smaller --model, or share this one with"
            " others: --pipeline NAME",
        ) from error
