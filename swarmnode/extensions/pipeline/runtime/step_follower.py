"""The consequences of every optimizer step of a member: others are told, and get a copy of the state.

pipeline_member.py (a step) -> [StepFollower] -> membership_supervisor.py (our weights are at this iteration)
                                        -> own_stage.py (a copy at the neighbour, a checkpoint)
"""

import asyncio
import logging

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage
from swarmnode.extensions.pipeline.runtime.membership_supervisor import MembershipSupervisor

logger = logging.getLogger(__name__)


class StepFollower:
    """Follows the optimizer steps of this member by two services, `follow` and `hand_on`, that run until
    cancelled."""

    def __init__(self, own_stage: OwnStage, supervisor: MembershipSupervisor) -> None:
        self._own_stage = own_stage
        self._member = own_stage.member
        self._supervisor = supervisor
        self._taken = asyncio.Event()

    async def follow(self) -> None:
        """Tell the other members of every step. If we have missed one, come back for a new assignment."""
        while True:
            await self._own_stage.ready.wait()
            # Under another plan another neighbour keeps our copy, and has none yet.
            self._taken.set()
            steps = self._member.iteration
            try:
                await self._member.wait_step(steps + 1)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # The assignment has changed.
                continue
            except ModelError as error:
                logger.warning("coming back for a new assignment: %s", error)
                self._own_stage.ready.clear()
                await self._supervisor.come_back()
                continue
            # At once: a member that seems to be behind is not waited for when the plan changes.
            self._supervisor.membership.stepped(self._member.iteration)
            await self._own_stage.stepped()
            self._taken.set()

    async def hand_on(self) -> None:
        """Hand on the state after each step, separately from `follow` so that a slow neighbour delays
        nothing."""
        while True:
            await self._taken.wait()
            self._taken.clear()
            await self._own_stage.hand_on()
