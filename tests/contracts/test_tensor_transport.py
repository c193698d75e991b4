"""Streams and the tensor plane on them: the same tests within one process and over the go-libp2p daemon."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from swarmnode.errors import HostDown, NetworkError, PeerUnreachable
from swarmnode.extensions.pipeline.wire.codec import decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import ForwardHop, Message
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.identity import key_file
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.streams import ByteStream
from tests.contracts.hosts import HostFactory, connected

ECHO = "/swarmnode/test/stream/1"
MIB = 1024 * 1024
PLAN = "ab" * 32


async def echo(stream: ByteStream) -> None:
    """Sends each byte back, and "!" for a "?"."""
    while True:
        data = await stream.receive(1)
        await stream.send(b"!" if data == b"?" else data)


async def test_bytes_go_both_ways_on_a_stream_that_knows_its_far_end(new_host: HostFactory):
    async def greet(stream: ByteStream) -> None:
        await stream.send(stream.peer_id.encode())
        await stream.discard()

    async with connected(new_host) as (alice, bob):
        await bob.serve_streams(ECHO, greet)
        stream = await alice.open_stream(bob.peer_id, ECHO)
        assert stream.peer_id == bob.peer_id
        assert (await stream.receive(len(alice.peer_id))).decode() == alice.peer_id
        stream.close()


async def test_streams_are_apart_from_each_other(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        await bob.serve_streams(ECHO, echo)
        one, other = await alice.open_stream(bob.peer_id, ECHO), await alice.open_stream(bob.peer_id, ECHO)
        await one.send(b"1")
        await other.send(b"2?")
        assert await other.receive(2) == b"2!"
        one.close()
        await other.send(memoryview(b"3"))
        assert await other.receive(1) == b"3"
        other.close()


async def test_a_reader_that_does_not_read_stops_the_writer(new_host: HostFactory):
    reading = asyncio.Event()
    total = 128 * MIB

    async def read_later(stream: ByteStream) -> None:
        await reading.wait()
        for _ in range(total // MIB):
            await stream.receive(MIB)
        await stream.send(b".")
        await stream.discard()

    async with connected(new_host) as (alice, bob):
        await bob.serve_streams(ECHO, read_later)
        stream = await alice.open_stream(bob.peer_id, ECHO)
        written = 0

        async def write() -> None:
            nonlocal written
            piece = bytes(MIB)
            while written < total:
                await stream.send(piece)
                written += MIB

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            before = -1
            while written != before:
                before = written
                await asyncio.sleep(0.5)
            assert written < total
            reading.set()
            assert await stream.receive(1) == b"."
        stream.close()


async def test_closing_a_stream_ends_it_at_the_far_end(new_host: HostFactory):
    ended = asyncio.Event()

    async def wait(stream: ByteStream) -> None:
        await stream.send(b".")
        await stream.discard()
        ended.set()

    async with connected(new_host) as (alice, bob):
        await bob.serve_streams(ECHO, wait)
        stream = await alice.open_stream(bob.peer_id, ECHO)
        assert await stream.receive(1) == b"."
        stream.close()
        async with asyncio.timeout(5):
            await ended.wait()


async def test_a_handler_that_returns_or_raises_ends_its_stream_only(
    new_host: HostFactory, caplog: pytest.LogCaptureFixture
):
    async def halve(stream: ByteStream) -> None:
        await stream.send(bytes([100 // int(await stream.receive(1))]))
        await stream.discard()

    async with connected(new_host) as (alice, bob):
        await bob.serve_streams(ECHO, halve)
        for request, expected in ((b"0", None), (b"2", b"\x32")):
            stream = await alice.open_stream(bob.peer_id, ECHO)
            await stream.send(request)
            if expected is None:
                with caplog.at_level(logging.ERROR), pytest.raises(PeerUnreachable):
                    await stream.receive(1)
                assert "ZeroDivisionError" in caplog.text
            else:
                assert await stream.receive(1) == expected
            stream.close()


async def test_a_protocol_that_the_peer_does_not_serve_is_refused(new_host: HostFactory):
    async with connected(new_host) as (alice, bob):
        with pytest.raises(PeerUnreachable):
            await alice.open_stream(bob.peer_id, ECHO)


async def test_a_peer_that_nobody_knows_is_unreachable(new_host: HostFactory):
    async with connected(new_host) as (alice, _), new_host() as stranger:
        with pytest.raises(PeerUnreachable):
            await alice.open_stream(stranger.peer_id, ECHO)


async def test_a_closed_host_has_no_streams(new_host: HostFactory):
    host = new_host()
    async with host:
        pass
    with pytest.raises(HostDown):
        await host.open_stream(host.peer_id, ECHO)
    with pytest.raises(HostDown):
        await host.serve_streams(ECHO, echo)


class DecodingInbox:
    """Keeps the tensors, as a stage would."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def admit(self, peer_id: str, message: Message) -> None:
        pass

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        assert isinstance(message, ForwardHop)
        self.tensors.append(decode(message.tensor, payload))


async def test_eight_mebibytes_of_activations_go_both_ways(new_host: HostFactory):
    activation = torch.randn(2, 1024, 1024, generator=torch.Generator().manual_seed(1))
    encoded = encode(activation, "none")
    async with connected(new_host) as hosts:
        peers = tuple(host.peer_id for host in hosts)
        inboxes = DecodingInbox(), DecodingInbox()
        async with (
            MemberStreams(hosts[0]) as near,
            MemberStreams(hosts[1]) as far,
            TensorTransport(near, inboxes[0]) as one,
            TensorTransport(far, inboxes[1]) as other,
        ):
            transports = one, other
            for number, transport in enumerate(transports):
                transport.adopt(PlanMembers(PLAN, peers, own=number))

            async def send(source: int) -> None:
                message = ForwardHop(
                    plan=PLAN, iteration=0, micro_batch=0, agent=0, wave=0,
                    path=(source, 1 - source), position=1, tensor=encoded.header, tokens=1,
                )  # fmt: skip
                reply = await transports[source].send(
                    peers[1 - source], message, encoded.payload, timeout_s=60.0
                )
                assert reply is None

            await asyncio.gather(send(0), send(1))
            await asyncio.gather(send(0), send(1))  # again: known, not taken
            for inbox in inboxes:
                [received] = inbox.tensors
                assert torch.equal(received, activation)


async def test_a_refusal_reaches_the_sender_of_a_large_tensor(new_host: HostFactory):
    encoded = encode(torch.zeros(2, 1024, 1024), "none")
    message = ForwardHop(
        plan=PLAN, iteration=0, micro_batch=0, agent=0, wave=0, path=(0, 1), position=1,
        tensor=encoded.header, tokens=1,
    )  # fmt: skip
    async with connected(new_host) as (alice, bob):
        inbox = DecodingInbox()
        async with (
            MemberStreams(alice) as near,
            MemberStreams(bob) as far,
            TensorTransport(near, inbox) as sender,
            TensorTransport(far, inbox) as receiver,
        ):
            peers = alice.peer_id, bob.peer_id
            sender.adopt(PlanMembers(PLAN, peers, own=0))
            receiver.adopt(PlanMembers("cd" * 32, peers, own=1))
            for _ in range(3):
                reply = await sender.send(bob.peer_id, message, encoded.payload, timeout_s=60.0)
                assert reply is Refusal.UNKNOWN_PLAN
            receiver.adopt(PlanMembers(PLAN, peers, own=1))
            assert await sender.send(bob.peer_id, message, encoded.payload, timeout_s=60.0) is None


async def test_after_its_daemon_died_a_member_takes_tensors_again(tmp_path: Path):
    try:
        find_daemon()
    except NetworkError as error:
        pytest.skip(str(error))
    for name in ("alice", "bob"):
        key_file.load_or_create(tmp_path / name)
    encoded = encode(torch.ones(8), "fp16")
    async with P2pdHost(tmp_path / "alice") as alice, P2pdHost(tmp_path / "bob") as bob:
        await alice.connect((await bob.addresses())[0])
        inbox = DecodingInbox()
        async with (
            MemberStreams(alice) as near,
            MemberStreams(bob) as far,
            TensorTransport(near, inbox) as sender,
            TensorTransport(far, inbox) as receiver,
        ):
            for number, transport in enumerate((sender, receiver)):
                transport.adopt(PlanMembers(PLAN, (alice.peer_id, bob.peer_id), own=number))

            async def send(micro_batch: int) -> None:
                message = ForwardHop(
                    plan=PLAN, iteration=0, micro_batch=micro_batch, agent=0, wave=0,
                    path=(0, 1), position=1, tensor=encoded.header, tokens=1,
                )  # fmt: skip
                assert await sender.send(bob.peer_id, message, encoded.payload, timeout_s=60.0) is None

            await send(0)
            assert bob.daemon_pid is not None
            os.kill(bob.daemon_pid, signal.SIGKILL)
            for _ in range(100):
                try:
                    await send(1)
                    break
                except NetworkError:
                    await asyncio.sleep(0.1)
            assert len(inbox.tensors) == 2
