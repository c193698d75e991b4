"""Activations between two members over real p2pd daemons on loopback, against one request of the same size.

codec.py, transport.py -> [pipeline_transport] -> MB/s and CPU

Both members and both daemons share this machine, so the MB/s are of all four together; the CPU time says what
a member pays. Figures of a codec are MB of float32 activations per second of CPU time, one way.

python benchmarks/pipeline_transport.py [--quick] [--json FILE]
"""

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import torch
from common import arguments, middle, report

from swarmnode.extensions.pipeline.wire.codec import Encoded, decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName, ForwardHop, Message
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.identity import key_file
from swarmnode.network.daemon.p2pd_host import P2pdHost

MIB = 1 << 20
SIZES_MIB = (1, 8, 32)
PLAN = "ab" * 32
CODECS: tuple[CodecName, ...] = ("none", "fp16")
PLAIN = "/swarmnode/benchmark/request/1"


class Sink:
    """Takes everything and keeps nothing."""

    def admit(self, peer_id: str, message: Message) -> None:
        pass

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        pass


async def answer_nothing(peer_id: str, request: bytes) -> bytes:
    return b""


def time_codecs(repeats: int) -> dict[str, list[float]]:
    """MB/s of CPU time to encode, and to decode, 32 MiB of float32."""
    activation = torch.randn(8, 1024, 1024, generator=torch.Generator().manual_seed(0))
    size_mb = activation.numel() * 4 / 1e6
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for codec in CODECS:
            began_s = time.process_time()
            sent = encode(activation, codec)
            encoded_s = time.process_time()
            received = bytearray(sent.payload)
            copied_s = time.process_time()
            decode(sent.header, received)
            rates[f"{codec}_encode_mb_s"].append(size_mb / (encoded_s - began_s))
            rates[f"{codec}_decode_mb_s"].append(size_mb / (time.process_time() - copied_s))
    return rates


async def time_transport(folder: Path, repeats: int) -> dict[str, list[float]]:
    """MB/s and CPU milliseconds per MiB, by size, of the transport and of one plain request."""
    rates: defaultdict[str, list[float]] = defaultdict(list)
    paths = [folder / "one.key", folder / "other.key"]
    for path in paths:
        key_file.load_or_create(path)
    async with P2pdHost(paths[0]) as one, P2pdHost(paths[1]) as other:
        await one.connect((await other.addresses())[0])
        await other.serve(PLAIN, answer_nothing, max_request_bytes=64 * MIB)
        async with (
            MemberStreams(one) as near,
            MemberStreams(other) as far,
            TensorTransport(near, Sink()) as sender,
            TensorTransport(far, Sink()) as receiver,
        ):
            for number, transport in enumerate((sender, receiver)):
                transport.adopt(PlanMembers(PLAN, (one.peer_id, other.peer_id), own=number))
            daemons = [psutil.Process(host.daemon_pid) for host in (one, other)]
            for repeat in range(repeats):
                for size_mib in SIZES_MIB:
                    sent = encode(torch.randn(size_mib, 512, 512), "none")
                    message = forward(sent, repeat)

                    async def stream(message: Message = message, sent: Encoded = sent) -> None:
                        assert await sender.send(other.peer_id, message, sent.payload, timeout_s=60.0) is None

                    async def request(sent: Encoded = sent) -> None:
                        data = bytes(sent.payload)
                        await one.request(other.peer_id, PLAIN, data, timeout_s=60, max_response_bytes=0)

                    for name, work in (("stream", stream), ("request", request)):
                        await _measure(f"{name}_{size_mib}mib", size_mib, work, daemons, rates)
    return rates


async def _measure(
    name: str,
    size_mib: int,
    work: Callable[[], Awaitable[None]],
    daemons: list[psutil.Process],
    rates: dict[str, list[float]],
) -> None:
    def daemons_s() -> float:
        return sum(sum(daemon.cpu_times()[:2]) for daemon in daemons)

    await asyncio.sleep(0.05)  # what the one before leaves to be closed and freed is not ours
    began_s, began_cpu_s, began_daemons_s = time.perf_counter(), time.process_time(), daemons_s()
    await work()
    rates[f"{name}_mb_s"].append(size_mib * MIB / 1e6 / (time.perf_counter() - began_s))
    rates[f"{name}_cpu_ms_per_mib"].append((time.process_time() - began_cpu_s) * 1e3 / size_mib)
    if size_mib >= 8:  # the kernel counts in steps of 10 ms
        rates[f"{name}_daemons_cpu_ms_per_mib"].append((daemons_s() - began_daemons_s) * 1e3 / size_mib)


def forward(sent: Encoded, micro_batch: int) -> ForwardHop:
    return ForwardHop(
        plan=PLAN, iteration=sent.header.shape[0], micro_batch=micro_batch, agent=0, wave=0,
        path=(0, 1), position=1, tensor=sent.header, tokens=1,
    )  # fmt: skip


def main() -> None:
    options = arguments(__doc__ or "")
    repeats = 3 if options.quick else 15
    rates = time_codecs(repeats)
    with tempfile.TemporaryDirectory() as folder:
        rates |= asyncio.run(time_transport(Path(folder), repeats))
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    for name, values in rates.items():
        claims[name], spread[name] = middle(values)
        print(f"{name:38} {claims[name]:9.2f}   ({spread[name][0]:.2f} to {spread[name][1]:.2f})")
    report("pipeline_transport", claims, spread, options.json)


if __name__ == "__main__":
    main()
