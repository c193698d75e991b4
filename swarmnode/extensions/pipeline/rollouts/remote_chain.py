"""The stages at other members, for an engine that runs in a thread.

pipeline_engine.py (a worker thread) -> [RemoteChain] -> decode_node.py (the event loop) -> the members on
    the path
                                    |
                     own stage and head, in the thread of the stage

The engine's thread waits, with a deadline, for work on the event loop. All paths of a step are in flight at
once. While our own stage changes, nothing is in flight: feeds under way end, and are sent again under the
next plan. The weights belong to the pipeline: here a policy is only a version, and no weights are sent to the
stages.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason, embedded, logits_of
from swarmnode.extensions.pipeline.rollouts.decode_node import DecodeNode
from swarmnode.extensions.pipeline.rollouts.routing import PlanNode, Route, route_along
from swarmnode.extensions.pipeline.rollouts.stage_caches import StageCaches, last_rows
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.services import MAX_TENSOR_BYTES

SPARE_S = 5.0
"""Time that the engine's thread waits in addition to the time limit of work on the event loop."""
MAX_FEED_TOKENS = 4096
"""Most tokens in one message: a longer prompt is sent in pieces."""
MOVE_TIMEOUT_S = 10.0
"""Time limit of the wait for our own weights to take a step that another node seems to have taken."""
SETTLE_TIMEOUT_S = 300.0
"""Time limit for our own stage to change to the next plan, including its weights."""

_T = TypeVar("_T")


class RemoteChain:
    """A `Chain` over the network, for the data node that owns the `DecodeNode`.

    >>> chain = RemoteChain(node, loop, on_lost=print, step_timeout_s=20.0)      # doctest: +SKIP
    >>> engine = PipelineEngine(chain, eos, choose_path=lambda prompt: (0, 1, 2))         # doctest: +SKIP
    >>> outputs = await asyncio.to_thread(engine.step)                                    # doctest: +SKIP
    """

    def __init__(
        self,
        node: DecodeNode,
        loop: asyncio.AbstractEventLoop,
        *,
        on_lost: Callable[[str, str], None],
        step_timeout_s: float,
    ) -> None:
        """`node` holds our own stage, with both ends. `on_lost(peer_id, why)` is called on the event loop.
        `step_timeout_s`: time after which a step that has not come around counts as stopped."""
        self._node = node
        self._loop = loop
        self._on_lost = on_lost
        self._step_timeout_s = step_timeout_s
        model = self._caches.model
        self._ends: StageModel | None = None
        self.device: torch.device = model.device
        self.vocabulary: int = model.vocabulary
        token_bytes = model.hidden_size * model.settings.dtype.itemsize
        self.max_feed_tokens = min(MAX_FEED_TOKENS, MAX_TENSOR_BYTES // token_bytes)

    def route(self, path: StagePath, around: Collection[PlanNode] = ()) -> Route | None:
        members = self._node.members
        return route_along(members, path, {node for plan, node in around if plan == members.plan})

    def run(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        self._wait(self._settle(), SETTLE_TIMEOUT_S)
        return self._wait(self._run_all(feeds), self._step_timeout_s)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        # Our stage may have changed meanwhile: these hidden states belong to the ends where they started.
        ends, self._ends = self._ends or self._caches.model, None

        async def compute() -> Tensor:
            return await self._node.run_in_stage_thread(lambda: logits_of(ends, hidden_ND))

        return self._wait(compute(), self._step_timeout_s)

    def report_lost(self, route: Route, node: int, why: str) -> None:
        members = self._node.members
        # A node of a plan that has just ended has another number now.
        if route.plan == members.plan and node != members.own:
            self._loop.call_soon_threadsafe(self._on_lost, members.peers[node], why)

    def close_session(self, route: Route, session: int) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close_session(route, session), self._loop)

    @property
    def _caches(self) -> StageCaches:
        caches = self._node.caches
        if caches is None or not caches.model.part.has_ends:
            raise EngineError("a node samples through a pipeline only where its embedding and head are")
        return caches

    def _wait(self, work: Coroutine[Any, Any, _T], most_s: float) -> _T:
        """Run the work on the event loop and return its result. Raises EngineError."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(most_s + SPARE_S)
        except TimeoutError as error:
            future.cancel()
            raise EngineError(
                f"the node's event loop or stage did nothing for {most_s + SPARE_S:g} s",
                hint="what was sampled is kept; check what else the stage computes",
            ) from error

    async def _run_all(self, feeds: Sequence[ChainFeed]) -> list[Tensor | Stopped]:
        if self._node.plan is not None:
            self._ends = self._caches.model
        return [*(await of_each(range(len(feeds)), lambda place: self._run(feeds[place]))).values()]

    async def _settle(self) -> None:
        """Wait while our own stage changes. Raises EngineError if we do not sample under the new plan."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._node.settled.wait()
        except TimeoutError as error:
            raise EngineError(
                f"our own stage was not there within {SETTLE_TIMEOUT_S:g} s",
                hint="what was sampled is kept; see the log for the change of plan",
            ) from error
        members = self._node.members
        if self._node.plan is None or members.stage_of[members.own] != 0:
            raise EngineError("under the new plan this node does not sample")

    async def _run(self, feed: ChainFeed) -> Tensor | Stopped:
        """Run one feed through our own stage and around its path."""
        members, segments, nodes = self._node.members, feed.segments, feed.route.nodes
        if feed.route.plan != members.plan:
            return Stopped(StopReason.FORGOTTEN, None, "there is another plan")
        started_s = self._loop.time()
        key = self._key(members, feed.session)
        try:
            async with asyncio.timeout(self._step_timeout_s):
                hidden_ND = await self._node.compute(
                    members.plan, key, segments, lambda model: embedded(model, feed.ids), feed.version
                )
        except TimeoutError:
            return Stopped(StopReason.OTHER_POLICY, nodes[0], f"is not at version {feed.version} yet")
        if isinstance(hidden_ND, Stopped):
            if hidden_ND.why is StopReason.OTHER_PLAN:
                return _replanned(hidden_ND)
            return Stopped(hidden_ND.why, nodes[0], hidden_ND.detail)
        if len(nodes) == 1:
            return last_rows(hidden_ND, segments)
        until_s = started_s + self._step_timeout_s
        left_s = max(until_s - self._loop.time(), 0.1)
        found = await self._node.send_around(feed, hidden_ND, timeout_s=left_s)
        if not isinstance(found, Stopped):
            return found
        if found.why is StopReason.OTHER_POLICY:
            within_s = min(MOVE_TIMEOUT_S, until_s - self._loop.time())
            if await self._node.moves_on(feed.version, within_s=within_s):
                return replace(found, node=None)
        is_over = found.why is StopReason.OTHER_PLAN or self._node.members.plan != members.plan
        return _replanned(found) if is_over else found

    async def _close_session(self, route: Route, session: int) -> None:
        key = self._key(self._node.members, session)
        if (caches := self._node.caches) is not None:
            await self._node.run_in_stage_thread(lambda: caches.close(key))
        await self._node.close_session(route, session)

    def _key(self, members: PlanMembers, session: int) -> tuple[str, int]:
        return members.peers[members.own], session


def _replanned(stopped: Stopped) -> Stopped:
    """Return the stop for a plan that changed during the feed: nodes have other numbers now."""
    return Stopped(StopReason.FORGOTTEN, None, f"the plan has changed on the way: {stopped.detail}")
