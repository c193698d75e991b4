"""Steps of generation between members: each goes around its path once, from the data node back to it.

remote_chain.py (data node) -> [DecodeNode.travel] -> DecodeNode of the next node -> ... -> the data node's
                                                           |
                                             StageCaches, in the thread of its stage

    data node 0           node 3         node 5         data node 0
    embed, own layers -> own layers -> own layers -> norm, head, sampling

A path of n nodes costs n messages a token; were each node asked in turn by the data node, it would be
2 (n - 1). Between continents that is the speed of generation: each message is 50 to 150 ms. So nothing is
acknowledged either: what comes around is the answer. Who cannot go on says so to the data node (`Halted`);
who says nothing is found by asking every node of the path how far it came, once the deadline is over.

A step that is brought twice changes nothing (stage_cache.py), so all that anything here can cause is that it
is brought again: nothing needs to be exactly once.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
from torch import Tensor

from swarmnode.errors import NetworkError, Rejected
from swarmnode.network.streams import StreamHost
from swarmnode.pipeline.rollouts.chain import Stop, Stopped, stopped_by
from swarmnode.pipeline.rollouts.decode_messages import (
    MAX_ASKED_BYTES,
    MAX_DETAIL,
    MAX_PROGRESS_BYTES,
    Asked,
    Closed,
    Frame,
    Halted,
    Progress,
    Step,
    who_stopped,
)
from swarmnode.pipeline.rollouts.decode_streams import PROTOCOL, DecodeCounters, DecodeLimits, FrameStreams
from swarmnode.pipeline.rollouts.stage_cache import Segments, StageCaches, tails_of
from swarmnode.pipeline.stages.stage_model import StageModel
from swarmnode.pipeline.wire.codec import decode, encode
from swarmnode.pipeline.wire.messages import CodecName, Refusal
from swarmnode.pipeline.wire.roster import Roster
from swarmnode.pipeline.wire.transport import Pace
from swarmnode.pipeline.wire.wire import NO_PAYLOAD, Payload

logger = logging.getLogger(__name__)

KEPT_ROSTERS = 2
"""The plan that runs, and the former one."""

ASK_PROTOCOL = f"{PROTOCOL}/asked"

POLL_S = 0.02
MAX_POLL_S = 0.5
"""A step of the next policy looks whether we have come to it, ever less often."""

MAX_WAIT_S = 60.0
"""That a step stays here, whatever its sender says."""

MAX_REMEMBERED = 1024
"""Feeds whose progress is known, and sessions whose path is: what a data node asks about is recent."""

NUMBER_BITS = 52
"""Of a feed's number."""

_T = TypeVar("_T")


class RunInStageThread(Protocol):
    """Runs a function where the stage computes, between its other work, and gives what it returns."""

    def __call__(self, fn: Callable[[], _T], /) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True)
class _Coming:
    """A feed of ours on its way, and all that a frame must say to be about it."""

    plan: str
    path: tuple[int, ...]
    session: int
    shape: tuple[int, int]
    """Of what comes around: tails x width."""
    found: asyncio.Future[Tensor | Stopped]

    def is_meant(self, frame: Step | Halted) -> bool:
        return (frame.plan, frame.path, frame.session) == (self.plan, self.path, self.session)


class DecodeNode:
    """One member's part in generation: computes steps that pass it, sends and receives its own.

    async with DecodeNode(host, run_in_stage_thread=work.run, version=lambda: worker.iteration) as node:
        node.hold(StageCaches(worker.model, max_bytes=...))
        node.adopt(Roster(digest, peers, own=2))
    """

    def __init__(
        self,
        host: StreamHost,
        *,
        run_in_stage_thread: RunInStageThread,
        version: Callable[[], int],
        codec: CodecName = "none",
        limits: DecodeLimits | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`version`: of the policy that the own stage has; asked in the stage's thread, where it changes
        together with the weights."""
        self.run_in_stage_thread = run_in_stage_thread
        self.caches: StageCaches | None = None
        self.counters = DecodeCounters()
        self._version = version
        self._host = host
        self._codec: CodecName = codec
        self._limits = limits or DecodeLimits()
        self._rosters: dict[str, Roster] = {}
        self._streams = FrameStreams(
            host, self._rosters, self._handle, limits=self._limits, counters=self.counters, pace=pace
        )
        self._coming: dict[int, _Coming] = {}
        self._progress: OrderedDict[tuple[str, int], Progress] = OrderedDict()
        self._routes: OrderedDict[tuple[str, int], tuple[str, tuple[int, ...]]] = OrderedDict()

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        await self._streams.start()
        await self._host.serve(ASK_PROTOCOL, self._tell_progress, max_request_bytes=MAX_ASKED_BYTES)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The host goes on to hand us streams; without a roster they are all of strangers.
        self._rosters.clear()
        await self._streams.end()

    def hold(self, caches: StageCaches | None) -> None:
        """The own stage from now on. Sessions of the former are forgotten with it."""
        self.caches = caches
        self._routes.clear()

    def adopt(self, roster: Roster) -> None:
        """Take steps of a plan from now on; of those before, only the last one's may still come."""
        self._rosters.pop(roster.plan, None)
        self._rosters[roster.plan] = roster
        while len(self._rosters) > KEPT_ROSTERS:
            del self._rosters[next(iter(self._rosters))]

    async def compute(
        self,
        key: tuple[str, int] | None,
        segments: Segments,
        hidden: Callable[[StageModel], Tensor],
        version: int,
    ) -> Tensor | Stopped:
        """Through the own stage, once it has come to this version; for how long to wait the caller decides.

        `hidden` gives what goes in, in the stage's thread. The node of a Stopped is left open.
        """
        caches = self.caches
        if caches is None:
            return Stopped(Stop.FORGOTTEN, None, "no stage is held here")

        def run() -> Tensor | Stopped | None:
            own_version = self._version()
            # Members are a step apart at most: what is farther ahead is not coming.
            if own_version > version or own_version + 1 < version:
                return Stopped(Stop.OTHER_POLICY, None, f"has version {own_version}, not {version}")
            return None if own_version < version else caches.run(key, segments, hidden(caches.model))

        wait_s = POLL_S
        try:
            while True:
                if (found := await self.run_in_stage_thread(run)) is not None:
                    return found
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_POLL_S)
        except Rejected as rejected:
            return stopped_by(rejected, None)

    # The data node's half

    async def travel(
        self,
        plan: str,
        path: tuple[int, ...],
        session: int,
        segments: Segments,
        hidden_ND: Tensor,
        *,
        version: int,
        timeout_s: float,
    ) -> Tensor | Stopped:
        """What comes from the own stage, around the path: hidden states of the tails behind its end."""
        roster = self._rosters.get(plan)
        if roster is None:
            return Stopped(Stop.FORGOTTEN, path[0], "we have another plan")
        # Not to be guessed by members that the feed does not pass.
        number = secrets.randbits(NUMBER_BITS)
        shape = sum(segments.tails), hidden_ND.shape[1]
        found = asyncio.get_running_loop().create_future()
        self._coming[number] = _Coming(plan, path, session, shape, found)
        try:
            async with asyncio.timeout(timeout_s):
                await self._pass_on(
                    roster, segments, hidden_ND, plan=plan, session=session, path=path, position=1,
                    number=number, version=version, deadline_s=timeout_s,
                )  # fmt: skip
                return await found
        except TimeoutError:
            return await self._find(roster, path, number, f"nothing came around within {timeout_s:g} s")
        except NetworkError as error:
            return Stopped(Stop.LOST, path[1], str(error))
        finally:
            del self._coming[number]

    async def close_session(self, plan: str, path: tuple[int, ...], session: int) -> None:
        """Let the others forget a session. Who does not hear it drops it when it is idle."""
        if (roster := self._rosters.get(plan)) is not None:
            await self._close_next(roster, Closed(plan=plan, session=session, path=path, position=1))

    async def _find(self, roster: Roster, path: tuple[int, ...], number: int, detail: str) -> Stopped:
        """Ask every node how far it came."""
        asked = Asked(roster.plan, number)
        async with asyncio.TaskGroup() as tasks:
            asking = {node: tasks.create_task(self._ask(roster.peers[node], asked)) for node in path[1:]}
        node = who_stopped(path, {node: task.result() for node, task in asking.items()})
        return Stopped(Stop.FORGOTTEN if node is None else Stop.LOST, node, detail)

    async def _ask(self, peer_id: str, asked: Asked) -> Progress | None:
        try:
            answer = await self._host.request(
                peer_id, ASK_PROTOCOL, msgspec.msgpack.encode(asked),
                timeout_s=self._limits.ask_timeout_s, max_response_bytes=MAX_PROGRESS_BYTES,
            )  # fmt: skip
            return msgspec.msgpack.decode(answer, type=Progress)
        except (NetworkError, msgspec.MsgspecError) as error:
            logger.debug("%s does not say how far it came: %s", peer_id, error)
            return None

    def _arrived(self, frame: Step | Halted, result: Tensor | Stopped) -> None:
        coming = self._coming.get(frame.number)
        if coming is None or coming.found.done() or not coming.is_meant(frame):
            self.counters.refused[Refusal.UNKNOWN_WORK] += 1
        elif isinstance(result, Tensor) and tuple(result.shape) != coming.shape:
            self.counters.refused[Refusal.WRONG_SHAPE] += 1
            coming.found.set_result(Stopped(Stop.LOST, frame.path[-1], f"sent {tuple(result.shape)}"))
        else:
            coming.found.set_result(result)

    def _is_on_its_way(self, roster: Roster, frame: Step | Closed) -> bool:
        """Whether the session goes this way: its first step says how it goes, and then only those who are on
        that path can say anything about it."""
        key, route = (roster.peers[frame.path[0]], frame.session), (frame.plan, frame.path)
        if not frame.session:
            return True
        if self._routes.setdefault(key, route) != route:
            self.counters.refused[Refusal.WRONG_ROUTE] += 1
            return False
        if isinstance(frame, Closed):
            del self._routes[key]
        elif len(self._routes) > MAX_REMEMBERED:
            self._routes.popitem(last=False)
        return True

    # A node on the path

    async def _handle(self, roster: Roster, frame: Frame, payload: bytearray) -> None:
        if isinstance(frame, Halted):
            self._arrived(frame, frame.stopped)
        elif frame.position < len(frame.path) and not self._is_on_its_way(roster, frame):
            return
        elif isinstance(frame, Closed):
            if (caches := self.caches) is not None:
                key = roster.peers[frame.path[0]], frame.session
                await self.run_in_stage_thread(lambda: caches.close(key))
            await self._close_next(roster, msgspec.structs.replace(frame, position=frame.position + 1))
        else:
            await self._handle_step(roster, frame, payload)

    async def _handle_step(self, roster: Roster, step: Step, payload: bytearray) -> None:
        until_s = asyncio.get_running_loop().time() + min(step.deadline_s, MAX_WAIT_S)
        try:
            async with asyncio.timeout_at(until_s):
                halted = await self._go_on(roster, step, payload, until_s)
        except TimeoutError:
            # The data node has noticed too, and asks how far we came.
            self.counters.refused[Refusal.TOO_SLOW] += 1
            return
        if halted is not None:
            self.counters.refused[halted.why] += 1
            await self._send_within(roster.peers[step.path[0]], halted)

    async def _go_on(self, roster: Roster, step: Step, payload: bytearray, until_s: float) -> Halted | None:
        """Compute and pass on; or why not, and at which position."""
        try:
            hidden_ND = decode(step.tensor, payload)
        except Rejected as rejected:
            return _halted(step, Stopped(Stop.LOST, None, str(rejected)), max(step.position - 1, 1))
        if step.position == len(step.path):
            self._arrived(step, hidden_ND)
            return None
        owner = roster.peers[step.path[0]]
        self._note(owner, step.number, Progress(came=True, went=False))
        key = (owner, step.session) if step.session else None
        found_ND = await self.compute(key, step.segments, lambda _: hidden_ND, step.version)
        if isinstance(found_ND, Stopped):
            return _halted(step, found_ND, step.position)
        self.counters.steps += 1
        try:
            await self._pass_on(
                roster, step.segments, found_ND, plan=step.plan, session=step.session, path=step.path,
                position=step.position + 1, number=step.number, version=step.version,
                deadline_s=max(until_s - asyncio.get_running_loop().time(), 0.001),
            )  # fmt: skip
        except NetworkError as error:
            return _halted(step, Stopped(Stop.LOST, None, str(error)), step.position + 1)
        self._note(owner, step.number, Progress(came=True, went=True))
        return None

    async def _pass_on(self, roster: Roster, segments: Segments, hidden_ND: Tensor, **fields: object) -> None:
        """To the node at `position`. Raises PeerUnreachable, RequestTimeout, HostDown."""
        is_last = fields["position"] == len(fields["path"])  # type: ignore[arg-type]
        encoded = encode(tails_of(hidden_ND, segments) if is_last else hidden_ND, self._codec)
        step = Step(
            cells=segments.cells, starts=segments.starts, counts=segments.counts, tails=segments.tails,
            forks=segments.forks, tensor=encoded.header, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        await self._streams.send(roster.peers[step.target], step, encoded.payload)

    async def _close_next(self, roster: Roster, closed: Closed) -> None:
        if closed.position < len(closed.path):
            await self._send_within(roster.peers[closed.target], closed)

    async def _send_within(self, peer_id: str, frame: Frame, payload: Payload = NO_PAYLOAD) -> None:
        """What the receiver can do without."""
        try:
            async with asyncio.timeout(self._limits.frame_timeout_s):
                await self._streams.send(peer_id, frame, payload)
        except (NetworkError, TimeoutError) as error:
            logger.debug("%s did not get a %s: %s", peer_id, type(frame).__name__, error)

    def _note(self, owner: str, number: int, progress: Progress) -> None:
        self._progress[owner, number] = progress
        if len(self._progress) > MAX_REMEMBERED:
            self._progress.popitem(last=False)

    async def _tell_progress(self, peer_id: str, request: bytes) -> bytes:
        """Raising resets the stream: whoever is told nothing is a stranger or talks nonsense."""
        try:
            asked = msgspec.msgpack.decode(request, type=Asked)
        except msgspec.MsgspecError as error:
            raise Rejected(Refusal.MALFORMED, str(error)) from error
        roster = self._rosters.get(asked.plan)
        if roster is None or peer_id not in roster.peers:
            raise Rejected(Refusal.NOT_A_MEMBER)
        return msgspec.msgpack.encode(self._progress.get((peer_id, asked.number), Progress(False, False)))


def _halted(step: Step, stopped: Stopped, position: int) -> Halted:
    # A stage whose numbers are not finite is of no use to a data node whose own are.
    why = Stop.LOST if stopped.why is Stop.NOT_FINITE else stopped.why
    return Halted(
        plan=step.plan, session=step.session, path=step.path, position=position, number=step.number,
        why=why, detail=stopped.detail[:MAX_DETAIL],
    )  # fmt: skip
