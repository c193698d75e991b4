"""Carries out the jobs of a change of plan at this member, one at a time: plan, load, take the assignment.

follower.py (next job) -> [JobRunner] -> planning.compute_plan, on_agreed -> follower.py (it is done)

A job that fails fails its epoch, and nothing else. A convener that keeps us from working is passed over.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from swarmnode.errors import SwarmnodeError
from swarmnode.extensions.pipeline.membership.convener import MAX_AGAIN
from swarmnode.extensions.pipeline.membership.follower import Follower
from swarmnode.extensions.pipeline.membership.known_members import KnownMembers
from swarmnode.extensions.pipeline.membership.membership_messages import ProposalProgress
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan, PlanInputs, compute_plan
from swarmnode.extensions.pipeline.wire.waiting import ChangeSignal, loop_s

logger = logging.getLogger(__name__)

OnAgreed = Callable[[AgreedPlan], Awaitable[None]]


class JobRunner:
    """Runs the jobs that the follower returns."""

    def __init__(
        self,
        follower: Follower,
        members: KnownMembers,
        news: ChangeSignal,
        *,
        look: Callable[[Iterable[str]], Awaitable[None]],
        prepare: OnAgreed,
        on_agreed: OnAgreed,
    ) -> None:
        """`look`: asks these members for their status. `prepare`, `on_agreed`: as for Membership."""
        self._follower = follower
        self._members = members
        self._news = news
        self._look = look
        self.prepare = prepare
        self.on_agreed = on_agreed

    async def run(self) -> None:
        """Run one job after the other until cancelled."""
        follower, settings = self._follower, self._members.settings
        while True:
            self._give_up_waiting()
            job = follower.job(loop_s(), self._members.living())
            if job is None:
                await self._news.pause(settings.poll_s)
                continue
            epoch = job.epoch
            try:
                await self._do(job)
            except (SwarmnodeError, TimeoutError) as error:
                why = str(error) or "it took too long"
                logger.warning("epoch %d of pipeline %s: %s", epoch, settings.name, why)
                follower.failed(epoch, why)
            except Exception:
                # What others sent is behind it: one job fails, not the node.
                logger.exception("epoch %d of pipeline %s", epoch, settings.name)
                follower.failed(epoch, "internal error, see the log of this member")
            self._news.tell()

    async def _do(self, job: PlanInputs | AgreedPlan) -> None:
        follower, settings = self._follower, self._members.settings
        if isinstance(job, PlanInputs):
            agreed = await asyncio.get_running_loop().run_in_executor(None, compute_plan, job)
            follower.planned(job, agreed)
            await self._look(peer for peer in self._members.living() if peer in agreed.members)
        elif follower.progress == ProposalProgress.PLANNING:
            async with asyncio.timeout(settings.prepare_s):
                await self.prepare(job)
            follower.prepared(job)
        else:
            follower.taking()
            async with asyncio.timeout(settings.assignment_s):
                await self.on_agreed(job)
            follower.taken(job)

    def _give_up_waiting(self) -> None:
        """Pass over a convener that lives but has not finished a change of plan in time."""
        settings, follower = self._members.settings, self._follower
        prepares = follower.progress in (ProposalProgress.PLANNING, ProposalProgress.PREPARED)
        if prepares and follower.stopped_since_s is None and self._members.is_stopped(follower.in_force):
            # As long as a round takes that ends each time because one member cannot load.
            follower.stopped_since_s = loop_s() + (MAX_AGAIN + 1) * settings.prepare_s
        since_s = follower.stopped_since_s
        longest_s = settings.iteration_s + 2 * (settings.assignment_s + settings.catch_up_s)
        if since_s is not None and loop_s() - since_s > longest_s:
            why = f"it left changes of plan half-way for {longest_s:.0f} s"
            self._members.pass_over(follower.by, why, loop_s())
            follower.failed(follower.epoch, f"{follower.by}: {why}")
            self._news.tell()
