"""A pipeline member as a whole: its network, its stage, and its role.

run_pipeline.py -> [PipelineNode] -> membership_supervisor.py (which plan), own_stage.py (its stage)
                        |
     stage 0: a NodeLoop with a PipelineLearner, or text; any other stage: serve until it ends

The plan determines what a member does, and a new plan may change it. A member ends after its rounds, on
request, or with an error that no other plan could fix.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

import msgspec

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.execution.member_records import IterationReport
from swarmnode.extensions.pipeline.membership.link_probes import LinkProber
from swarmnode.extensions.pipeline.membership.membership import Membership
from swarmnode.extensions.pipeline.membership.slowdown_log import SlowdownLog
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage
from swarmnode.extensions.pipeline.plans.member_costs import CostAnnouncement
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.runtime.data_node import DataNode, RoleChanged
from swarmnode.extensions.pipeline.runtime.data_roles import DataRole
from swarmnode.extensions.pipeline.runtime.member_parts import PipelineParts
from swarmnode.extensions.pipeline.runtime.membership_supervisor import MembershipSupervisor
from swarmnode.extensions.pipeline.runtime.pipeline_status import PipelineView
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.waiting import wait_at_most
from swarmnode.node.lifecycle import rounds_done
from swarmnode.node.showing.board import StatusBoard, Watcher
from swarmnode.node.showing.node_status import NodeStatus, Phase, Summary, summary_of
from swarmnode.node.workers import supervise
from swarmnode.training.records import TrainReport

logger = logging.getLogger(__name__)

TICK_S = 0.5

LINGER_S = 5.0
"""Time that a stopped member stays while data nodes live: they may have been stopped at the same time."""

FEWEST_TO_GO_ON = 2
"""Members that a plan waits for when we come back, even if the first one waited for more."""


class PipelineNode:
    """A member of a pipeline: its network, its stage, and its role.

    async with PipelineNode(parts, watcher, data_role) as node:
        summary = await node.run()
    """

    def __init__(
        self, parts: PipelineParts, watcher: Watcher, data_role: Callable[[DataNode], DataRole]
    ) -> None:
        """`data_role`: makes the role of a data node. Called whenever we get stage 0."""
        config = parts.config
        self.parts = parts
        self._watcher = watcher
        self._data_role = data_role
        self._role: DataRole | None = None
        self._stopping = asyncio.Event()
        self._stack = AsyncExitStack()
        self._why_spare = ""
        self._view = PipelineView(config.pipeline.name, parts.key.peer_id)
        self._slowdowns = SlowdownLog(parts.plan.micro_batch_tokens)
        self._board = StatusBoard(
            config, peer_id=parts.key.peer_id, name=parts.key.name, model=parts.whole.name
        )

    @property
    def peer_id(self) -> str:
        return self.parts.key.peer_id

    @property
    def status(self) -> NodeStatus:
        own = self._role.status if self._role is not None else None
        board = self._board.status
        status = board if own is None else own
        if self.supervisor.trouble:
            phase = Phase("coming back to the pipeline", status.phase.since, self.supervisor.trouble)
            status = msgspec.structs.replace(status, phase=phase)
        return msgspec.structs.replace(
            status, pipeline=self._view.status, network=board.network, page=board.page
        )

    @property
    def membership(self) -> Membership:
        """The current membership."""
        return self.supervisor.membership

    @property
    def done(self) -> bool:
        return self.parts.rounds_are_done(self.member.iteration)

    def announcement(self) -> CostAnnouncement:
        """Return our costs and links, and our observations of the members that our micro-batches passed."""
        observed = self._slowdowns.observed(time.monotonic())
        return CostAnnouncement(self.parts.costs(), self._prober.links(), observed)

    def show_page(self, page: str) -> None:
        """Show the address of the status page."""
        self._board.show(page=page)

    def request_stop(self) -> None:
        """End after the running iteration."""
        self._stopping.set()
        if self._role is not None:
            self._role.stop()

    def _trained(self, report: TrainReport) -> None:
        """Show a finished iteration on text, and pass it to the monitors as a round."""
        self._board.enter("training", f"iteration {self.member.iteration}")
        self._board.show_counters(self._view.counters, self.member.iteration)
        self._board.show_iteration(report)
        self._watcher.see("round", self.status)

    async def __aenter__(self) -> Self:
        parts, enter = self.parts, self._stack.enter_async_context
        async with self._stack:
            await enter(parts.host)
            self.streams = await enter(MemberStreams(parts.host))
            self._prober = LinkProber(self.streams)
            self._prober.begin()
            self.own_stage = OwnStage(
                self.streams, parts.key, parts.whole, parts.own_stage, parts.checkpoints,
                # Of the current membership: after a rejoin there is another one.
                living=lambda: self.membership.members(),
                execution=parts.member,
                earlier=parts.earlier,
            )  # fmt: skip
            await enter(self.own_stage)
            self.member, self.decode = self.own_stage.member, self.own_stage.decode
            self.supervisor = MembershipSupervisor(
                self._new_membership,
                steps=lambda: self.member.iteration,
                left=self.own_stage.ready.clear,
            )
            self.member.on_lost = self._suspect
            self.decode.on_silent = lambda peer_id, why: self.membership.lost(peer_id, why)
            if parts.earlier:
                self.membership.stepped(max(held.holding.iteration for held in parts.earlier))
            await enter(self.supervisor)
            await self._look()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self) -> Summary:
        """Hold the assigned stage and work at it until the node ends."""
        async with asyncio.TaskGroup() as services:
            owned = [
                services.create_task(supervise("discovery", self.parts.discovery.run)),
                services.create_task(supervise("probes", lambda: self._prober.run(self.membership.members))),
                services.create_task(self._follow_steps()),
                services.create_task(self.own_stage.hand_on_forever()),
                services.create_task(supervise("screen", self._keep_looking)),
            ]
            reason = await self._work()
            await self._let_data_nodes_save()
            for task in owned:
                task.cancel()
        await self.own_stage.leave(hand_over=not self.done)
        self._board.enter("stopped", reason)
        self._watcher.see("tick", self.status)
        if self._role is None:
            self._view.counters.round = self.member.iteration
            self._board.show_counters(self._view.counters, self.member.iteration)
        told = self._role.summary if self._role is not None else None
        return told or summary_of(self.status)

    # Its work

    async def _work(self) -> str:
        while not self._stopping.is_set():
            if self.done and not self._is_needed():
                return rounds_done(self.member.iteration)
            if (part := self.own_stage.part) is None or not part.has_ends:
                await self._serve(part)
                continue
            data_node = DataNode(
                self.parts, self.supervisor, self.own_stage, self._watcher,
                pipeline_status=lambda: self._view.status,
                trained=self._trained,
                after_step=self._after_step,
            )  # fmt: skip
            self._role = self._data_role(data_node)
            try:
                return await self._role.run()
            except RoleChanged as error:
                logger.info("%s", error.message)
                self._role = None
        return "stopped on request"

    def _is_needed(self) -> bool:
        """Return True if a living data node may still evaluate, or collect the stages for its last
        checkpoint."""
        agreed = self.own_stage.agreed
        data = agreed.partition.stages[0].peers if agreed is not None else ()
        return self.peer_id not in data and not set(data).isdisjoint(self.membership.members())

    async def _let_data_nodes_save(self) -> None:
        """Wait a while for living data nodes: if all members are stopped at once, a data node needs our stage
        for its last checkpoint."""
        for _ in range(round(LINGER_S / TICK_S)):
            if self.own_stage.part is None or not self._is_needed():
                return
            await asyncio.sleep(TICK_S)

    async def _serve(self, part: StagePart | None) -> None:
        """Hold these layers for one tick while data nodes run iterations."""
        if part is None:
            waiting = f"{len(self.membership.members())} members so far{self._why_spare}"
            self._board.enter("waiting for a place in the pipeline", waiting)
        else:
            layers = f"layers {part.first_layer} to {part.end_layer - 1}"
            self._board.enter("serving", f"{layers}, iteration {self.member.iteration}")
        await wait_at_most(TICK_S, self._stopping)

    # Events

    def _new_membership(self) -> Membership:
        parts, settings = self.parts, self.parts.membership
        if self.own_stage.plans:
            # When we come back, we continue with the members that are there: others may be gone for good.
            settings = replace(settings, at_least=min(settings.at_least, FEWEST_TO_GO_ON))
        return Membership(
            parts.host,
            self.streams,
            parts.key,
            settings=settings,
            plan=parts.plan,
            model=parts.whole.fingerprint,
            announcement=self.announcement,
            prepare=self.own_stage.prepare,
            on_agreed=self._take_assignment,
        )

    async def _take_assignment(self, agreed: AgreedPlan) -> None:
        await self.own_stage.take(agreed)
        self._why_spare = ""
        if agreed.stage_of(self.peer_id) is None:
            self._why_spare = f"; {agreed.why_spare(self.parts.costs())}"
            logger.info("no stage for us%s", self._why_spare)
        if self._role is not None and self.own_stage.ready.is_set():
            self._role.replanned(agreed)

    async def _follow_steps(self) -> None:
        """Tell the other members about every step. If we have missed one, come back for a new assignment."""
        while True:
            await self.own_stage.ready.wait()
            steps = self.member.iteration
            try:
                await self.member.wait_step(steps + 1)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The assignment has changed.
                continue
            except ModelError as error:
                logger.warning("coming back for a new assignment: %s", error)
                self.own_stage.ready.clear()
                await self.supervisor.come_back()
                continue
            # Report it at once: when the plan changes, nobody waits for a member that seems to be behind.
            self.membership.stepped(self.member.iteration)
            await self.own_stage.stepped()

    def _after_step(self, report: IterationReport) -> None:
        self._view.stepped(report)
        agreed = self.own_stage.agreed
        # The next plan, with other nodes, may already be in place.
        if agreed is not None and agreed.iteration <= report.iteration:
            silent = self.member.lost.union(agreed.peers[node] for node in report.lost)
            self._slowdowns.add(agreed, report, silent, self.membership.presences(), time.monotonic())

    def _suspect(self, peer_id: str, why: str) -> None:
        logger.warning("%s does not answer: %s", peer_id, why)
        self._view.lost.add(peer_id)
        self.membership.lost(peer_id, why)

    # Status

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            self._watcher.see("tick", self.status)
            await asyncio.sleep(TICK_S)

    def _tell_of_the_dead(self) -> None:
        """Stop waiting, in iterations and rollouts, for members that have left the pipeline."""
        living = set(self.membership.members())
        for peer_id in self.own_stage.agreed.peers if self.own_stage.agreed is not None else ():
            if peer_id not in living:
                self.member.lose(peer_id, "is no member any more")
                self.decode.lose(peer_id, "is no member any more")

    async def _look(self) -> None:
        self._tell_of_the_dead()
        self._slowdowns.keep(self.membership.presences())
        await self._board.look_at(self.parts.host, self.parts.discovery.reach)
        self._view.look_at(
            self.own_stage, members=len(self.membership.members()), iteration=self.member.iteration
        )
