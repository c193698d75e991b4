"""The learning half of a real node: one policy on one engine, its trainer, its tasks, its checkpoints.

node.py -> worker thread -> [PolicyLearner] -> tasks, rollout, training

Draws and sampling depend on (seed, round) alone, so a node that resumes continues as if it had never stopped.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from swarmnode.config import Config
from swarmnode.errors import TaskError
from swarmnode.node.learner import Resumed, RoundRollouts
from swarmnode.rollout.collector import Answered, collect
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.rounds import draw_round, round_seed
from swarmnode.tasks.task import Task, score_strictly
from swarmnode.training.checkpoint import CheckpointStore, restore
from swarmnode.training.evaluation import evaluate
from swarmnode.training.policy import Policy
from swarmnode.training.records import Counters, Evaluation, TrainReport
from swarmnode.training.trainer import Trainer
from swarmnode.types import RolloutGroup

log = logging.getLogger(__name__)


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
    ) -> None:
        self._config = config
        self._policy = policy
        self._engine = engine
        self._renderer = renderer
        self._tasks = tasks
        self._store = store
        self._author = author
        self._seed = seed
        self._interrupted = threading.Event()
        self._sampling = SamplingParams(
            config.rollout.max_tokens, config.rollout.temperature, config.rollout.top_p
        )
        self._trainer = Trainer(
            policy,
            config.training,
            temperature=config.rollout.temperature,
            seed=seed,
            render=renderer.prompt_ids,
        )

    @property
    def policy_version(self) -> int:
        return self._policy.version

    def resume(self) -> Resumed | None:
        checkpoint = self._store.tidy()
        if checkpoint is None:
            return None
        exchange = restore(checkpoint, self._policy, self._trainer)
        self._engine.set_policy(self._policy.update())
        return Resumed(checkpoint.state.counters, exchange)

    def rollouts(self, number: int) -> RoundRollouts:
        started = time.perf_counter()
        settings = self._config.rollout
        examples = draw_round(list(self._tasks.values()), self._seed, number, settings.groups)
        answered = collect(
            self._engine,
            self._renderer,
            examples,
            settings.group_size,
            self._sampling,
            seed=round_seed(self._seed, number),
            should_stop=self._interrupted.is_set,
        )
        groups = tuple(self._score(one) for one in answered)
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        complete = not self._interrupted.is_set()
        if complete and not groups:
            raise TaskError(
                f"not one of the {len(examples)} examples of round {number} fits the policy",
                hint="their prompts are too long: raise --set rollout.max_prompt_tokens=...",
            )
        return RoundRollouts(groups, tokens, time.perf_counter() - started, complete)

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        report = self._trainer.train(own, external)
        self._engine.set_policy(self._policy.update())
        return report

    def evaluate(self) -> Evaluation | None:
        return evaluate(
            self._engine,
            self._renderer,
            self._tasks,
            self._sampling,
            examples=self._config.tasks.eval_examples,
            should_stop=self._interrupted.is_set,
        )

    def save(self, counters: Counters, exchange: bytes) -> str:
        return self._store.save(self._policy, self._trainer, counters, exchange, self._seed).name

    def interrupt(self) -> None:
        self._interrupted.set()

    def _score(self, answered: Answered) -> RolloutGroup:
        example = answered.example
        texts = [completion.text for completion in answered.completions]
        scores = score_strictly(self._tasks[example.key.task], example, texts)
        return RolloutGroup(example, answered.completions, scores, self._author, self._policy.version)
