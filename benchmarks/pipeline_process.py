"""Nodes of an emulated pipeline, each a process with a daemon of its own, all timed by one clock.

pipeline_run.py -> [Processes] -> pipe -> [node_main: P2pdHost, PipelineMember, ReplicaExchange] -> Part

Links and machines are emulated in the member's streams and queue (pipeline_emulated.py); all else is what a
node runs: tensors over libp2p streams, real stages and gradients, real averaging, real optimizer steps. A
process can run several pipelines in turn, each with a model of its own; its assignment changes between
iterations.
Processes are forked from one that has loaded torch; time.monotonic is the same clock in all of them.
"""

import asyncio
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import common  # noqa: F401  # before torch is loaded, for one thread
import pipeline_text
import psutil
import torch
from pipeline_emulated import EmulatedLinks, EmulatedQueue, LinkSpeed, PacedStreams, shrunk
from pipeline_local import load_stage
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnode.extensions.pipeline.execution.member_records import IterationReport, MemberSettings
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.replica_exchange import ReplicaExchange
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.simulator import ScheduledWork, simulate
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.identity import key_file
from swarmnode.network.daemon.p2pd_host import P2pdHost

HOP_OVERHEAD_S = 0.35
"""Time of a hop in the published instances, whatever its size."""
LAYERS = 12
WIDTH = 64
TEXT = TextSettings(sequence_tokens=64, batch_sequences=4)
MICRO_BATCH_TOKENS = TEXT.sequence_tokens * TEXT.batch_sequences
LEARNING_RATE = 3e-3
MESSAGE_BYTES = MICRO_BATCH_TOKENS * WIDTH * 2 + 400
"""What a micro-batch is on its way: hidden states in fp16, and a head."""
SETTINGS = MemberSettings()
PRELOADED = (
    "swarmnode.extensions.pipeline.execution.pipeline_member",
    "swarmnode.network.daemon.p2pd_host",
    "transformers.models.llama.modeling_llama",
)
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What all processes are given."""

    plans: tuple[Plan, ...]
    """One for each pipeline, all on the same nodes and links."""
    model: Path
    """The folder that every pipeline starts from."""
    keys: Path
    """A folder for identities."""
    scale: float
    """Real seconds for an emulated one."""
    bandwidth: bool
    """Whether what exceeds a hop's fixed cost is bandwidth, which messages on one link share."""

    @property
    def instance(self) -> Instance:
        """Its links and machines are those of all plans."""
        return self.plans[0].instance


@dataclass(frozen=True, slots=True)
class Part:
    """One iteration at one node. Times by time.monotonic."""

    stepped_s: float
    """Its optimizer has stepped, or it has none here."""
    began_s: float = 0.0
    report: IterationReport | None = None
    """None: the node starts no micro-batches."""
    overruns: int = 0
    """Pieces of real work that took longer than they were to."""
    overrun_s: float = 0.0
    tasks: int = 0
    cpu_s: float = 0.0
    """Of the process and its daemon."""
    waited_s: float = 0.0
    """That their threads were ready and got no core, together."""


class Processes:
    """All nodes of the plans, and what they are told.

    with Processes(setup) as nodes:
        parts = nodes.iterate(run=0)
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        for node in range(self._setup.instance.node_count):
            ours, theirs = context.Pipe()
            process = context.Process(target=node_main, args=(self._setup, node, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._tell(self._hear())  # to everybody, where everybody is
        self._hear()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # a node without a parent ends
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def iterate(self, run: int) -> list[Part]:
        """One iteration of one of the pipelines, by node: all take their assignments, then all begin."""
        self._tell(run)
        self._hear()
        self._tell(run)
        return self._hear()

    def _tell(self, what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _hear(self) -> list[Any]:
        found: list[Any] = []
        for node, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_TIMEOUT_S):
                raise SystemExit(f"node {node} has not answered for {ANSWER_TIMEOUT_S:.0f} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"node {node} has ended") from None
        return found


def first_model() -> Any:
    """A LLaMA with random weights, which every pipeline starts from."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=pipeline_text.VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=WIDTH * 8 // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 16,
            num_key_value_heads=WIDTH // 16,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=pipeline_text.END_TOKEN_ID,
        )
    )


def node_main(setup: Setup, node: int, pipe: Connection) -> None:
    """The process of a node, until its parent closes the pipe."""
    asyncio.run(_serve(setup, node, pipe))


async def _serve(setup: Setup, node: int, pipe: Connection) -> None:
    key_path = setup.keys / f"{node}.key"
    key = key_file.load_or_create(key_path)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(P2pdHost(key_path))
        streams = await stack.enter_async_context(PacedStreams(host, EmulatedLinks({})))
        exchange = await stack.enter_async_context(ReplicaExchange(streams))
        pipe.send((host.peer_id, (await host.addresses())[0]))
        everybody: Sequence[tuple[str, str]] = await asyncio.to_thread(pipe.recv)
        for _, address in everybody[node + 1 :]:
            await host.connect(address)
        peers = tuple(peer for peer, _ in everybody)
        exchange.admit(peers)
        queue = EmulatedQueue(node)
        links = dict(zip(peers, links_of(setup, node), strict=True))
        del links[host.peer_id]
        streams.links = EmulatedLinks(links)
        member = PipelineMember(streams, key=key, gradient_exchange=exchange, settings=SETTINGS, queue=queue)
        await stack.enter_async_context(member)
        pipe.send(None)
        daemon = psutil.Process(host.daemon_pid)
        await _Node(setup, node, peers, member, queue, daemon).obey(pipe)


class _Node:
    def __init__(
        self,
        setup: Setup,
        node: int,
        peers: tuple[str, ...],
        member: PipelineMember,
        queue: EmulatedQueue,
        daemon: psutil.Process,
    ) -> None:
        self._setup = setup
        self._node = node
        self._peers = peers
        self._member = member
        self._queue = queue
        self._plans = tuple(shrunk(plan, setup.scale) for plan in setup.plans)
        self._daemon = daemon
        self._workers: dict[int, tuple[StageWorker, torch.optim.Optimizer]] = {}
        """By pipeline."""
        self._source = TextSource(
            pipeline_text.documents(400), pipeline_text.encode, pipeline_text.END_TOKEN_ID, TEXT
        )

    async def obey(self, pipe: Connection) -> None:
        """Take the assignment that is asked for, and run an iteration when it is asked for again."""
        iterations = [0] * len(self._setup.plans)
        while True:
            try:
                run = int(await asyncio.to_thread(pipe.recv))
                self._assign(run, iterations[run])
                pipe.send(None)
                await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await self._iterate(self._plans[run], iterations[run]))
            iterations[run] += 1

    def _assign(self, run: int, iteration: int) -> None:
        plan = self._plans[run]
        if plan.instance.stage_of[self._node] < 0:
            return
        if run not in self._workers:
            self._workers[run] = self._new_worker(plan)
        self._queue.begin(plan)
        self._member.assign(
            Assignment(plan, digest(plan), self._peers, self._node, iteration), *self._workers[run]
        )

    def _new_worker(self, plan: Plan) -> tuple[StageWorker, torch.optim.Optimizer]:
        stage, count = plan.instance.stage_of[self._node], len(plan.instance.stages)
        part = StagePart(LAYERS * stage // count, LAYERS * (stage + 1) // count, has_ends=stage == 0)
        model = load_stage(self._setup.model, part, StageSettings(trainable="full"))
        slots = plan.instance.memory[self._node]
        worker = StageWorker(model, slots=slots, max_tokens=MICRO_BATCH_TOKENS)
        return worker, torch.optim.AdamW(worker.model.trainable().values(), LEARNING_RATE)

    async def _iterate(self, plan: Plan, iteration: int) -> Part:
        before = self._counted()
        began_s = time.monotonic()
        report = None
        if any(path[0] == self._node for path in plan.paths):
            report = await self._member.train(TextFeed(self._source, self._peers[self._node], iteration))
        elif plan.instance.stage_of[self._node] >= 0:
            await self._member.wait_step(iteration + 1)
        stepped_s = time.monotonic()
        overruns, overrun_s, tasks, cpu_s, waited = (
            now - then for now, then in zip(self._counted(), before, strict=True)
        )
        return Part(stepped_s, began_s, report, int(overruns), overrun_s, int(tasks), cpu_s, waited)

    def _counted(self) -> tuple[float, ...]:
        daemon_s = sum(self._daemon.cpu_times()[:2])
        cpu_s = time.process_time() + daemon_s
        waited = waited_s(os.getpid()) + waited_s(self._daemon.pid)
        return self._queue.overruns, self._queue.overrun_s, self._queue.tasks, cpu_s, waited


def waited_s(pid: int) -> float:
    """How long a process's threads have been ready without a core, by Linux's scheduler statistics.

    Raises FileNotFoundError on other systems.
    """
    waited_ns = 0
    for task in (Path("/proc") / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError):  # A thread may end meanwhile.
            waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def links_of(setup: Setup, node: int) -> list[LinkSpeed]:
    """Returns by node the link on which a micro-batch alone arrives `hop_s` after it was sent, shrunk."""
    links = [link(hop_s, setup.bandwidth) for hop_s in setup.instance.hop_s[node]]
    return [LinkSpeed(each.latency_s * setup.scale, each.bytes_per_s / setup.scale) for each in links]


def link(hop_s: float, bandwidth: bool) -> LinkSpeed:
    """
    >>> link(1.35, True).latency_s
    0.35
    """
    transfer_s = hop_s - HOP_OVERHEAD_S
    if not bandwidth or transfer_s <= 0:
        return LinkSpeed(hop_s)
    return LinkSpeed(HOP_OVERHEAD_S, MESSAGE_BYTES / transfer_s)


def most_waits_s(plan: Plan) -> float:
    """What its messages wait for links that they share, of the agent that waits most; roughly, since the plan
    goes on as if nobody waited. An upper bound on what the simulator overlooks, where little waits."""
    steps: defaultdict[tuple[int, int], list[ScheduledWork]] = defaultdict(list)
    for task in simulate(plan).tasks:
        steps[task.agent, task.wave].append(task)
    sent = sorted(
        (before.end_s, before.node, after.node, before.agent)
        for tasks in steps.values()
        for before, after in pairwise(tasks)
        if before.node != after.node
    )
    free_s: dict[tuple[int, int], float] = {}
    waits_s = [0.0] * len(plan.paths)
    for ready_s, source, target, agent in sent:
        begins_s = max(ready_s, free_s.get((source, target), 0.0))
        waits_s[agent] += begins_s - ready_s
        hop_s = plan.instance.hop_s[source][target]
        free_s[source, target] = begins_s + max(hop_s - HOP_OVERHEAD_S, 0.0)
    return max(waits_s)
