"""Whole members of a pipeline in one process: their hosts, their stages of a tiny model, their folders."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.membership import link_probes, own_presence
from swarmnode.extensions.pipeline.membership.known_members import MembershipSettings
from swarmnode.extensions.pipeline.own_stage.own_stage import OwnStageSettings
from swarmnode.extensions.pipeline.plans.member_costs import MemberCosts, StageTiming
from swarmnode.extensions.pipeline.plans.planning import AgreedPlan
from swarmnode.extensions.pipeline.runtime.data_node import DataNode, RoleChanged
from swarmnode.extensions.pipeline.runtime.data_roles import DataRole, TextRole
from swarmnode.extensions.pipeline.runtime.member_parts import PipelineParts
from swarmnode.extensions.pipeline.runtime.pipeline_node import PipelineNode
from swarmnode.extensions.pipeline.runtime.pipeline_settings import plan_settings, wanted_tokens
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.extensions.pipeline.states.stage_checkpoints import StageCheckpoints
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.finding import discovery
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.node.showing.board import Watchers
from swarmnode.node.showing.node_status import NodeStatus, Summary
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from tests.unit.extensions.pipeline.tiny_models import ADAPTER, CPU, VOCABULARY

KEYS = sorted((NodeKey(bytes([number]) * 32) for number in range(1, 9)), key=lambda key: key.peer_id)
"""By peer id: the first of those that live convenes."""

SETTINGS = (
    "pipeline.name='big'",
    "training.micro_batch_tokens=16",
    "pipeline.slots=2",
    f"policy.lora_rank={ADAPTER.lora_rank}",
    f"policy.lora_alpha={ADAPTER.lora_alpha}",
    "policy.device='cpu'",
    "training.learning_rate=1e-2",
    "node.checkpoint_every=100",
)
SEED = 5
SLOW = StageTiming(1, 1e-4, 2e-4), StageTiming(2, 2e-4, 4e-4)
"""All members are as fast, and computing is slow beside sending: a cut of the model pays."""


class Letters:
    """A tokenizer for a model of forty tokens."""

    eos_token_id = 1

    def encode(self, text: str, **_: object) -> list[int]:
        return [2 + ord(letter) % (VOCABULARY - 2) for letter in text]


def text_role(node: DataNode) -> TextRole:
    return TextRole(node, Letters(), SEED)


class Gate:
    """How far data nodes may train, so that a test can look at a pipeline at rest."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.tokens: Counter[int] = Counter()
        """By iteration: trained on by all data nodes."""

    def role(self, node: DataNode) -> DataRole:
        return _Gated(node, self)


class _Gated:
    """Text as TextRole trains on it, up to the gate."""

    status: NodeStatus | None = None
    summary: Summary | None = None

    def __init__(self, node: DataNode, gate: Gate) -> None:
        self._node = node
        self._gate = gate
        self._stopped = False
        self._source = text_of(node.parts.config)

    async def run(self) -> str:
        node = self._node
        while not (self._stopped or node.done):
            agreed = node.own_stage.agreed
            if agreed is None or agreed.stage_of(node.peer_id) != 0:
                raise RoleChanged("other members start the micro-batches now")
            if node.iteration >= self._gate.iterations:
                await asyncio.sleep(0.02)
                continue
            report = await node.drive(
                lambda iteration_plan: TextFeed(self._source, node.peer_id, iteration_plan.iteration)
            )
            if report is not None:
                self._gate.tokens[report.iteration] += report.tokens
        return "the gate was left"

    def stop(self) -> None:
        self._stopped = True
        self._node.stop()

    def replanned(self, agreed: AgreedPlan) -> None:
        pass


def text_of(config: Config) -> TextSource:
    """What TextRole makes of the settings of these tests."""
    settings = TextSettings(sequence_tokens=16, batch_sequences=1, seed=SEED)
    return TextSource.read(Path(config.pipeline.text), Letters(), settings, device=CPU, packed=True)


def quick_membership(config: Config) -> MembershipSettings:
    """Nobody waits long for anybody."""
    return MembershipSettings(
        "home",
        config.pipeline.name,
        at_least=config.pipeline.wait_for_members,
        ping_s=0.3,
        silence_s=3.0,
        answer_s=2.0,
        confirm_s=0.5,
        settle_s=0.3,
        links_s=5.0,
        poll_s=0.05,
        catch_up_s=2.0,
        retry_s=0.5,
        barred_s=0.5,
        iteration_s=20.0,
        assignment_s=20.0,
    )


class Member:
    """One member that was started, and how it ended."""

    def __init__(self, node: PipelineNode, host: MemoryHost) -> None:
        self.node = node
        self.host = host
        self.up = asyncio.Event()
        self.summary: Summary | None = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        try:
            async with self.node as node:
                self.up.set()
                self.summary = await node.run()
        except Exception as error:
            self.error = error
            raise

    @property
    def peer_id(self) -> str:
        return self.node.peer_id

    @property
    def iteration(self) -> int:
        return self.node.member.iteration if self.up.is_set() else 0

    @property
    def layers(self) -> tuple[int, int] | None:
        """First and end, of the stage that is held."""
        part = self.node.own_stage.part if self.up.is_set() else None
        return (part.first_layer, part.end_layer) if part is not None else None

    @property
    def stage(self) -> int | None:
        """Of the stage that is held: the node's status tells it a tick later."""
        agreed = self.node.own_stage.agreed if self.layers is not None else None
        return agreed.stage_of(self.peer_id) if agreed is not None else None

    def weights(self) -> dict[str, Tensor]:
        """What its stage has learnt."""
        model = self.node.own_stage.model
        assert model is not None
        return {name: p.detach().clone() for name, p in model.trainable().items()}

    async def ended(self, within_s: float = 30.0) -> Summary:
        await until(lambda: self.summary is not None or self.error is not None, within_s)
        assert self.task is not None
        await asyncio.wait({self.task})
        assert self.error is None, self.error
        assert self.summary is not None
        return self.summary


class Home:
    """Members on one network, each with a folder of its own that outlives it."""

    def __init__(self, whole: WholeModel, folder: Path, text: Path, *settings: str) -> None:
        self.whole = whole
        self.folder = folder
        self.settings = (*SETTINGS, f"pipeline.text='{text}'", *settings)
        self.network = MemoryNetwork(seed=1)
        self.members: list[Member] = []

    def parts(self, key: NodeKey, *more: str, free_bytes: int) -> PipelineParts:
        config = load_config(environ={}, assignments=[*self.settings, *more]).config
        host = self.network.host(key.peer_id)
        seeds = [member.host.address for member in self.members]
        return PipelineParts(
            config=config,
            key=key,
            whole=self.whole,
            host=host,
            discovery=Discovery(host, PeerBook(), seeds, "home"),
            plan=replace(plan_settings(config, self.whole), waves=2),
            membership=quick_membership(config),
            own_stage=OwnStageSettings(
                stage=StageSettings(trainable=config.pipeline.trainable, adapter=config.policy, device=CPU),
                learning_rate=config.training.learning_rate,
                max_tokens=256,
                activations="kept",
                free_bytes=free_bytes,
                cache_bytes=2**20,
                checkpoint_every=config.node.checkpoint_every,
            ),
            member=MemberSettings(
                codec="none", max_norm=1e9, hop_timeout_s=3.0, reconnect_s=0.2,
                grace_s=3.0, close_timeout_s=5.0,
            ),
            costs=lambda: self.costs(key, config, free_bytes),
            checkpoints=self.checkpoints(key),
            earlier=tuple(islice(self.checkpoints(key).states(), 1)),
        )  # fmt: skip

    def costs(self, key: NodeKey, config: Config, free_bytes: int) -> MemberCosts:
        return MemberCosts(
            peer_id=key.peer_id,
            free_bytes=free_bytes,
            memory_slots=config.pipeline.slots,
            holds_data=config.pipeline.data,
            timings=SLOW,
            measured_at_s=time.time(),
        )

    def bytes_of(self, layers: int) -> int:
        """What so many layers with the ends take, micro-batches in flight included."""
        config = load_config(environ={}, assignments=self.settings).config
        model = plan_settings(config, self.whole).model
        costs = (*[model.layer] * layers, model.ends)
        slots = config.pipeline.slots * wanted_tokens(config)
        return sum(cost.held_bytes + slots * cost.activation_bytes for cost in costs)

    def checkpoints(self, key: NodeKey) -> StageCheckpoints:
        return StageCheckpoints(self.folder / key.peer_id, self.whole.fingerprint)

    def start(
        self,
        *keys: NodeKey,
        settings: Sequence[str] = (),
        role: Callable[[DataNode], DataRole] = text_role,
        free_bytes: int = 10**9,
    ) -> list[Member]:
        started: list[Member] = []
        for key in keys:
            parts = self.parts(key, *settings, free_bytes=free_bytes)
            assert isinstance(parts.host, MemoryHost)
            member = Member(PipelineNode(parts, Watchers([]), role), parts.host)
            member.task = asyncio.ensure_future(member.serve())
            self.members.append(member)
            started.append(member)
        return started

    async def leave(self, member: Member) -> Summary:
        """It is asked to stop, and goes in order."""
        member.node.request_stop()
        summary = await member.ended()
        self.members.remove(member)
        return summary

    async def kill(self, member: Member) -> None:
        """Its host is gone from one moment to the next, and its process with it."""
        member.host.go_down()
        self.members.remove(member)
        assert member.task is not None
        member.task.cancel()
        await asyncio.wait({member.task})

    async def close(self) -> None:
        tasks = [member.task for member in self.members if member.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.members.clear()


@asynccontextmanager
async def home(whole: WholeModel, folder: Path, *settings: str) -> AsyncGenerator[Home, None]:
    """`folder`: for the members' checkpoints and their text. They look around, announce themselves and
    measure their links more often than in a swarm of strangers."""
    text = folder / "text.txt"
    text.parent.mkdir(exist_ok=True, parents=True)
    text.write_text("the quick brown fox jumps over the lazy dog and " * 40)
    found = Home(whole, folder, text, *settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "WATCH_INTERVAL_S", 0.1)
        patch.setattr(own_presence, "LEAST_BETWEEN_S", 0.1)
        patch.setattr(link_probes, "TICK_S", 0.1)
        try:
            yield found
        finally:
            await found.close()


async def until(holds: Callable[[], bool], within_s: float = 90.0) -> None:
    """Wait for something that happens by itself."""
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, "it did not come to that"
        await asyncio.sleep(0.02)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol)
