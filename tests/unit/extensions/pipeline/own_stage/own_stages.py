"""Members with real stages of a tiny model and no node around them: what that does, a test does."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStage, OwnStageSettings
from swarmnode.extensions.pipeline.plans.partition import Partition, PlannedStage
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from tests.unit.extensions.pipeline.members import PATIENT, ListFeed, instance_of, key_of
from tests.unit.extensions.pipeline.tiny_models import ADAPTER, CPU, batches

SETTINGS = OwnStageSettings(
    stage=StageSettings(adapter=ADAPTER, device=CPU),
    learning_rate=1e-2,
    max_tokens=256,
    activations="kept",
    free_bytes=10**9,
    cache_bytes=2**20,
    checkpoint_every=100,
)


class One:
    """A member with its place. What the node around it does is done by the test."""

    def __init__(self, number: int, host: MemoryHost, home: "Home") -> None:
        self.host = host
        self.streams = MemberStreams(host)
        self.checkpoints = StageCheckpoints(home.folder / str(number), home.whole.fingerprint)
        self.own_stage = OwnStage(
            self.streams, key_of(number), home.whole, home.settings, self.checkpoints,
            living=lambda: [one.peer_id for one in home.living], execution=PATIENT,
        )  # fmt: skip
        self.member, self.decode = self.own_stage.member, self.own_stage.decode
        self.states = self.own_stage.states

    @property
    def peer_id(self) -> str:
        return self.host.peer_id

    def learnt(self) -> dict[str, Tensor]:
        """Weights and moments."""
        held = self.own_stage._held  # pyright: ignore[reportPrivateUsage]
        assert held is not None
        parameters = held.model.trainable()
        moments = {
            f"{key}/{name}": value.detach().clone()
            for name, parameter in parameters.items()
            for key, value in held.optimizer.state.get(parameter, {}).items()
        }
        return {name: p.detach().clone() for name, p in parameters.items()} | moments


class Home:
    def __init__(self, whole: WholeModel, folder: Path, settings: OwnStageSettings) -> None:
        self.whole = whole
        self.folder = folder
        self.settings = settings
        self.network = MemoryNetwork(seed=3)
        self.living: list[One] = []
        self._epoch = 0
        self._before: AgreedPlan | None = None

    def plan(self, stages: Sequence[Sequence[One]], ends: Sequence[int], iteration: int) -> AgreedPlan:
        """By stage its members; a path for each replica of the largest stage."""
        self._epoch += 1
        members = [one for stage in stages for one in stage]
        names = tuple(one.peer_id for one in members)
        nodes = [[members.index(one) for one in stage] for stage in stages]
        instance = replace(instance_of(nodes, path_length=len(nodes), memory=(4,) * len(names)), names=names)
        most = max(map(len, nodes))
        plan = Plan(instance, tuple(tuple(stage[n % len(stage)] for stage in nodes) for n in range(most)))
        parts = tuple(
            PlannedStage(first, end, 1000, 1000, tuple(sorted(one.peer_id for one in stage)))
            for stage, first, end in zip(stages, (0, *ends), ends, strict=False)
        )
        name = hashlib.sha256(f"{digest(plan)}{self._epoch}".encode()).hexdigest()
        before = self._before.as_former if self._before is not None else None
        spare = tuple(sorted(one.peer_id for one in self.living if one not in members))
        agreed = AgreedPlan(
            self._epoch, iteration, Partition(parts, len(parts)), spare, plan, name, 1.0, before
        )
        self._before = agreed
        return agreed

    async def assign(self, stages: Sequence[Sequence[One]], ends: Sequence[int], iteration: int = 0) -> None:
        """All take their places under a new plan."""
        agreed = self.plan(stages, ends, iteration)
        await asyncio.gather(*(one.own_stage.prepare(agreed) for one in self.living))
        await asyncio.gather(*(one.own_stage.take(agreed) for one in self.living))

    async def step(self, *data_nodes: One) -> dict[str, str]:
        """One iteration, and what each member does after it; the digests by peer id."""
        ready = [one for one in self.living if one.own_stage.part is not None]
        steps = ready[0].member.iteration + 1
        await asyncio.gather(*(one.member.train(ListFeed(batches(True), 2)) for one in data_nodes))
        digests: dict[str, str] = {}
        for one in ready:
            await one.member.wait_step(steps)
            await one.own_stage.stepped()
            held = one.own_stage._held  # pyright: ignore[reportPrivateUsage]
            assert held is not None and held.newest is not None
            digests[one.peer_id] = held.newest.holding.digest
        for one in ready:
            await one.own_stage.hand_on()
        return digests

    def kill(self, one: One) -> None:
        one.host.go_down()
        self.living.remove(one)


@asynccontextmanager
async def home(
    whole: WholeModel, folder: Path, count: int, settings: OwnStageSettings = SETTINGS
) -> AsyncGenerator[tuple[Home, list[One]], None]:
    found = Home(whole, folder, settings)
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(found.network.host(key_of(n).peer_id)) for n in range(count)]
        for one, other in combinations(hosts, 2):
            await one.connect((await other.addresses())[0])
        found.living = [One(number, host, found) for number, host in enumerate(hosts)]
        for one in found.living:
            await stack.enter_async_context(one.streams)
            await stack.enter_async_context(one.own_stage)
        yield found, list(found.living)


def equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def together(*members: One) -> dict[str, Tensor]:
    return {name: tensor for one in members for name, tensor in one.learnt().items()}
