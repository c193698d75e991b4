"""Probes: over a network in one process whose clock is ours, so that nothing has to be waited for."""

from collections.abc import AsyncIterator, Callable

import pytest

from swarmnode.errors import NetworkError, PeerUnreachable
from swarmnode.extensions.pipeline.membership.link_probes import (
    BURST_BYTES,
    LEAST_PRICE_BYTES,
    MAX_PROBE_BYTES,
    MAX_TRACKED_PEERS,
    LinkProber,
    Probe,
)
from swarmnode.extensions.pipeline.plans.member_costs import MAX_AGE_S
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.memory_network import MemoryNetwork

ECHOES_AT_ONCE = int(BURST_BYTES) // LEAST_PRICE_BYTES


class Clock:
    """Seconds that pass when we say so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """Takes time on our clock for what goes through it, answers as the service behind it does."""

    def __init__(self, clock: Clock, *, latency_s: float, bytes_per_s: float) -> None:
        self.clock = clock
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.sizes: list[int] = []
        self.extra_s: Callable[[int], float] = lambda _: 0.0
        self.service: LinkProber | None = None

    async def answer(self, incoming: Incoming[Probe]) -> Reply:
        size_bytes = incoming.message.size_bytes
        self.sizes.append(size_bytes)
        self.clock.now_s += 2 * self.latency_s + size_bytes / self.bytes_per_s + self.extra_s(len(self.sizes))
        assert self.service is not None
        return await self.service.answer(incoming)


Ends = tuple[MemberStreams, MemberStreams]


@pytest.fixture
async def hosts() -> AsyncIterator[Ends]:
    network = MemoryNetwork(seed=1)
    async with network.host() as alice, network.host() as bob:
        await alice.connect((await bob.addresses())[0])
        async with MemberStreams(alice) as one, MemberStreams(bob) as other:
            yield one, other


async def line_to(bob: MemberStreams, clock: Clock, latency_s: float, bytes_per_s: float) -> Line:
    line = Line(clock, latency_s=latency_s, bytes_per_s=bytes_per_s)
    line.service = LinkProber(bob, clock=clock)
    bob.incoming.begin(MemberService.PROBES, ServiceHandler(Probe, line.answer, knows=None))
    return line


def prober(alice: MemberStreams, clock: Clock) -> LinkProber:
    return LinkProber(alice, clock=clock)


@pytest.mark.parametrize("latency_s, bytes_per_s", [(0.05, 1e6), (0.001, 1e8), (0.3, 2e4)])
async def test_latency_and_bandwidth_of_a_line_are_measured(
    hosts: Ends, latency_s: float, bytes_per_s: float
):
    alice, bob = hosts
    clock = Clock()
    await line_to(bob, clock, latency_s, bytes_per_s)
    costs = await prober(alice, clock).measure(bob.peer_id)
    assert costs.latency_s == pytest.approx(latency_s, rel=0.01)
    assert costs.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


async def test_a_slow_line_is_not_burdened_and_a_fast_one_not_beyond_the_cap(
    hosts: Ends,
):
    alice, bob = hosts
    clock = Clock()
    slow = await line_to(bob, clock, 0.05, 1e5)
    await prober(alice, clock).measure(bob.peer_id)
    assert max(slow.sizes) == 64 * 1024
    fast = await line_to(bob, clock, 0.0, 1e12)
    costs = await prober(alice, clock).measure(bob.peer_id)
    assert max(fast.sizes) == MAX_PROBE_BYTES
    assert costs.bytes_per_s <= 1e12


async def test_one_slow_echo_does_not_change_the_latency(hosts: Ends):
    alice, bob = hosts
    clock = Clock()
    line = await line_to(bob, clock, 0.05, 1e6)
    line.extra_s = lambda number: 5.0 if number == 3 else 0.0
    costs = await prober(alice, clock).measure(bob.peer_id)
    assert costs.latency_s == pytest.approx(0.05, rel=0.01)


async def test_an_answer_before_the_bytes_have_arrived_is_found_out(
    hosts: Ends,
):
    alice, bob = hosts

    async def hasty(incoming: Incoming[Probe]) -> Reply:
        return Reply(bytes(16))

    bob.incoming.begin(MemberService.PROBES, ServiceHandler(Probe, hasty, knows=None))
    with pytest.raises(PeerUnreachable, match="wrongly"):
        await prober(alice, Clock()).measure(bob.peer_id)


async def test_who_asks_too_much_gets_no_answer_until_time_has_passed(
    hosts: Ends,
):
    _, bob = hosts
    clock = Clock()
    service = LinkProber(bob, clock=clock)
    answers = [service.allows("greedy", 1) for _ in range(ECHOES_AT_ONCE + 3)]
    assert answers == [True] * ECHOES_AT_ONCE + [False] * 3
    assert service.allows("another", 1)
    clock.now_s += 10.0
    assert service.allows("greedy", 1)


async def test_bulk_is_bounded_by_its_bytes(hosts: Ends):
    _, bob = hosts
    service = LinkProber(bob, clock=Clock())
    answers = [service.allows("greedy", MAX_PROBE_BYTES) for _ in range(3)]
    assert answers == [True, True, False]


async def test_the_service_remembers_a_bounded_number_of_peers(hosts: Ends):
    _, bob = hosts
    service = LinkProber(bob, clock=Clock())
    for _ in range(ECHOES_AT_ONCE):
        service.allows("first", 1)
    for number in range(MAX_TRACKED_PEERS):
        service.allows(str(number), 1)
    assert service.allows("first", 1), "whoever was not heard of for longest is forgotten"


async def test_a_refusal_is_an_error_for_the_prober(hosts: Ends):
    alice, bob = hosts
    service = LinkProber(bob, clock=Clock())
    service.begin()
    for _ in range(ECHOES_AT_ONCE):
        service.allows(alice.peer_id, 1)
    with pytest.raises(PeerUnreachable, match="refused"):
        await prober(alice, Clock()).measure(bob.peer_id)


async def test_links_are_measured_again_when_due_and_not_before(hosts: Ends):
    alice, bob = hosts
    clock = Clock()
    line = await line_to(bob, clock, 0.05, 1e6)
    one = prober(alice, clock)
    members = [alice.peer_id, bob.peer_id]
    await one.refresh(members)
    asked = len(line.sizes)
    await one.refresh(members)
    assert len(line.sizes) == asked
    clock.now_s += 301.0
    await one.refresh(members)
    assert len(line.sizes) == 2 * asked
    assert set(one.links()) == {bob.peer_id}


async def test_one_bad_hour_of_a_line_is_smoothed_away(hosts: Ends):
    alice, bob = hosts
    clock = Clock()
    line = await line_to(bob, clock, 0.05, 1e6)
    one = prober(alice, clock)
    for latency_s in (0.05, 0.05, 0.05, 2.0, 0.05):
        line.latency_s = latency_s
        await one.refresh([bob.peer_id])
        clock.now_s += 301.0
    assert one.links()[bob.peer_id].latency_s == pytest.approx(0.05, rel=0.01)


async def test_a_silent_peer_costs_no_other_its_probe_and_its_figures_age(
    hosts: Ends,
):
    alice, bob = hosts
    clock = Clock()
    await line_to(bob, clock, 0.05, 1e6)
    one = prober(alice, clock)
    stranger = MemoryNetwork(seed=9).host().peer_id
    await one.refresh([stranger, bob.peer_id])
    assert set(one.links()) == {bob.peer_id}
    bob._host.go_down()
    clock.now_s += 301.0
    await one.refresh([stranger, bob.peer_id])
    assert set(one.links()) == {bob.peer_id}, "one failure does not make a link unknown"
    clock.now_s += MAX_AGE_S
    assert one.links() == {}


async def test_a_member_that_left_is_forgotten(hosts: Ends):
    alice, bob = hosts
    clock = Clock()
    await line_to(bob, clock, 0.05, 1e6)
    one = prober(alice, clock)
    await one.refresh([bob.peer_id])
    await one.refresh([])
    assert one.links() == {}


async def test_nobody_there_is_a_network_error(hosts: Ends):
    alice, bob = hosts
    with pytest.raises(NetworkError):
        await prober(alice, Clock()).measure(bob.peer_id)
