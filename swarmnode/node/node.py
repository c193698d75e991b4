"""The loop: a node asks its policy questions, tells the swarm, listens, learns, and goes on.

    draw -> generate -> score -> publish  }
                collect others' groups    }  -> own + J external, by the rule -> train -> new policy version

cli join -> run.py -> [NodeLoop.run] -> _round, again and again -> learner.py: generate, train (trainer.py)

`NodeLoop.run` is everything that a node does, and `NodeLoop._round` is one turn of it. lifecycle.py decides
what comes next. The loop runs on asyncio and never blocks: worker threads do all computing (workers.py), and
every wait for another node has a deadline.

With `overlap`, a second thread generates the next round while this one is trained on. It samples from the
policy as it was before training; the new policy is taken over when both are done. So the engine has one user
at a time, and the policy of a round does not depend on which of the two was faster.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.exchange.bodies.selection import longest_wait_s
from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.signed_group import Origin
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.host import Host
from swarmnode.node.catching_up import CatchingUp, after_round, groups_to_borrow, mix_of, round_of
from swarmnode.node.catching_up import told as told_of_catching_up
from swarmnode.node.drought import Drought, advice, after, after_help, never_right, story
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
from swarmnode.node.showing.figures import shown
from swarmnode.node.showing.kept_rollouts import KeepRollouts
from swarmnode.node.showing.node_status import (
    NodeStatus,
    PipelineStatus,
    Summary,
    WeekContribution,
    summary_of,
)
from swarmnode.node.workers import Saving, Workers, supervise
from swarmnode.settings.config import Config
from swarmnode.training.records import Counters, Evaluation, TrainReport, tally
from swarmnode.training.rules.rules import groups_wanted, own_to_learn_from
from swarmnode.training.rules.task_marks import needs_of
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Pause before the panel is redrawn and the peers are counted again."""

COLLECT_DEADLINE_S = 5.0
"""Longest wait for other nodes' groups in a round, however long our own work took (longest_wait_s). Our own
groups replace any that have not arrived by then."""


@dataclass(frozen=True, slots=True)
class NetworkParts:
    """The parts of a node that exchanges rollouts, besides its learner."""

    host: Host
    exchange: Exchange
    discovery: Discovery | None
    """None: the caller starts the host and keeps it attached."""


class NodeLoop:
    """One member of the swarm. `async with NodeLoop(...) as node: summary = await node.run()`.

    Without `network` it trains alone. `request_stop` ends the run after the current work, with a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        watcher: Watcher,
        *,
        peer_id: str,
        name: str,
        model: str,
        run: str = "",
        seed: int,
        network: NetworkParts | None,
        overlap: bool = False,
        policy: int = 0,
        neighbours: Collection[str] = (),
        pipeline: Callable[[], PipelineStatus] | None = None,
        contribution: Callable[[NodeStatus], WeekContribution] | None = None,
        keep_rollouts: KeepRollouts | None = None,
    ) -> None:
        """`run`: the name of the run. `policy`: the number of this policy in the process. `neighbours`: the
        peer ids of the other policies there. `pipeline`: returns the status of the larger model that this
        node holds a part of. `contribution`: returns what this machine gave and got. `keep_rollouts`: called
        every round."""
        self._config = config
        self._learner = learner
        self._watcher = watcher
        self._seed = seed
        self._network = network
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
        self._catching_up = CatchingUp()
        self._origins: Mapping[Origin, int] = {}
        """Groups that the book holds answers of, and how many of each, as of the previous round."""
        self._droughts: dict[str, Drought] = {}
        self._advised: set[str] = set()
        """Tasks that the log has already reported as having nothing to learn from."""
        self._begun_at = 0
        self._started = self._collected_at = self._rests_until = time.monotonic()
        self._stack = AsyncExitStack()
        self._workers = Workers()
        self._board = StatusBoard(
            peer_id=peer_id,
            name=name,
            swarm=config.swarm.name,
            model=model,
            run=run,
            rounds_limit=config.node.rounds,
            policy=policy,
            policies=config.node.policies,
            neighbours=neighbours,
        )
        self._saving = Saving(learner, self._workers, self._board)

    @property
    def status(self) -> NodeStatus:
        return self._board.status

    def serves(self, page: str) -> None:
        """Show the address of the status page."""
        self._board.show(page=page)

    def request_stop(self) -> None:
        """Finish the current work quickly, save, and return from `run`."""
        self.control.ask("stop")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_workers)
            await self._resume()
            if self._network is not None:
                if self._network.discovery is not None:
                    await stack.enter_async_context(self._network.host)
                await stack.enter_async_context(self._network.exchange)
            self._origins = await self._settle_library()
            await self._look()
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
        async with self._services(), self._what_was_learnt_is_kept():
            while True:
                match next_action(self._view()):
                    case WaitForPeers(missing):
                        self._board.enter("waiting for peers", f"{missing} more before round 1")
                        await asyncio.sleep(TICK_S)
                    case Evaluate():
                        await self._evaluate()
                    case SaveCheckpoint():
                        await self._save()
                    case Rest(seconds):
                        self._board.enter("resting", f"limits.power is {config.limits.power:.0%}")
                        await asyncio.sleep(min(TICK_S, seconds))
                    case Pause():
                        if self.status.phase.name != "paused":
                            await self._workers.learn(self._learner.rest)
                        self._board.enter("paused", self.control.until)
                        await asyncio.sleep(TICK_S)
                    case RunRound(number):
                        await self._round(number)
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
            owned = [tasks.create_task(supervise("screen and peers", self._keep_looking))]
            if self._network is not None and self._network.discovery is not None:
                owned.append(tasks.create_task(supervise("discovery", self._network.discovery.run)))
            yield
            for task in owned:
                task.cancel()

    @asynccontextmanager
    async def _what_was_learnt_is_kept(self) -> AsyncGenerator[None, None]:
        """Saves a checkpoint of the finished rounds before an error ends the run."""
        try:
            yield
        except SwarmnodeError:
            if self._counters.round not in (0, self._saving.tried_round):
                await self._save()
            await self._saving.settled()
            raise

    def _view(self) -> View:
        config = self._config
        waits = self._network is not None and self._counters.round == 0
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
            peers_wanted=config.network.wait_for_peers if waits else 0,
            waited_s=time.monotonic() - self._started,
            paused=self.control.paused,
            rest_left_s=self._rests_until - time.monotonic(),
        )

    # ---- one round ----

    async def _round(self, number: int) -> None:
        """Generate, publish, collect groups of others, train."""
        started = time.perf_counter()
        rollouts = await self._rollouts(number)
        if not rollouts.complete:
            return
        if self._network is not None:
            await self._network.exchange.publish(rollouts.groups)
        external = (*await self._collect(), *self._borrow())
        own = own_to_learn_from(rollouts.groups, len(external), self._config, self._rng(number))
        await self._help(rollouts.groups, external)
        report = await self._train(number, own, external)
        if report is not None:
            seconds = time.perf_counter() - started
            before, self._origins = self._origins, await self._settle_library()
            await self._catch_up(rollouts, report)
            self._thank(before, external)
            self._learnt(number, rollouts, external, report, seconds)
            self._rests_until = time.monotonic() + rest_after(seconds, self._config.limits.power)

    async def _rollouts(self, number: int) -> RoundRollouts:
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, BaseException):
            raise ahead
        if ahead is not None:
            return ahead
        settings = self._config.rollout
        mix = mix_of(self._catching_up, self._config)
        groups, why = (settings.groups, "") if mix is None else (mix.groups, ", catching up")
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

    def _learnt(
        self,
        number: int,
        rollouts: RoundRollouts,
        external: Sequence[RolloutGroup],
        report: TrainReport,
        seconds: float,
    ) -> None:
        """Finish a round: count it, show it, and adjust the exchange to its result."""
        without_gradient = sum(not group.has_gradient for group in rollouts.groups)
        report = msgspec.structs.replace(report, zero_advantage_own=without_gradient)
        self._prefer_what_we_fail_on(report)
        self._advise(rollouts, report)
        self._count(number, rollouts, external, seconds)
        self._board.trained(rollouts, external, report, seconds)
        self._refresh_sharing()
        if self._keep_rollouts is not None:
            self._keep_rollouts(number, rollouts.groups, external)
        self._watcher.see("round", self.status)

    def _rng(self, number: int) -> random.Random:
        return random.Random(f"{self._seed}:{number}:own")

    async def _collect(self) -> Sequence[RolloutGroup]:
        """Returns groups of others. Most were scored during generation; this waits for the rest."""
        wanted = groups_wanted(self._config)
        if self._network is None or wanted == 0:
            return ()
        self._board.enter("collecting", "groups of others")
        version = self._learner.policy_version
        deadline_s = longest_wait_s(time.monotonic() - self._collected_at, COLLECT_DEADLINE_S)
        groups = await self._network.exchange.collect(wanted, version, deadline_s)
        self._collected_at = time.monotonic()
        return groups

    @property
    def _library(self) -> Borrower | None:
        return None if self._network is None else self._network.exchange.library

    def _borrow(self) -> Sequence[RolloutGroup]:
        """Returns groups from libraries of others that have been judged meanwhile, without waiting."""
        library = self._library
        return () if library is None else library.draw(groups_to_borrow(self._catching_up, self._config))

    async def _settle_library(self) -> Mapping[Origin, int]:
        """Tell the library what the book holds. Nothing is borrowed before it knows."""
        if (library := self._library) is None:
            return {}
        origins = await self._workers.learn(self._learner.origins)
        library.note_book(origins.keys())
        return origins

    async def _catch_up(self, rollouts: RoundRollouts, report: TrainReport) -> None:
        """Decide whether the mix of the rounds changes from now on."""
        if (library := self._library) is None:
            return
        before = self._catching_up
        answers = library.count_drawn(self._origins)
        now = after_round(before, round_of(rollouts.groups, answers, report, self._config))
        self._catching_up = now
        found = library.borrowed
        if story := told_of_catching_up(before, now, found.lenders, found.authors):
            logger.info("%s", story)
        mix = mix_of(now, self._config)
        if mix != mix_of(before, self._config):
            await self._workers.learn(self._learner.catch_up, mix)
        self._board.borrowed(library, now)

    def _thank(self, before: Mapping[Origin, int], external: Sequence[RolloutGroup]) -> None:
        """Note the authors of groups that we learnt from: with a library, those whose answers entered the
        book, otherwise all of the round's."""
        receipts = None if self._network is None else self._network.exchange.receipts
        if receipts is None:
            return
        taught = [(group.author, group.example.key, len(group.completions)) for group in external]
        if self._library is not None:
            new = self._origins.keys() - before.keys()
            taught = [(*origin, self._origins[origin]) for origin in new]
        receipts.note_learnt(taught)

    def _prefer_what_we_fail_on(self, report: TrainReport) -> None:
        if self._network is not None and report.pass_rates:
            self._network.exchange.prefer(needs_of(report.pass_rates))
            self._network.exchange.doubt(report.doubted)

    def _advise(self, rollouts: RoundRollouts, report: TrainReport) -> None:
        """Log once, and show as long as it lasts, that there is nothing to learn from."""
        self._goes_on(after(self._droughts, rollouts.groups))
        now = advice(self._droughts)
        if report.own_groups and not report.optimizer_steps:
            now["the gradient"] = "the gradient is not finite, so nothing is learnt: check training.loss"
        # Logged once per task, since a task that is almost mastered comes and goes. The panel shows it
        # throughout.
        for task in now.keys() - self._advised:
            logger.warning("%s", now[task])
        self._advised |= now.keys()
        self._board.show(advice="; ".join(now.values()))

    def _goes_on(self, droughts: dict[str, Drought]) -> None:
        for line in story(self._droughts, droughts):
            logger.info("%s", line)
        self._droughts = droughts

    async def _help(self, groups: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> None:
        """Ask for help where no answer was ever right, and let the next round try what others asked for."""
        if self._network is None or self._config.pipeline.name:
            return
        exchange, share = self._network.exchange, self._config.exchange.help
        stuck = never_right(self._droughts) if share and groups_wanted(self._config) else set[str]()
        asked = await exchange.ask_for_help([group for group in groups if group.example.key.task in stuck])
        self._goes_on(after_help(self._droughts, asked, others))
        if self._library is not None and any(not self._droughts[task].given for task in stuck):
            self._library.ask_again()
        wanted = exchange.take_examples(max(1, round(share * self._config.rollout.groups))) if share else []
        if wanted:
            await self._workers.learn(self._learner.answer_too, wanted)

    def _count(
        self, number: int, rollouts: RoundRollouts, external: Sequence[RolloutGroup], seconds: float
    ) -> None:
        counters = self._counters
        counters.round = number
        counters.tokens += rollouts.tokens
        counters.seconds += seconds
        # Our own library may return groups of our own.
        authors = [group.author for group in external if group.author != self.status.peer_id]
        counters.external_groups_trained = tally(counters.external_groups_trained, authors)
        self._board.counted(counters, self._learner.policy_version)

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
        logger.info("held-out reward at round %d: %s", counters.round, shown(result.mean))
        self._say_what_is_not_measured(result)
        self._board.evaluated(counters, result.per_task)
        self._watcher.see("evaluation", self.status)

    def _say_what_is_not_measured(self, result: Evaluation) -> None:
        """Log once for each task that has nothing held out: its held-out reward stays unknown."""
        unmeasured = {name for name in result.per_task if not result.asked.get(name, 1)} - self._unmeasured
        if unmeasured:
            self._unmeasured |= unmeasured
            logger.warning(
                "task %s has no held-out prompts (one in five is held out by hash), so its held-out reward is"
                " unknown; pass eval_dataset=, or FILE?evaluation=FILE",
                ", ".join(sorted(unmeasured)),
            )

    async def _save(self) -> None:
        await self._saving.save(self._counters)

    async def _finish_saving(self) -> None:
        """Wait for the disk. If it could not take the last checkpoint, try once more."""
        await self._saving.settled()
        if self._board.status.checkpoint.error:
            await self._save()
            await self._saving.settled()

    async def _resume(self) -> None:
        resumed = await self._workers.learn(self._learner.resume)
        if resumed is None:
            return
        self._counters = resumed.counters
        round = self._begun_at = resumed.counters.round
        name = f", run {self.status.run}" if self.status.run else ""
        logger.info("resumed after round %d, policy version %d%s", round, self._learner.policy_version, name)
        self._go_on_with(resumed.changed, resumed.other_tasks)
        if self._network is not None:
            self._network.exchange.resume(self._learner.policy_version)
        self._saving.resumed(resumed.counters)
        self._board.counted(resumed.counters, self._learner.policy_version)
        self._board.evaluated(resumed.counters, {})

    def _go_on_with(self, changed: Sequence[str], other_tasks: str) -> None:
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

    async def _keep_looking(self) -> None:
        """Keep the screen and the number of peers up to date."""
        while True:
            await self._look()
            self._watcher.see("tick", self.status)
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        if self._network is not None:
            found = self._network.discovery
            await self._board.look_at(self._network.host, None if found is None else found.reach)
        if self._pipeline is not None:
            self._board.show(pipeline=self._pipeline())
        self._refresh_sharing()
        if self._contribution is not None:
            self._board.show(week=self._contribution(self.status))

    def _refresh_sharing(self) -> None:
        stats = self._network.exchange.stats() if self._network is not None else None
        self._board.shared(stats, self._counters.external_groups_trained)
