"""Members of a pipeline in one process: hosts, stages of a tiny model, and an exchange among replicas."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline_local import load_stage
from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, Objective, cross_entropy
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.contribution_tally import sum_in_order
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    Combined,
    ContributionBounds,
    ContributionFault,
    StageIteration,
)
from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote, ReplicaWeights, vote_of
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.stages.loading import WeightFolder
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum, StagePath
from swarmnode.extensions.pipeline.stages.packed_state import unpack_state
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.network.streams import StreamHost
from swarmnode.training.packing import MicroBatch
from tests.unit.extensions.pipeline.tiny_models import nudge

QUICK = MemberSettings(
    codec="none", max_norm=1e9, hop_timeout_s=2.0, reconnect_s=0.2, grace_s=3.0,
    close_timeout_s=4.0,
)  # fmt: skip
"""Nobody waits long for anybody."""

PATIENT = replace(QUICK, hop_timeout_s=20.0, grace_s=20.0, close_timeout_s=20.0)


def instance_of(stages: Sequence[Sequence[int]], *, path_length: int, **more: Any) -> Instance:
    """Near and fast nodes, so that deadlines are those of the settings."""
    count = sum(map(len, stages))
    values: dict[str, Any] = {
        "names": tuple(f"node {n}" for n in range(count)),
        "forward_s": (0.001,) * count,
        "hop_s": tuple(tuple(0.001 * (a != b) for b in range(count)) for a in range(count)),
        "memory": (2,) * count,
        "stages": tuple(map(tuple, stages)),
        "path_length": path_length,
        "waves": 2,
        "gap_s": 0.0,
        "first_gap_s": 0.0,
    }
    return Instance(**values | more)


class Together:
    """The exchange among replicas within this process: waits for all that live."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], dict[str, GradientSum]] = {}
        self._said: dict[tuple[int, int], dict[str, ReplicaWeights]] = {}
        self.gone: set[str] = set()
        self._changed = asyncio.Event()

    def lose(self, peer_id: str) -> None:
        self.gone.add(peer_id)
        self._changed.set()

    def at(self, peer_id: str) -> "OfOne":
        return OfOne(self, peer_id)

    async def gather(self, kept: dict[str, Any], replicas: Sequence[str]) -> dict[str, Any]:
        self._changed.set()
        while not kept.keys() >= set(replicas) - self.gone:
            self._changed.clear()
            await self._changed.wait()
        return kept


@dataclass(frozen=True)
class OfOne:
    all: Together
    own: str

    async def combine(
        self,
        own: GradientSum,
        stage_iteration: StageIteration,
        replicas: Sequence[str],
        bounds: ContributionBounds,
    ) -> Combined:
        kept = self.all._sums.setdefault((stage_iteration.stage, stage_iteration.iteration), {})
        kept[self.own] = own
        found = await self.all.gather(kept, replicas)
        absent = {peer: ContributionFault.SILENT for peer in set(replicas) - found.keys()}
        return Combined(sum_in_order([found[peer] for peer in sorted(found)]), tuple(sorted(found)), absent)

    async def compare(
        self, digest: str, stage_iteration: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        kept = self.all._said.setdefault((stage_iteration.stage, stage_iteration.iteration), {})
        kept[self.own] = ReplicaWeights(digest, before)
        found = await self.all.gather(kept, replicas)
        return vote_of(self.own, found)


class ListFeed:
    """Micro-batches by their number within an iteration, the same ones in each."""

    def __init__(self, batches: Sequence[MicroBatch], waves: int, weight: int | None = None) -> None:
        self._batches = batches
        self._waves = waves
        self._weight = weight
        self.taken: list[tuple[int, StagePath]] = []

    @property
    def objective(self) -> Objective:
        return cross_entropy(1)

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        number = agent * self._waves + wave
        self.taken.append((number, path))
        return LossInputs(self._batches[number % len(self._batches)], path, weight=self._weight)


@dataclass
class Node:
    host: StreamHost
    member: PipelineMember
    worker: StageWorker
    optimizer: torch.optim.Optimizer
    stack: AsyncExitStack

    async def close(self) -> None:
        await self.stack.aclose()


class Crew:
    """All members of a plan, by node."""

    def __init__(
        self, plan: Plan, nodes: list[Node], together: Together, network: MemoryNetwork | None
    ) -> None:
        self.plan = plan
        self.nodes = nodes
        self.together = together
        self.network = network
        self.lost: list[tuple[int, str, str]] = []
        self.offered: dict[str, dict[int, HeldState]] = {node.host.peer_id: {} for node in nodes}
        """By peer and steps, what a member says that it holds."""

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(node.host.peer_id for node in self.nodes)

    def assign(self, iteration: int = 0) -> None:
        for own, node in enumerate(self.nodes):
            if self.plan.instance.stage_of[own] >= 0:
                assignment = Assignment(self.plan, digest(self.plan), self.peers, own, iteration)
                start = node.worker.state(node.optimizer)
                offered = self.offered[node.host.peer_id]
                node.member.assign(
                    assignment,
                    node.worker,
                    node.optimizer,
                    start=start,
                    offer=lambda held, offered=offered: offered.update({held.holding.iteration: held}),
                )

    async def reload(self, peers: tuple[str, ...], steps: int) -> dict[str, torch.Tensor]:
        """What one of these members offers."""
        states = [self.offered[peer][steps] for peer in peers if steps in self.offered[peer]]
        if not states:
            raise CheckpointError("nobody gives it")
        return unpack_state(states[0].data)

    def kill(self, node: int) -> None:
        """Its host is gone from one moment to the next."""
        self.together.lose(self.peers[node])
        host = self.nodes[node].host
        assert isinstance(host, MemoryHost)
        host.go_down()

    def freeze(self, *nodes: int) -> None:
        """Nothing comes from there or arrives there, and nobody is told."""
        assert self.network is not None
        for node in nodes:
            self.together.lose(self.peers[node])
        self.network.partition([[self.nodes[node].host] for node in nodes])  # pyright: ignore


def stage_worker(
    folder: Path, ends: Sequence[int], stage: int, packs: bool, settings: StageSettings, **more: Any
) -> StageWorker:
    part = StagePart(ends[stage - 1] if stage else 0, ends[stage], has_ends=stage == 0)
    model = load_stage(folder, part, settings, packs=packs, weights=WeightFolder.open(folder))
    if settings.trainable == "lora":
        nudge(model.trainable())
    return StageWorker(model, **{"slots": 2, "max_tokens": 256, **more})


def key_of(node: int) -> NodeKey:
    """Of a node in memory."""
    return NodeKey(bytes([node + 1] * 32))


def sgd(worker: StageWorker) -> torch.optim.Optimizer:
    return torch.optim.SGD(worker.model.trainable().values(), lr=0.05)


@asynccontextmanager
async def crew(
    plan: Plan,
    make_worker: Callable[[int], StageWorker],
    *,
    settings: MemberSettings = PATIENT,
    network: MemoryNetwork | None = None,
    hosts: Sequence[StreamHost] = (),
    keys: Sequence[NodeKey] = (),
    of_member: Callable[[int, tuple[str, ...]], dict[str, Any]] = lambda node, peers: {},
) -> AsyncGenerator[Crew, None]:
    """Members that are connected and have their assignments. `make_worker`: by stage. `keys`: the hosts'."""
    together = Together()
    async with AsyncExitStack() as stack:
        if not hosts:
            network = network or MemoryNetwork(seed=1)
            keys = [key_of(number) for number in range(plan.instance.node_count)]
            hosts = [network.host(key.peer_id) for key in keys]
        stacks = [AsyncExitStack() for _ in hosts]
        for own, host in zip(stacks, hosts, strict=True):
            stack.push_async_callback(own.aclose)
            await own.enter_async_context(host)
        for number, host in enumerate(hosts):
            for other in hosts[number + 1 :]:
                await host.connect((await other.addresses())[0])
        peers = tuple(host.peer_id for host in hosts)
        nodes: list[Node] = []

        async def reload(*asked: Any) -> Any:
            return await found.reload(*asked)

        for number, (own, host) in enumerate(zip(stacks, hosts, strict=True)):
            gradient_exchange = together.at(host.peer_id)
            more = of_member(number, peers)
            kept = {
                "key": keys[number],
                "gradient_exchange": gradient_exchange,
                "settings": settings,
                "reload": reload,
            }
            member = PipelineMember(await own.enter_async_context(MemberStreams(host)), **{**kept, **more})
            await own.enter_async_context(member)
            worker = make_worker(max(plan.instance.stage_of[number], 0))
            nodes.append(Node(host, member, worker, sgd(worker), own))
        found = Crew(plan, nodes, together, network)
        for number, node in enumerate(nodes):
            node.member.on_lost = lambda peer, why, by=number: found.lost.append(
                (by, str(peers.index(peer)), why)
            )
        found.assign()
        yield found
