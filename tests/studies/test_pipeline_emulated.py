"""Emulated links and machines: messages come when they would, work lasts as long as it would, scaled.

Times are compared with the clock of an event loop whose sleeps cost nothing, so nothing here is timed.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from math import inf
from typing import Any

import pytest

from benchmarks.pipeline_emulated import EmulatedCompute, EmulatedLinks, LinkSpeed, links_of
from swarmnode.errors import RequestTimeout
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.wire.hop_messages import Message, StepDone
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


async def elapsed_s(work: Coroutine[Any, Any, Any]) -> float:
    began_s = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - began_s


def test_a_message_takes_its_time_on_the_link_and_then_its_latency():
    links = EmulatedLinks({"b": LinkSpeed(latency_s=0.5, bytes_per_s=100.0)}, seed=1)
    arrival = links.arrival("b", 200, 10.0)
    assert (arrival.first_s, arrival.last_s) == (10.0, 12.5)
    assert arrival.at_s(0.5) == 11.25


def test_messages_queue_for_a_link_but_not_for_another_one():
    link = LinkSpeed(latency_s=0.5, bytes_per_s=100.0)
    links = EmulatedLinks({"b": link, "c": link}, seed=1)
    assert links.arrival("b", 200, 10.0).last_s == 12.5
    assert links.arrival("b", 100, 10.0).last_s == 13.5
    assert links.arrival("c", 100, 10.0).last_s == 11.5
    assert links.arrival("b", 100, 20.0).last_s == 21.5


def test_without_a_bandwidth_messages_only_wait_for_the_delay():
    links = EmulatedLinks({"b": LinkSpeed(3.0)}, seed=1)
    assert [links.arrival("b", 10**9, 10.0).last_s for _ in range(2)] == [13.0, 13.0]


def test_scale_shrinks_everything():
    link = LinkSpeed(latency_s=0.5, bytes_per_s=100.0, jitter_s=0.2, loss=0.5)
    whole = EmulatedLinks({"b": link}, seed=1)
    tenth = EmulatedLinks({"b": link}, seed=1, scale=0.1)
    for _ in range(20):
        lasts_s = whole.arrival("b", 100, 0.0).last_s
        assert tenth.arrival("b", 100, 0.0).last_s == pytest.approx(0.1 * lasts_s)
    with pytest.raises(ValueError, match="scale"):
        EmulatedLinks({}, seed=1, scale=0.0)


def lateness(seed: int, order: str) -> dict[str, list[float]]:
    link = LinkSpeed(latency_s=1.0, jitter_s=0.5, loss=0.3, retransmit_s=10.0)
    links = EmulatedLinks({"b": link, "c": link}, seed=seed)
    found: dict[str, list[float]] = {"b": [], "c": []}
    for peer_id in order:
        found[peer_id].append(links.arrival(peer_id, 1, 0.0).last_s)
    return found


def test_jitter_and_losses_depend_on_seed_link_and_number_alone():
    one = lateness(1, "bc" * 100)
    assert one == lateness(1, "b" * 100 + "c" * 100)
    assert one != lateness(2, "bc" * 100)
    assert one["b"] != one["c"]
    assert all(1.0 <= late_s % 10.0 <= 1.5 for late_s in one["b"])
    assert 15 <= sum(late_s > 10.0 for late_s in one["b"]) <= 45


def test_a_loss_that_never_ends_still_ends():
    links = EmulatedLinks({"b": LinkSpeed(0.0, loss=1.0, retransmit_s=1.0)}, seed=1)
    assert links.arrival("b", 1, 0.0).last_s == 8.0


def test_a_cut_link_delivers_nothing_until_it_is_mended():
    links = EmulatedLinks({"b": LinkSpeed(1.0)}, seed=1)
    links.cut("b")
    assert links.arrival("b", 1, 0.0).last_s == inf
    links.mend("b")
    assert links.arrival("b", 1, 0.0).last_s == 1.0


def test_peers_that_are_not_emulated_are_as_near_as_they_are():
    assert EmulatedLinks({}, seed=1).arrival("b", 10**9, 7.0).last_s == 7.0


def test_links_of_an_instance_delay_as_its_simulator_does():
    assert links_of(INSTANCE, 0) == (LinkSpeed(0.0), LinkSpeed(3.0), LinkSpeed(5.0))


def test_links_of_an_instance_may_carry_one_activation_at_a_time():
    link = links_of(INSTANCE, 0, activation_bytes=600)[1]
    assert (link.latency_s, link.bytes_per_s) == (0.0, 200.0)
    assert links_of(INSTANCE, 0, activation_bytes=600)[0] == LinkSpeed(0.0)


def test_work_lasts_as_long_as_on_the_emulated_machine():
    async def check() -> None:
        compute = EmulatedCompute(INSTANCE, 1, scale=0.1)
        for work, expected_s in ((compute.forward, 0.4), (compute.backward, 0.6), (compute.loss, 0.1)):

            async def task(work: Any = work) -> None:
                async with work():
                    await asyncio.sleep(0.03)

            assert await elapsed_s(task()) == pytest.approx(expected_s)
        assert (compute.overruns, compute.overrun_s) == (0, 0.0)

    run(check())


def test_work_that_really_takes_longer_is_counted():
    async def check() -> None:
        compute = EmulatedCompute(INSTANCE, 1)
        async with compute.forward():
            await asyncio.sleep(4.5)
        assert (compute.overruns, compute.overrun_s) == (1, pytest.approx(0.5))

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
            links = EmulatedLinks({bob.peer_id: LinkSpeed(3.0)}, seed=1)
            inbox = Everything()
            async with (
                MemberStreams(alice) as near,
                MemberStreams(bob) as far,
                TensorTransport(near, inbox, pace=links) as sender,
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
                links.cut(bob.peer_id)
                with pytest.raises(RequestTimeout):
                    await sender.send(bob.peer_id, ready(2), timeout_s=60.0)

    run(check())


def ready(stage: int) -> StepDone:
    return StepDone(plan=PLAN, iteration=0, stage=stage, tokens=1, visits=1, digest=PLAN)
