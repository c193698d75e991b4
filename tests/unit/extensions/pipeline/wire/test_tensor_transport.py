"""Tensors between members: what is taken once, what is refused and why, that memory comes back."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from swarmnode.errors import HostDown, PeerUnreachable, Rejected, RequestTimeout
from swarmnode.extensions.pipeline.wire.byte_budget import ByteBudget
from swarmnode.extensions.pipeline.wire.frames import (
    CHUNK_BYTES,
    VERSION,
    AnswerFrame,
    decode,
    encode,
    framed,
    receive_prefix,
)
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    ForwardHop,
    Message,
    Passed,
    TensorHeader,
)
from swarmnode.extensions.pipeline.wire.incoming_streams import WireLimits
from swarmnode.extensions.pipeline.wire.member_streams import PROTOCOL, MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import LIMITS as SERVICES
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.network.streams import ByteStream

PLAN, NEXT_PLAN = "ab" * 32, "cd" * 32
LARGEST = SERVICES[MemberService.HOPS].max_message_bytes
LIMITS = WireLimits(
    max_in_flight=4, max_streams_per_peer=8,
    header_timeout_s=0.2, chunk_timeout_s=0.2, reply_timeout_s=0.5, max_inbound_bytes=6 * CHUNK_BYTES,
    max_inbound_bytes_per_peer=4 * CHUNK_BYTES,
)  # fmt: skip


@dataclass
class FakeInbox:
    """Keeps what it takes; `refuse` and `hold` let a test decide how taking goes."""

    taken: list[tuple[str, Message, bytes]] = field(default_factory=list)
    refuse: Callable[[Message], Exception | None] = lambda message: None
    admit_only: Callable[[Message], Exception | None] = lambda message: None
    hold: asyncio.Event | None = None

    def admit(self, peer_id: str, message: Message) -> None:
        if (error := self.admit_only(message)) is not None:
            raise error

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if (error := self.refuse(message)) is not None:
            raise error
        self.taken.append((peer_id, message, bytes(payload)))


@dataclass
class Member:
    host: MemoryHost
    streams: MemberStreams
    inbox: FakeInbox
    transport: TensorTransport

    @property
    def refused(self) -> dict[Refusal, int]:
        return dict(self.streams.incoming.refused)

    @property
    def reserved_bytes(self) -> int:
        return self.streams.incoming._budget._used.total()

    async def send(
        self, to: "Member", message: Message, payload: bytes = b"", *, timeout_s: float = 5.0
    ) -> Refusal | None:
        return await self.transport.send(to.host.peer_id, message, payload, timeout_s=timeout_s)


@asynccontextmanager
async def members(
    count: int = 2,
    *,
    network: MemoryNetwork | None = None,
    limits: WireLimits = LIMITS,
    strangers: int = 0,
) -> AsyncGenerator[list[Member], None]:
    """Connected members of one plan, node 0 first; then peers that are in no plan of theirs."""
    network = network or MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(network.host()) for _ in range(count + strangers)]
        for other in hosts[1:]:
            await hosts[0].connect((await other.addresses())[0])
        peers = tuple(host.peer_id for host in hosts)
        made: list[Member] = []
        for number, host in enumerate(hosts):
            inbox = FakeInbox()
            streams = await stack.enter_async_context(MemberStreams(host, limits))
            transport = await stack.enter_async_context(TensorTransport(streams, inbox))
            known = peers[:count] if number < count else peers
            transport.adopt(PlanMembers(PLAN, known, own=number))
            made.append(Member(host, streams, inbox, transport))
        yield made


def forward(size_bytes: int, *, micro_batch: int = 0, **fields: Any) -> tuple[ForwardHop, bytes]:
    payload = bytes(range(251)) * (size_bytes // 251) + bytes(size_bytes % 251)
    header = TensorHeader(dtype="float16", shape=(size_bytes // 2,))
    values: dict[str, Any] = {"plan": PLAN, "iteration": 0, "path": (0, 1)} | fields
    return ForwardHop(
        **values, micro_batch=micro_batch, agent=0, wave=0, position=1, tensor=header, tokens=1
    ), payload


def ready(**fields: Any) -> Passed:
    return Passed(plan=PLAN, iteration=0, micro_batch=0, homeward=False, **fields)


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


async def open_to(sender: Member, receiver: Member) -> ByteStream:
    return await sender.host.open_stream(receiver.host.peer_id, PROTOCOL)


async def answer_on(stream: ByteStream) -> AnswerFrame:
    return decode(AnswerFrame, await stream.receive((await receive_prefix(stream)).length))


def said(message: Message, timeout_s: float = 5.0) -> bytes:
    return framed(MemberService.HOPS, encode(message), timeout_s)


async def refused_with(stream: ByteStream, *parts: bytes) -> Refusal:
    """What a hostile sender is told who writes this."""
    for part in parts:
        await stream.send(part)
    refused = (await answer_on(stream)).refused
    stream.close()
    assert refused is not None
    return refused.reason


# ---- honest members ----


@pytest.mark.parametrize("size_bytes", [2, CHUNK_BYTES, CHUNK_BYTES + 2, 4 * CHUNK_BYTES])
async def test_a_tensor_arrives_as_it_was_sent(size_bytes: int):
    message, payload = forward(size_bytes)
    async with members() as (alice, bob):
        assert await alice.send(bob, message, payload) is None
        [(sender, received, data)] = bob.inbox.taken
        assert sender == alice.host.peer_id
        assert received == message
        assert data == payload
        assert bob.reserved_bytes == 0


async def test_a_message_without_a_tensor_arrives_too():
    async with members() as (alice, bob):
        assert await alice.send(bob, ready()) is None
        assert len(bob.inbox.taken) == 1


async def test_messages_one_after_the_other_share_a_stream(monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    async with members() as (alice, bob):
        really_open = alice.host.open_stream

        async def count(peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> ByteStream:
            opened.append(peer_id)
            return await really_open(peer_id, protocol, timeout_s=timeout_s)

        monkeypatch.setattr(alice.host, "open_stream", count)
        for number in range(5):
            message, payload = forward(2 * CHUNK_BYTES, micro_batch=number)
            assert await alice.send(bob, message, payload) is None
        assert len(opened) == 1


async def test_members_send_to_each_other_at_once_through_a_slow_network():
    network = MemoryNetwork(seed=2, delay_s=(0.0, 0.01))
    async with members(3, network=network) as all_members:
        nodes = range(3)

        async def send(source: int, target: int, number: int) -> None:
            message, payload = forward(CHUNK_BYTES, micro_batch=number, path=(source, target))
            assert await all_members[source].send(all_members[target], message, payload) is None

        pairs = [(a, b, n) for a in nodes for b in nodes for n in range(6) if a != b]
        await asyncio.gather(*(send(*pair) for pair in pairs))
        for member in all_members:
            assert len(member.inbox.taken) == 12
            assert member.reserved_bytes == 0


async def test_only_so_many_messages_are_on_their_way_to_a_member():
    async with members(limits=replace(LIMITS, max_in_flight=2)) as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                message, payload = forward(2, micro_batch=number)
                tasks.create_task(alice.send(bob, message, payload))
            await eventually(lambda: bob.reserved_bytes == 4)
            await asyncio.sleep(0.05)
            assert bob.reserved_bytes == 4
            bob.inbox.hold.set()
        assert len(bob.inbox.taken) == 5


async def test_a_full_member_slows_its_senders_down_and_refuses_nobody():
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                message, payload = forward(3 * CHUNK_BYTES, micro_batch=number)
                tasks.create_task(alice.send(bob, message, payload))
            await eventually(lambda: bob.reserved_bytes > 0)
            assert bob.reserved_bytes == 3 * CHUNK_BYTES
            bob.inbox.hold.set()
        assert len(bob.inbox.taken) == 4
        assert bob.refused == {}


async def test_the_same_attempt_again_is_done_but_not_taken_again():
    message, payload = forward(2 * CHUNK_BYTES)
    async with members() as (alice, bob):
        for _ in range(3):
            assert await alice.send(bob, message, payload) is None
        assert len(bob.inbox.taken) == 1
        again = msgspec.structs.replace(message, attempt=1)
        assert await alice.send(bob, again, payload) is None
        assert len(bob.inbox.taken) == 2


async def test_the_same_attempt_twice_at_once_is_taken_once():
    message, payload = forward(CHUNK_BYTES)
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        sending = [asyncio.ensure_future(alice.send(bob, message, payload)) for _ in range(2)]
        serving = bob.streams.incoming._serving
        await eventually(lambda: [stream.waits for stream in serving.values()] == [False, False])
        bob.inbox.hold.set()
        assert await asyncio.gather(*sending) == [None, None]
        assert len(bob.inbox.taken) == 1


async def test_the_same_attempt_again_is_taken_where_the_stream_of_the_first_dies():
    message, payload = forward(2 * CHUNK_BYTES)
    async with members(limits=replace(LIMITS, chunk_timeout_s=5.0)) as (alice, bob):
        dying = await open_to(alice, bob)
        await dying.send(said(message))
        await eventually(lambda: bob.reserved_bytes > 0)
        again = [asyncio.ensure_future(alice.send(bob, message, payload)) for _ in range(2)]
        serving = bob.streams.incoming._serving
        await eventually(lambda: [stream.waits for stream in serving.values()] == [False] * 3)
        dying.close()
        assert await asyncio.gather(*again) == [None, None]
        assert len(bob.inbox.taken) == 1


async def test_a_refused_attempt_may_be_tried_again():
    message, payload = forward(2)
    async with members() as (alice, bob):
        bob.inbox.refuse = lambda message: Rejected(Refusal.NO_SLOT)
        reply = await alice.send(bob, message, payload)
        assert reply is Refusal.NO_SLOT
        bob.inbox.refuse = lambda message: None
        assert await alice.send(bob, message, payload) is None
        assert bob.refused == {Refusal.NO_SLOT: 1}


async def test_a_refusal_at_the_door_stops_the_sender_early():
    message, _ = forward(4 * CHUNK_BYTES)
    async with members() as (alice, bob):
        bob.inbox.admit_only = lambda message: Rejected(Refusal.WRONG_SHAPE)
        assert await refused_with(await open_to(alice, bob), said(message)) == Refusal.WRONG_SHAPE
        assert bob.reserved_bytes == 0


async def test_an_inbox_that_breaks_refuses_one_message(caplog: pytest.LogCaptureFixture):
    message, payload = forward(2)
    async with members() as (alice, bob):
        bob.inbox.refuse = lambda message: ZeroDivisionError()
        reply = await alice.send(bob, message, payload)
        assert reply is Refusal.INTERNAL
        assert "ZeroDivisionError" in caplog.text
        assert bob.reserved_bytes == 0


# ---- deadlines, cancellation, trouble on the way ----


async def test_a_member_that_does_not_answer_in_time_is_given_up():
    message, payload = forward(2)
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        with pytest.raises(RequestTimeout):
            await alice.send(bob, message, payload, timeout_s=0.1)
        await eventually(lambda: bob.refused == {Refusal.TOO_SLOW: 1})
        assert bob.inbox.taken == []
        assert bob.reserved_bytes == 0


async def test_waiting_for_a_turn_counts_towards_the_deadline():
    async with members(limits=replace(LIMITS, max_in_flight=1)) as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        first, payload = forward(2, micro_batch=1)
        second, _ = forward(2, micro_batch=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(alice.send(bob, first, payload))
            await eventually(lambda: bob.reserved_bytes == 2)
            with pytest.raises(RequestTimeout):
                await alice.send(bob, second, payload, timeout_s=0.1)
            bob.inbox.hold.set()


async def test_a_message_that_would_wait_too_long_for_memory_is_refused():
    message, payload = forward(4 * CHUNK_BYTES, micro_batch=1)
    late, _ = forward(4 * CHUNK_BYTES, micro_batch=2)
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(alice.send(bob, message, payload))
            await eventually(lambda: bob.reserved_bytes > 0)
            stream = await open_to(alice, bob)
            assert await refused_with(stream, said(late, 0.1)) == Refusal.NO_MEMORY
            bob.inbox.hold.set()
        assert bob.reserved_bytes == 0


async def test_a_sender_that_hangs_up_gives_the_memory_back():
    message, payload = forward(4 * CHUNK_BYTES)
    async with members(limits=replace(LIMITS, chunk_timeout_s=60.0)) as (alice, bob):
        stream = await open_to(alice, bob)
        await stream.send(said(message))
        await eventually(lambda: bob.reserved_bytes == 4 * CHUNK_BYTES)
        stream.close()
        await eventually(lambda: bob.reserved_bytes == 0)
        assert bob.refused == {Refusal.INTERRUPTED: 1}
        assert await alice.send(bob, message, payload) is None


async def test_through_a_partition_nothing_comes_and_after_it_everything():
    network = MemoryNetwork(seed=1)
    message, payload = forward(CHUNK_BYTES)
    async with members(network=network) as (alice, bob):
        assert await alice.send(bob, ready()) is None
        network.partition([[alice.host], [bob.host]])
        with pytest.raises((RequestTimeout, PeerUnreachable)):
            await alice.send(bob, message, payload, timeout_s=0.1)
        network.heal()
        assert await alice.send(bob, message, payload) is None
        assert len(bob.inbox.taken) == 2


async def test_a_stream_that_died_unused_is_replaced():
    async with members() as (alice, bob):
        for number in range(3):
            message, payload = forward(2, micro_batch=number)
            assert await alice.send(bob, message, payload) is None
            bob.host.go_down()
            bob.host.come_back()
        assert len(bob.inbox.taken) == 3


async def test_an_answer_that_is_lost_does_not_make_the_message_count_twice():
    message, payload = forward(2)
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        sending = asyncio.ensure_future(alice.send(bob, message, payload))
        await eventually(lambda: bob.reserved_bytes == 2)
        sending.cancel()
        bob.inbox.hold.set()
        await eventually(lambda: len(bob.inbox.taken) == 1)
        assert await alice.send(bob, message, payload) is None
        assert len(bob.inbox.taken) == 1


async def test_a_member_that_is_gone_is_unreachable_and_our_own_trouble_is_named():
    message, payload = forward(2)
    async with members() as (alice, bob):
        bob.host.go_down()
        with pytest.raises(PeerUnreachable):
            await alice.send(bob, message, payload)
        alice.host.go_down()
        with pytest.raises(HostDown):
            await alice.send(bob, message, payload)


async def test_a_transport_that_ends_takes_nothing_more_and_holds_nothing():
    message, payload = forward(CHUNK_BYTES)
    async with members() as (alice, bob):
        bob.inbox.hold = asyncio.Event()
        sending = asyncio.ensure_future(alice.send(bob, message, payload))
        await eventually(lambda: bob.reserved_bytes == CHUNK_BYTES)
        await bob.transport.__aexit__(None, None, None)
        with pytest.raises(PeerUnreachable):
            await sending
        assert bob.reserved_bytes == 0
        with pytest.raises(PeerUnreachable):
            await alice.send(bob, message, payload)
        assert bob.inbox.taken == []


async def test_a_payload_that_is_not_the_messages_is_an_error_of_the_caller():
    message, _ = forward(4)
    async with members() as (alice, bob):
        with pytest.raises(ValueError, match="2 bytes for a message of 4"):
            await alice.send(bob, message, b"ab")


# ---- hostile members and strangers ----


async def test_a_stranger_is_turned_away_unheard():
    async with members(1, strangers=1) as (bob, mallory):
        message, payload = forward(2, path=(1, 0))
        with pytest.raises(PeerUnreachable):
            await mallory.send(bob, message, payload)
        assert bob.refused == {Refusal.NOT_A_MEMBER: 1}
        assert bob.inbox.taken == []


async def test_an_unknown_plan_is_refused_until_it_is_adopted_and_again_after_two_others():
    message, payload = forward(2, plan=NEXT_PLAN)
    async with members() as (alice, bob):
        assert await alice.send(bob, message, payload) is Refusal.UNKNOWN_PLAN
        peers = (alice.host.peer_id, bob.host.peer_id)
        bob.transport.adopt(PlanMembers(NEXT_PLAN, peers, own=1))
        assert await alice.send(bob, message, payload) is None
        for attempt, answer in ((1, None), (2, Refusal.UNKNOWN_PLAN)):
            bob.transport.adopt(PlanMembers(f"0{attempt}" * 32, peers, own=1))
            message = msgspec.structs.replace(message, attempt=attempt)
            assert await alice.send(bob, message, payload) is answer


async def test_a_member_cannot_speak_for_another_one():
    message, payload = forward(2, path=(2, 1))
    async with members(3) as (alice, bob, _):
        reply = await alice.send(bob, message, payload)
        assert reply is Refusal.WRONG_ROUTE


async def test_a_gradient_is_only_taken_from_where_the_activation_went():
    message, payload = forward(2, path=(0, 1, 2))
    back = BackwardHop(
        plan=PLAN, iteration=0, micro_batch=0, agent=0, wave=0, path=(0, 1, 2), position=1,
        tensor=message.tensor,
    )  # fmt: skip
    async with members(3) as (alice, bob, carol):
        assert await alice.send(bob, back, payload) is Refusal.WRONG_ROUTE
        assert await carol.send(bob, back, payload) is None


async def test_a_sender_that_dribbles_its_payload_is_cut_off():
    message, payload = forward(2 * CHUNK_BYTES)
    async with members() as (alice, bob):
        stream = await open_to(alice, bob)
        assert await refused_with(stream, said(message, 60.0), payload[:CHUNK_BYTES]) == Refusal.TOO_SLOW
        assert bob.reserved_bytes == 0


async def test_a_sender_that_dribbles_its_message_is_cut_off():
    async with members() as (alice, bob):
        stream = await open_to(alice, bob)
        assert await refused_with(stream, said(ready())[:-5]) == Refusal.TOO_SLOW
        assert bob.refused == {Refusal.TOO_SLOW: 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            framed(MemberService.HOPS, bytes(SERVICES[MemberService.HOPS].max_message_bytes + 1))[:10],
            Refusal.TOO_LARGE,
        ),
        (framed(MemberService.HOPS, b"not msgpack", 5.0), Refusal.MALFORMED),
        (framed(MemberService.HOPS, b"", 5.0), Refusal.MALFORMED),
        (bytes([VERSION + 1]) + framed(MemberService.HOPS, b" of tomorrow")[1:], Refusal.OTHER_VERSION),
    ],
)
async def test_what_is_no_message_is_refused_by_reason(data: bytes, reason: Refusal):
    async with members() as (alice, bob):
        assert await refused_with(await open_to(alice, bob), data) == reason
        assert bob.refused == {reason: 1}


async def test_a_tensor_over_what_one_member_may_take_is_refused_before_it_is_allocated():
    message, payload = forward(4 * CHUNK_BYTES + 2)
    async with members() as (alice, bob):
        assert await alice.send(bob, message, payload) is Refusal.TOO_LARGE
        assert bob.inbox.taken == []


async def test_one_member_cannot_hold_more_than_its_streams():
    async with members() as (alice, bob):
        kept = [await open_to(alice, bob) for _ in range(LIMITS.max_streams_per_peer)]
        await asyncio.sleep(0.01)
        one_more = await open_to(alice, bob)
        with pytest.raises(PeerUnreachable):
            await answer_on(one_more)
        assert bob.refused == {Refusal.TOO_MANY_STREAMS: 1}
        for stream in kept:
            stream.close()


async def test_a_member_that_answers_nonsense_is_as_good_as_gone():
    message, payload = forward(2)
    async with members() as (alice, bob):
        for nonsense in (framed(MemberService.HOPS, b"??"), bytes([VERSION, 1]) + b"\xff" * 8):

            async def babble(stream: ByteStream, nonsense: bytes = nonsense) -> None:
                await stream.send(nonsense)
                await stream.discard()

            await bob.host.serve_streams(PROTOCOL, babble)
            with pytest.raises(PeerUnreachable):
                await alice.send(bob, message, payload)


# ---- the budget ----


async def hold(budget: ByteBudget, peer_id: str, size_bytes: int, until: asyncio.Event) -> None:
    async with budget.held(peer_id, size_bytes):
        await until.wait()


async def test_memory_is_given_in_the_order_of_asking_and_a_full_member_holds_up_nobody():
    budget = ByteBudget(100, 60)
    done = [asyncio.Event() for _ in range(5)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(budget, "alice", 60, done[0]))
        tasks.create_task(hold(budget, "alice", 1, done[1]))  # waits for itself
        tasks.create_task(hold(budget, "bob", 15, done[2]))
        tasks.create_task(hold(budget, "carol", 50, done[3]))  # waits for the total
        tasks.create_task(hold(budget, "dave", 20, done[4]))  # would fit, but came after carol
        await asyncio.sleep(0.01)
        assert budget._used.total() == 60 + 15
        done[0].set()
        await eventually(lambda: budget._used.total() == 1 + 15 + 50 + 20)
        for event in done:
            event.set()
    assert budget._used.total() == 0


async def test_who_stops_waiting_for_memory_leaves_no_trace():
    budget = ByteBudget(100, 100)
    done = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(budget, "alice", 100, done))
        waiting = tasks.create_task(hold(budget, "bob", 50, done))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert budget._used.total() == 100
        done.set()
    assert budget._used.total() == 0
