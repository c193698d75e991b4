"""Generates rollouts of a small model for the swarm while our stage of a larger model waits.

run_pipeline.py -> [IdleSharing] -> PipelineMember: pieces in the thread of the stage (idle_rollouts.py)
                        |  whole groups
                        v
                scored in another thread -> Exchange -> the swarm, data nodes of the pipeline among it

The model does not learn. Nothing of this can take the pipeline along: where generating or scoring fails, it
ends with a line in the log.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from swarmnode.errors import EngineError, ModelError, SwarmnodeError, TaskError
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_stats import ExchangeStats
from swarmnode.extensions.pipeline.execution.stage_queue import WorkTimes
from swarmnode.extensions.pipeline.idle.idle_budget import IdleSettings
from swarmnode.extensions.pipeline.idle.idle_rollouts import IdleRollouts, IdleStats
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.memory_plan import Workload, plan_memory, size_text
from swarmnode.model.base_model import LoadedModel, load_base_model
from swarmnode.network.host import Host
from swarmnode.node.building.assemble import build_exchange
from swarmnode.node.building.local_policy import renderer_of
from swarmnode.node.rollout_learner import scored
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.engine_choice import make_engine
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import Config
from swarmnode.tasks.drawing.example_stream import ExampleStream
from swarmnode.tasks.judging.own_judge import OwnJudge
from swarmnode.tasks.task import Task, is_environment
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

STEP_S = 0.01
"""Wanted length of a step of the engine: little beside a micro-batch in a stage, and beside most gaps."""
MOST_ROWS = 32
REHEARSED = 64
REHEARSAL_S = 5.0
"""Bound of the rehearsal, with REHEARSED pieces: these are done before the stage has work, to learn their
duration."""
TICK_S = 0.5
"""Pause between two rounds of scoring and sharing finished groups."""
MOST_WAITING = 256
"""Groups that may wait to be scored. If a judge is slower than we generate, others are dropped."""

HINT = "set pipeline.idle_model to `tiny`, a folder or a hub name, or leave it empty"


@dataclass(frozen=True, slots=True)
class IdleModel:
    """A small model, ready to generate."""

    engine: Engine
    renderer: Renderer
    family: str
    parameters: int
    max_tokens: int
    """Bound of an answer: that of the settings, or half of the model's context."""
    longest_prompt: int
    size_bytes: int
    """Bound of the bytes of weights, keys and values."""


def load_idle_model(source: str, config: Config) -> IdleModel:
    """Load a folder or a hub name into an engine of ours. Raises ModelError that names the setting."""
    try:
        base = load_base_model(source, config.policy)
        max_tokens, longest = answer_bounds(config, base.max_positions)
        engine, _ = make_engine(
            base.model,
            base.eos_token_ids,
            MOST_ROWS,
            longest,
            kind="embedded",
            lora_rank=config.policy.lora_rank,
        )
    except (ModelError, EngineError) as error:
        raise ModelError(
            f"pipeline.idle_model = {config.pipeline.idle_model} cannot be used: {error.message}", hint=HINT
        ) from error
    size_bytes = _idle_bytes(base, config, longest)
    logger.info("while our stage waits, %s generates rollouts; it takes %s", base.name, size_text(size_bytes))
    renderer = renderer_of(config.policy, base.tokenizer, base.eos_token_ids)
    return IdleModel(
        engine, renderer, base.family, base.parameters, max_tokens, longest - max_tokens, size_bytes
    )


def answer_bounds(config: Config, limit: int | None) -> tuple[int, int]:
    """Return the longest answer and the longest sequence of a model that takes `limit` tokens (None: any
    number).

    >>> answer_bounds(Config(), None), answer_bounds(Config(), 128)
    ((512, 1536), (64, 128))
    """
    rollout = config.rollout
    max_tokens = rollout.max_tokens if limit is None else min(rollout.max_tokens, limit // 2)
    longest = rollout.max_prompt_tokens + max_tokens
    return max_tokens, longest if limit is None else min(longest, limit)


def _idle_bytes(base: LoadedModel, config: Config, longest: int) -> int:
    """Return the bytes of the weights, the engine's copy of them, and keys and values of all rows at full
    length. Raises ModelError if they are not known."""
    if base.card is None:
        raise ModelError(
            f"pipeline.idle_model = {config.pipeline.idle_model} cannot be used: what it takes is not known",
            hint=HINT,
        )
    work = Workload(
        rank=1,
        slots=MOST_ROWS,
        sequence_tokens=longest,
        micro_batch_tokens=1,
        number_bytes=base.model.dtype.itemsize,
        gpu=base.model.device.type == "cuda",
    )
    plan = plan_memory(base.card, work)
    return round(plan.weights + plan.engine_weights + plan.kv_cache)


class IdleSharing:
    """Generates rollouts as `IdleWork` of a pipeline's member, and shares them with the swarm.

    `share` and `rest` are for one task; the stage's thread calls `run` and `rehearse`.

    >>> idle = IdleSharing(model, exchange, tasks, config, author=peer_id, seed=0)       # doctest: +SKIP
    >>> async with PipelineMember(host, idle=idle, ...) as member:                       # doctest: +SKIP
    ...     await member.in_stage_thread(idle.rehearse)
    ...     idle.follow(member.times)
    ...     await idle.share(host)
    """

    def __init__(
        self,
        model: IdleModel,
        exchange: Callable[[Host], Exchange],
        tasks: Mapping[str, Task],
        config: Config,
        *,
        author: str,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`exchange`: makes an exchange that has not been started."""
        if answering := [name for name, task in tasks.items() if is_environment(task)]:
            raise TaskError(
                f"task {answering[0]} answers back, and no stage waits for that in its idle time",
                hint="leave out pipeline.idle_model, or that task",
            )
        rollout = config.rollout
        self._model = model
        self._new_exchange = exchange
        self._judge = OwnJudge(tasks, config.tasks.score_timeout_s, max_failures=config.tasks.max_failures)
        self._author = author
        self._clock = clock
        self._times = WorkTimes()
        self._rehearsed_s = 0.0
        self._rollouts = IdleRollouts(
            model.engine,
            PartialRollouts(
                model.engine,
                model.renderer,
                PartialSettings("refill", rollout.groups, rollout.group_size, rollout.max_lag),
                SamplingParams(model.max_tokens, rollout.temperature, rollout.top_p),
                seed=seed,
            ),
            ExampleStream(list(tasks.values()), seed, rollout.groups),
            self._finished,
            IdleSettings(STEP_S, MOST_ROWS),
            self._busy_s,
            clock=clock,
        )
        self._stack = AsyncExitStack()
        self._exchange: Exchange | None = None
        self._answered: deque[Answered] = deque()
        self._since: tuple[float, float, float] | None = None
        self.dropped = 0
        """Groups that were dropped because scoring took too long."""
        self.failure: str | None = None
        """Reason why nothing is shared any more."""

    # In the thread of the stage

    def run(self, until_s: float, wanted: Callable[[], bool]) -> None:
        """Generate until `until_s`, or until stage work is `wanted`; do nothing while sharing is paused."""
        if self._exchange is None or self.failure is not None:
            return
        busy_s = self._busy_s()
        if self._since is None and busy_s > 0:
            self._since = self._clock(), busy_s, self._rollouts.stats().used_s
        self._rollouts.run(until_s, wanted)

    def rehearse(self) -> None:
        """Learn the duration of pieces before there is a stage. Raises EngineError, TaskError."""
        until_s = self._clock() + REHEARSAL_S
        for _ in range(REHEARSED):
            if self._clock() >= until_s:
                break
            self._rollouts.rehearse(1)

    def _busy_s(self) -> float:
        """Seconds of stage work. Generation of others through the stage waits for us as training does, so it
        counts."""
        return self._times.busy_s + self._times.called_s - self._rehearsed_s

    def _finished(self, answered: Answered) -> None:
        if len(self._answered) < MOST_WAITING:
            self._answered.append(answered)
            return
        if not self.dropped:
            logger.warning("groups generated in idle time are dropped: scoring them takes longer")
        self.dropped += 1

    # On the event loop

    def follow(self, times: WorkTimes) -> None:
        """Count this member's stage work from now on."""
        self._rehearsed_s = times.busy_s + times.called_s
        self._times = times

    async def share(self, host: Host) -> None:
        """Generate from now on, and share through this host, which serves no other exchange."""
        if self._exchange is None:
            self._exchange = await self._stack.enter_async_context(self._new_exchange(host))

    async def rest(self) -> None:
        """Pause generating and sharing until `share` is called again, in the same task."""
        self._exchange = None
        await self._stack.aclose()

    async def serve(self) -> None:
        """Score and share finished groups until cancelled."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                await self.share_finished()
        except asyncio.CancelledError:
            # The thread that judges would hold up the end of the process.
            self._judge.stop()
            raise

    async def share_finished(self) -> None:
        """Score and share the groups that are finished. While sharing is paused, they wait."""
        if self._exchange is None or self.failure is not None or not self._answered:
            return
        answered = [self._answered.popleft() for _ in range(len(self._answered))]
        try:
            groups = await asyncio.to_thread(lambda: [self._score(one) for one in answered])
        except SwarmnodeError as error:
            logger.warning("no more rollouts in idle time: %s", error)
            self.failure = str(error)
            return
        # We may have come to rest meanwhile.
        if self._exchange is not None:
            await self._exchange.publish(groups)

    def _score(self, answered: Answered) -> RolloutGroup:
        return scored(answered, self._judge.tasks, self._author, self._model.engine.policy_version)

    @property
    def size_bytes(self) -> int:
        return self._model.size_bytes

    @property
    def stats(self) -> IdleStats:
        return self._rollouts.stats()

    @property
    def used_share(self) -> float | None:
        """Share of the stage's waiting time, since its first work, in which we generated; None before."""
        if self._since is None:
            return None
        since_s, busy_s, used_s = self._since
        waited_s = self._clock() - since_s - (self._busy_s() - busy_s)
        return min(1.0, (self.stats.used_s - used_s) / waited_s) if waited_s > 0 else 0.0

    @property
    def exchange_stats(self) -> ExchangeStats | None:
        """None while sharing is paused."""
        return self._exchange.stats() if self._exchange is not None else None

    def close(self) -> None:
        """Close the engine. To be called once the stage's thread has ended."""
        self._rollouts.close()
        self._model.engine.close()


def sharing_exchange(
    config: Config, key: NodeKey, tasks: Mapping[str, Task], model: IdleModel
) -> Callable[[Host], Exchange]:
    """Return a function that makes exchanges which only give: no trainer here uses groups of others."""
    giving = config.exchange.model_copy(update={"external_groups": 0})
    settings = config.model_copy(update={"exchange": giving})

    def make(host: Host) -> Exchange:
        return build_exchange(
            settings,
            host,
            key,
            tasks,
            model.renderer,
            family=model.family,
            parameters=model.parameters,
            longest_prompt=model.longest_prompt,
        )

    return make
