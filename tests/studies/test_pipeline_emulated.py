"""Emulated links and machines: messages come when they would, work lasts as long as it would, scaled.

Times are compared with the clock of an event loop whose sleeps cost nothing, so nothing here is timed.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from benchmarks.pipeline_emulated import EmulatedLinks, EmulatedQueue, LinkSpeed, PacedStreams, shrunk
from swarmnode.errors import RequestTimeout
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from swarmnode.extensions.pipeline.wire.hop_messages import Message, Passed
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.network.memory_network import MemoryNetwork

INSTANCE = Instance(
    names=("a", "b", "c"),
    forward_s=(2.0, 4.0, 1.0),
    hop_s=((0.0, 3.0, 5.0), (3.0, 0.0, 1.0), (5.0, 1.0, 0.0)),
    memory=(1, 1, 1),
    stages=((0,), (1,), (2,)),
    path_length=2,
    waves=1,
)
PLAN = "ab" * 32


class InstantLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next thing to do instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: InstantLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(work)


def test_a_message_takes_its_time_on_the_link_and_then_its_latency():
    links = EmulatedLinks({"b": LinkSpeed(latency_s=0.5, bytes_per_s=100.0)})
    assert links.arrival_s("b", 200, 10.0) == 12.5


def test_messages_queue_for_a_link_but_not_for_another_one():
    link = LinkSpeed(latency_s=0.5, bytes_per_s=100.0)
    links = EmulatedLinks({"b": link, "c": link})
    assert links.arrival_s("b", 200, 10.0) == 12.5
    assert links.arrival_s("b", 100, 10.0) == 13.5
    assert links.arrival_s("c", 100, 10.0) == 11.5
    assert links.arrival_s("b", 100, 20.0) == 21.5


def test_without_a_bandwidth_messages_only_wait_for_the_delay():
    links = EmulatedLinks({"b": LinkSpeed(3.0)})
    assert [links.arrival_s("b", 10**9, 10.0) for _ in range(2)] == [13.0, 13.0]


def test_peers_that_are_not_emulated_are_as_near_as_they_are():
    assert EmulatedLinks({}).arrival_s("b", 10**9, 7.0) == 7.0


def test_a_shrunk_plan_takes_a_share_of_the_time():
    plan = Plan(INSTANCE, ((0, 1),))
    assert simulate(shrunk(plan, 0.1)).makespan_s == pytest.approx(0.1 * simulate(plan).makespan_s)


def test_tasks_take_as_long_as_on_the_emulated_machine_and_are_a_gap_apart():
    async def check() -> None:
        clock = asyncio.get_running_loop().time
        async with EmulatedQueue(1) as queue:
            queue.begin(Plan(INSTANCE, ((0, 1),)))
            began_s, ended_s = clock(), list[float]()
            for kind in ("forward", "backward", "loss"):
                await queue.perform(kind, 0, lambda: None)
                ended_s.append(clock() - began_s)
        assert ended_s == pytest.approx([4.0, 10.13, 11.26])
        assert (queue.tasks, queue.overruns, queue.overrun_s) == (3, 0, 0.0)

    run(check())


def test_a_data_node_releases_its_agents_one_forward_after_the_other():
    async def check() -> None:
        clock, began_s = asyncio.get_running_loop().time, list[float]()
        async with EmulatedQueue(0) as queue:
            queue.begin(Plan(INSTANCE, ((0, 1), (0, 2))))
            start_s = clock()
            async with asyncio.TaskGroup() as tasks:
                for agent in (1, 0):
                    tasks.create_task(
                        queue.perform("forward", agent, lambda a=agent: began_s.append(clock() - start_s + a))
                    )
        assert began_s == pytest.approx([0.0, 1.0 + 2.09])

    run(check())


class Everything:
    """An inbox that notes when a message was taken."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    def admit(self, peer_id: str, message: Message) -> None:
        pass

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        self.taken_s.append(asyncio.get_running_loop().time())


def test_a_transport_delivers_at_the_pace_of_its_emulated_links():
    async def check() -> None:
        network = MemoryNetwork(seed=1)
        async with network.host() as alice, network.host() as bob:
            await alice.connect((await bob.addresses())[0])
            links = EmulatedLinks({bob.peer_id: LinkSpeed(3.0)})
            inbox = Everything()
            async with (
                PacedStreams(alice, links) as near,
                MemberStreams(bob) as far,
                TensorTransport(near, inbox) as sender,
                TensorTransport(far, inbox) as receiver,
            ):
                for number, transport in enumerate((sender, receiver)):
                    transport.adopt(PlanMembers(PLAN, (alice.peer_id, bob.peer_id), own=number))
                began_s = asyncio.get_running_loop().time()
                async with asyncio.TaskGroup() as tasks:
                    sent = [
                        tasks.create_task(sender.send(bob.peer_id, ready(stage), timeout_s=60.0))
                        for stage in (0, 1)
                    ]
                assert [task.result() for task in sent] == [None, None]
                assert [taken_s - began_s for taken_s in inbox.taken_s] == [pytest.approx(3.0, abs=0.1)] * 2
                with pytest.raises(RequestTimeout):
                    await sender.send(bob.peer_id, ready(2), timeout_s=2.0)

    run(check())


def ready(number: int) -> Passed:
    return Passed(plan=PLAN, iteration=0, micro_batch=number, homeward=False)
