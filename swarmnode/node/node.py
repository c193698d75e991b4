"""The loop: a node asks its policy questions, tells the swarm, listens, learns, and goes on.

    draw -> generate -> score -> publish  }
                collect others' groups    }  -> own + J external, by the rule -> train -> new policy version

cli join -> run.py -> [NodeLoop.run] -> _run_round, again and again -> learner.py: generate, train
                                                                   -> swarm_member.py: publish, collect

`NodeLoop.run` is everything that a node does, and `NodeLoop._run_round` is one turn of it. lifecycle.py
decides what comes next. The loop runs on asyncio and never blocks: worker threads do all computing
(workers.py), and every wait for another node has a deadline.

With `overlap`, a second thread generates the next round while this one is trained on. It samples from the
policy as it was before training; the new policy is taken over when both are done. So the engine has one user
at a time, and the policy of a round does not depend on which of the two was faster.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.node.drought import Droughts
from swarmnode.node.learner import Learner, RoundRollouts
from swarmnode.node.lifecycle import (
    Evaluate,
    Pause,
    Rest,
    RunRound,
    SaveCheckpoint,
    Stop,
    View,
    WaitForPeers,
    next_action,
    rest_after,
)
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.board import StatusBoard, Watcher
from swarmnode.node.showing.figures import figure
from swarmnode.node.showing.kept_rollouts import KeepRollouts
from swarmnode.node.showing.node_status import (
    NodeStatus,
    PipelineStatus,
    Summary,
    WeekContribution,
    summary_of,
)
from swarmnode.node.swarm_member import Alone, NetworkParts, SwarmMember
from swarmnode.node.workers import Saving, Workers, supervise
from swarmnode.settings.config import Config
from swarmnode.training.records import Counters, Evaluation, TrainReport, tally
from swarmnode.training.rules.rules import own_to_learn_from
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Pause before the panel is redrawn and the peers are counted again."""


class NodeLoop:
    """One member of the swarm. `async with NodeLoop(...) as node: summary = await node.run()`.

    Without `network` it trains alone. `request_stop` ends the run after the current work, with a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        board: StatusBoard,
        watcher: Watcher,
        *,
        seed: int,
        network: NetworkParts | None,
        overlap: bool = False,
        pipeline: Callable[[], PipelineStatus] = PipelineStatus,
        contribution: Callable[[NodeStatus], WeekContribution] = lambda _: WeekContribution(),
        keep_rollouts: KeepRollouts | None = None,
    ) -> None:
        """`board`: keeps the status that `watcher` sees. `pipeline`: returns the status of the larger model
        that this node holds a part of. `contribution`: returns what this machine gave and got.
        `keep_rollouts`: called every round."""
        self._config = config
        self._learner = learner
        self._board = board
        self._watcher = watcher
        self._seed = seed
        self._overlap = overlap
        self._pipeline = pipeline
        self._contribution = contribution
        self._keep_rollouts = keep_rollouts
        self.control = RunControl(learner.interrupt)
        """Requests that people make to this node."""
        self._ahead: RoundRollouts | BaseException | None = None
        """The next round's rollouts, generated while the last one was trained on, or their error."""
        self._counters = Counters()
        self._unmeasured: set[str] = set()
        """Tasks that the log has already reported as having nothing held out."""
        self._droughts = Droughts()
        self._begun_at = 0
        self._started = self._rests_until = time.monotonic()
        self._stack = AsyncExitStack()
        self._workers = Workers()
        self._saving = Saving(learner, self._workers, board)
        self._swarm = Alone(config, learner, self._workers)
        if network is not None:
            self._swarm = SwarmMember(config, learner, self._workers, network, board, self._droughts)

    @property
    def status(self) -> NodeStatus:
        return self._board.status

    def show_page(self, page: str) -> None:
        """Show the address of the status page."""
        self._board.show(page=page)

    def request_stop(self) -> None:
        """Finish the current work quickly, save, and return from `run`."""
        self.control.ask("stop")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_workers)
            await self._resume()
            await self._swarm.join(stack, rate=self._counters.rate_share)
            await self._refresh_status()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _end_workers(self) -> None:
        self._learner.interrupt()
        await self._workers.close()
        await asyncio.get_running_loop().run_in_executor(None, self._learner.close)

    async def run(self) -> Summary:
        """Run the loop: do what `next_action` says until it says Stop."""
        config = self._config
        async with self._services(), self._saving_before_errors():
            while True:
                match next_action(self._view()):
                    case WaitForPeers(missing):
                        self._board.enter("waiting for peers", f"{missing} more before round 1")
                        await asyncio.sleep(TICK_S)
                    case Evaluate():
                        await self._evaluate()
                    case SaveCheckpoint():
                        await self._saving.save(self._counters)
                    case Rest(seconds):
                        self._board.enter("resting", f"limits.power is {config.limits.power:.0%}")
                        await asyncio.sleep(min(TICK_S, seconds))
                    case Pause():
                        if self.status.phase.name != "paused":
                            await self._workers.learn(self._learner.rest)
                        self._board.enter("paused", self.control.until)
                        await asyncio.sleep(TICK_S)
                    case RunRound(number):
                        await self._run_round(number)
                    case Stop(reason):
                        break
            if 0 < self._begun_at == self._counters.round and not self.control.ending:
                logger.warning("%s", reason)
            await self._finish_saving()
            self._board.enter("stopped", reason)
        self._watcher.see("tick", self.status)
        summary = summary_of(self.status)
        if summary.not_saved:
            again = f"the same command then resumes after round {summary.saved_round or 0}"
            logger.error("%s; free some space: %s", summary.not_saved, again)
        return summary

    @asynccontextmanager
    async def _services(self) -> AsyncGenerator[None, None]:
        """Runs the services beside the loop: screen, search for peers, writing of checkpoints."""
        async with asyncio.TaskGroup() as tasks:
            self._saving.report_in(tasks)
            services = {"screen and peers": self._keep_status_fresh, "discovery": self._swarm.find_peers}
            owned = [tasks.create_task(supervise(name, service)) for name, service in services.items()]
            yield
            for task in owned:
                task.cancel()

    @asynccontextmanager
    async def _saving_before_errors(self) -> AsyncGenerator[None, None]:
        """Saves a checkpoint of the finished rounds before an error ends the run."""
        try:
            yield
        except SwarmnodeError:
            if self._counters.round not in (0, self._saving.tried_round):
                await self._saving.save(self._counters)
            await self._saving.wait()
            raise

    def _view(self) -> View:
        config = self._config
        return View(
            round=self._counters.round,
            begun_at=self._begun_at,
            rounds_limit=config.node.rounds,
            stopping=self.control.ending,
            evaluated_round=self._counters.evaluated_round,
            saved_round=self._saving.tried_round,
            saved_evaluation=self._saving.tried_evaluation,
            eval_every=config.node.eval_every,
            checkpoint_every=config.node.checkpoint_every,
            peers=self._board.peers_outside,
            peers_wanted=config.network.wait_for_peers if config.exchange.enabled else 0,
            waited_s=time.monotonic() - self._started,
            paused=self.control.paused,
            rest_left_s=self._rests_until - time.monotonic(),
        )

    # ---- one round ----

    async def _run_round(self, number: int) -> None:
        """Generate, publish, collect groups of others, train."""
        started = time.perf_counter()
        rollouts = await self._rollouts(number)
        if not rollouts.complete:
            return
        external = await self._swarm.trade(rollouts.groups)
        rng = random.Random(f"{self._seed}:{number}:own")
        own = own_to_learn_from(rollouts.groups, len(external), self._config, rng)
        report = await self._train(number, own, external)
        if report is not None:
            seconds = time.perf_counter() - started
            await self._swarm.settle_round(rollouts.groups, external, report)
            self._finish_round(number, rollouts, external, report, seconds)
            self._rests_until = time.monotonic() + rest_after(seconds, self._config.limits.power)

    async def _rollouts(self, number: int) -> RoundRollouts:
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, BaseException):
            raise ahead
        if ahead is not None:
            return ahead
        settings = self._config.rollout
        catching_up = self._swarm.catching_up
        mix = catching_up.mix(self._config)
        groups = settings.groups if mix is None else mix.groups
        why = ", catching up" if catching_up.phase == "on" else ""
        self._board.enter("generating", f"{groups} groups of {settings.group_size}{why}")
        await self._workers.learn(self._learner.use_newest_policy)
        return await self._workers.generate(self._learner.rollouts, number)

    async def _train(
        self, number: int, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]
    ) -> TrainReport | None:
        """Train on this round. Generate the next one meanwhile, if there will be one."""
        content = f"{len(own)} own + {len(external)} external groups"
        last = self.control.ending or self.control.paused or number == self._config.node.rounds
        if not self._overlap or last:
            self._board.enter("training", content)
            return await self._workers.learn(self._learner.train, own, external)
        self._board.enter("training and generating", content)
        await self._workers.learn(self._learner.use_newest_policy)
        # A failed generation must not lose what training has learnt: it is raised in the next round.
        report, self._ahead = await asyncio.gather(
            self._workers.learn(self._learner.train, own, external),
            self._workers.generate(self._learner.rollouts, number + 1),
            return_exceptions=True,
        )
        if isinstance(report, BaseException):
            raise report
        return report

    def _finish_round(
        self,
        number: int,
        rollouts: RoundRollouts,
        external: Sequence[RolloutGroup],
        report: TrainReport,
        seconds: float,
    ) -> None:
        """Count a round and show it."""
        counters = self._counters
        counters.round = number
        counters.tokens += rollouts.tokens
        counters.seconds += seconds
        counters.rate_share = self._swarm.catching_up.rate
        # Our own library may return groups of our own.
        authors = [group.author for group in external if group.author != self.status.peer_id]
        counters.external_groups_trained = tally(counters.external_groups_trained, authors)
        self._board.show_counters(counters, self._learner.policy_version)
        self._board.show(advice=self._droughts.advise(rollouts.groups, report))
        self._board.show_round(rollouts, external, report, seconds)
        if self._keep_rollouts is not None:
            self._keep_rollouts(number, rollouts.groups, external)
        self._watcher.see("round", self.status)

    # ---- evaluation, checkpoints ----

    async def _evaluate(self) -> None:
        self._board.enter("evaluating", "held-out draws")
        result = await self._workers.learn(self._learner.evaluate)
        if result is None:
            return
        counters = self._counters
        counters.evaluated_round = counters.round
        counters.reward_last = result.mean
        if counters.reward_first is None:
            counters.reward_first = result.mean
        logger.info("held-out reward at round %d: %s", counters.round, figure(result.mean))
        self._warn_of_unmeasured(result)
        self._board.show_evaluation(counters, result.per_task)
        self._watcher.see("evaluation", self.status)

    def _warn_of_unmeasured(self, result: Evaluation) -> None:
        """Log once for each task that has nothing held out: its held-out reward stays unknown."""
        unmeasured = {name for name in result.per_task if not result.asked.get(name, 1)} - self._unmeasured
        if unmeasured:
            self._unmeasured |= unmeasured
            logger.warning(
                "task %s has no held-out prompts (one in five is held out by hash), so its held-out reward is"
                " unknown; pass eval_dataset=, or FILE?evaluation=FILE",
                ", ".join(sorted(unmeasured)),
            )

    async def _finish_saving(self) -> None:
        """Wait for the disk. If it could not take the last checkpoint, try once more."""
        await self._saving.wait()
        if self._board.status.checkpoint.error:
            await self._saving.save(self._counters)
            await self._saving.wait()

    async def _resume(self) -> None:
        resumed = await self._workers.learn(self._learner.resume)
        if resumed is None:
            return
        self._counters = resumed.counters
        round = self._begun_at = resumed.counters.round
        name = f", run {self.status.run}" if self.status.run else ""
        logger.info("resumed after round %d, policy version %d%s", round, self._learner.policy_version, name)
        self._check_changes(resumed.changed, resumed.other_tasks)
        self._saving.note_resumed(resumed.counters)
        self._board.show_counters(resumed.counters, self._learner.policy_version)
        self._board.show_evaluation(resumed.counters, {})

    def _check_changes(self, changed: Sequence[str], other_tasks: str) -> None:
        """Log the settings that the run has not been trained with so far. Raises ConfigError if they or the
        tasks differ and no round is left to train with them: the present policy was not trained that way."""
        limit = self._config.node.rounds
        if not (changed or other_tasks):
            return
        if limit is None or self._begun_at < limit:
            if changed:
                logger.warning("the run continues with changed settings: %s", "; ".join(changed))
            return
        others = [f"with other tasks: {other_tasks}"] if other_tasks else []
        others += [f"with other settings: {'; '.join(changed)}"] if changed else []
        raise ConfigError(
            f"nothing to do: {self._begun_at} of {limit} rounds are done, {', and '.join(others)}",
            hint="start another run (--run NAME, run=), start this one over (--fresh, fresh=True), or raise"
            " --rounds (rounds=) to continue with these settings",
        )

    async def _keep_status_fresh(self) -> None:
        """Keep the screen and the number of peers up to date."""
        while True:
            await self._refresh_status()
            self._watcher.see("tick", self.status)
            await asyncio.sleep(TICK_S)

    async def _refresh_status(self) -> None:
        await self._swarm.show()
        self._board.show(pipeline=self._pipeline(), week=self._contribution(self.status))
