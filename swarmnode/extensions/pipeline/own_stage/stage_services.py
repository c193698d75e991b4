"""The services by which a member holds its stage, opened together in the order in which they need each other.

member_parts.py -> [StageServices] -> replica_exchange.py, state_service.py, pipeline_member.py,
    decode_node.py -> own_stage.py -> pipeline_node.py
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.own_stage.collected_state import majority_state
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage
from swarmnode.extensions.pipeline.replication.replica_exchange import ReplicaExchange
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.runtime.member_parts import PipelineParts
from swarmnode.extensions.pipeline.states.state_service import StateService
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams


class StageServices:
    """The services of this member's stage.

    async with StageServices(parts, streams, living=membership.members) as services:
        await services.own_stage.take(agreed)
    """

    def __init__(
        self, parts: PipelineParts, streams: MemberStreams, *, living: Callable[[], Collection[str]]
    ) -> None:
        """`living`: returns the members that answer, with or without a stage."""
        self._parts = parts
        self._gradient_exchange = ReplicaExchange(streams)
        self._stack = AsyncExitStack()
        self.states = StateService(streams)
        self.member = PipelineMember(
            streams,
            key=parts.key,
            gradient_exchange=self._gradient_exchange,
            settings=parts.member,
            reload=self._reload,
        )
        self.decode = DecodeNode(
            streams,
            run_in_stage_thread=self.member.in_stage_thread,
            version=lambda: self.own_stage.version,
            codec=parts.member.codec,
        )
        self.own_stage = OwnStage(
            parts.whole,
            parts.own_stage,
            parts.key.peer_id,
            member=self.member,
            decode=self.decode,
            states=self.states,
            gradient_exchange=self._gradient_exchange,
            checkpoints=parts.checkpoints,
            living=living,
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gradient_exchange)
            await stack.enter_async_context(self.states)
            self.states.offer_earlier(self._parts.earlier)
            await stack.enter_async_context(self.member)
            await stack.enter_async_context(self.decode)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, tb)

    async def _reload(self, peers: tuple[str, ...], stage: int, steps: int) -> Mapping[str, Tensor]:
        """Return the state of our stage after this number of steps, from replicas whose weights are the
        majority's. They offer it right after the step. Raises CheckpointError."""
        part = self.own_stage.part
        if part is None:
            raise CheckpointError("no stage is held here")
        with_ends = self._parts.own_stage.stage.trainable == "full"
        return await majority_state(self.states, peers, part, iteration=steps, with_ends=with_ends)
