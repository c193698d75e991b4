"""Idle-time rollouts: the share of idle time that becomes rollout tokens, and what it costs the pipeline.

plan -> 6 members (one process, emulated links and machines) -> iterations without and with rollouts, in turn

Each stage has one member, and a micro-batch visits four of six stages, so members wait for each other as the
plan says. With rollouts, each member samples from a tiny policy of its own wherever its stage waits. Tokens
are real: our engine computes them. Time is emulated, for both alike: a task of the stage lasts as long as it
would on its machine, and so does a step of the engine (`STEP_BASE_S` + `STEP_ROW_S` a row); on the real
machine both take a small part of it, so that the members share two cores and hardly meet.

Idle is a member's time, from the iteration's start to its step, in which its stage does not compute. The
slowdown is of the whole iteration; the delay of a member is what its rollouts may at most have kept its stage
waiting, as a share of the stage's work, which is what is bounded at 2 %.

python benchmarks/pipeline_idle.py [--quick] [--json FILE]
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

import pipeline_text
import torch
from common import arguments, middle, ratios, report
from pipeline_emulated import EmulatedCompute, EmulatedLinks, links_of
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from swarmnode.extensions.pipeline.execution.member_records import Assignment, MemberSettings
from swarmnode.extensions.pipeline.execution.pipeline_member import PipelineMember
from swarmnode.extensions.pipeline.execution.stage_queue import WorkTimes
from swarmnode.extensions.pipeline.feeds.text_feed import TextFeed, TextSettings, TextSource
from swarmnode.extensions.pipeline.idle.idle_budget import IdleSettings
from swarmnode.extensions.pipeline.idle.idle_rollouts import IdleRollouts, IdleStats
from swarmnode.extensions.pipeline.replication.gradient_exchange import SoloExchange
from swarmnode.extensions.pipeline.scheduling.instance import Instance
from swarmnode.extensions.pipeline.scheduling.plan import Plan, digest
from swarmnode.extensions.pipeline.scheduling.schedule import SearchBudget, schedule
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from swarmnode.extensions.pipeline.stages.loading import load_stage
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.engine import Output, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.types import Example, ExampleKey

NODES = 6
PATH_LENGTH = 4
AGENTS = 4
FORWARD_S = (0.30, 0.40)
"""Of a micro-batch through a stage, by node between these."""
HOP_S = (0.05, 0.35)
STEP_BASE_S, STEP_ROW_S = 0.008, 0.0004
"""A step of the emulated engine."""
SETTINGS = IdleSettings(step_s=0.012, most_rows=16)
REHEARSED = 80
MAX_TOKENS = 32
PATIENT = MemberSettings(activations="none", gradients="none", hop_timeout_s=20.0, grace_s=20.0)


def instance() -> Instance:
    chance = Random(0)
    hop_s = [[0.0] * NODES for _ in range(NODES)]
    for a in range(NODES):
        for b in range(a):
            hop_s[a][b] = hop_s[b][a] = chance.uniform(*HOP_S)
    return Instance(
        names=tuple(f"node {number}" for number in range(NODES)),
        forward_s=tuple(chance.uniform(*FORWARD_S) for _ in range(NODES)),
        hop_s=tuple(map(tuple, hop_s)),
        memory=(AGENTS,) * NODES,
        stages=tuple((number,) for number in range(NODES)),
        path_length=PATH_LENGTH,
        waves=2,
        gap_s=0.0,
        first_gap_s=0.0,
    )


def small_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=pipeline_text.VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


class Characters:
    """A renderer of one token per character."""

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        return tuple(pipeline_text.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class PacedEngine(EmbeddedEngine):
    """Its steps last as long as on the emulated machine."""

    def step(self) -> Sequence[Output]:
        stats = self.stats()
        until_s = time.monotonic() + STEP_BASE_S + STEP_ROW_S * (stats.running + stats.waiting)
        outputs = super().step()
        time.sleep(max(0.0, until_s - time.monotonic()))
        return outputs


def questions(node: int) -> Iterator[Example]:
    for index in count():
        text = pipeline_text.LINES[index % len(pipeline_text.LINES)](Random(index))
        yield Example(ExampleKey("lines", "1", node, index), text[:12])


class Switch:
    """The rollouts of a member, where they are wanted."""

    def __init__(self, model: Any, node: int) -> None:
        self._on = False
        self._worked_s = 0.0  # while it was on, up to the last change
        self._since_s = 0.0
        self.times = WorkTimes()
        engine = PacedEngine(model, (), 64, 128)
        rollouts = PartialRollouts(
            engine,
            cast(Renderer, Characters()),
            PartialSettings("refill", groups=4, group_size=4, max_lag=4),
            SamplingParams(MAX_TOKENS),
            seed=node,
        )
        self.idle = IdleRollouts(
            engine, rollouts, questions(node), lambda answered: None, SETTINGS, self.worked_s
        )
        self.idle.rehearse(REHEARSED)

    def turn(self, on: bool) -> None:
        self._worked_s, self._since_s, self._on = self.worked_s(), self.times.busy_s, on

    def worked_s(self) -> float:
        """Stage work that rollouts may have delayed."""
        return self._worked_s + (self.times.busy_s - self._since_s if self._on else 0.0)

    def run(self, until_s: float, wanted: Any) -> None:
        if self._on:
            self.idle.run(until_s, wanted)


@dataclass
class Iteration:
    """What one took, and what was done beside it."""

    seconds: float
    idle_s: float
    """Of all members together."""
    used_s: float = 0.0
    tokens: int = 0
    overrun_s: list[float] = field(default_factory=list[float])
    """By member: its stage waited for its rollouts no longer than that."""
    busy_s: list[float] = field(default_factory=list[float])
    """By member: work of its stage."""


class Pipeline:
    """All members of a plan in this process."""

    def __init__(self, plan: Plan, members: list[PipelineMember], peer: str, switches: list[Switch]) -> None:
        self.plan = plan
        self.members = members
        self._peer = peer
        self._switches = switches
        texts = TextSource(
            pipeline_text.documents(200),
            pipeline_text.encode,
            pipeline_text.END_TOKEN_ID,
            TextSettings(16, 2, 0.0),
        )
        self._texts = texts

    async def iterate(self, *, rollouts: bool) -> Iteration:
        before = [(member.times.busy_s, switch.idle.stats()) for member, switch in self._pairs]
        for switch in self._switches:
            switch.turn(rollouts)
        began_s = time.monotonic()
        iteration = self.members[0].iteration
        await self.members[0].train(TextFeed(self._texts, self._peer, iteration))
        await asyncio.gather(*(member.wait_step(iteration + 1) for member in self.members[1:]))
        seconds = time.monotonic() - began_s
        for switch in self._switches:
            switch.turn(False)
        found = Iteration(seconds, 0.0)
        for (member, switch), (busy_before_s, stats) in zip(self._pairs, before, strict=True):
            busy_s = member.times.busy_s - busy_before_s
            found.idle_s += seconds - busy_s
            _add(found, stats, switch.idle.stats(), busy_s)
        return found

    @property
    def _pairs(self) -> list[tuple[PipelineMember, Switch]]:
        return list(zip(self.members, self._switches, strict=True))


def _add(found: Iteration, before: IdleStats, after: IdleStats, busy_s: float) -> None:
    assert after.failure is None, after.failure
    found.used_s += after.used_s - before.used_s
    found.tokens += after.tokens - before.tokens
    found.overrun_s.append(after.overrun_s - before.overrun_s)
    found.busy_s.append(busy_s)


@asynccontextmanager
async def pipeline(
    plan: Plan, folder: Path, switches: list[Switch], *, seed: int
) -> AsyncGenerator[Pipeline]:
    network = MemoryNetwork(seed=seed)
    async with AsyncExitStack() as stack:
        keys = [NodeKey(bytes([node + 1] * 32)) for node in range(NODES)]
        hosts = [await stack.enter_async_context(network.host(key.peer_id)) for key in keys]
        for number, host in enumerate(hosts):
            for other in hosts[number + 1 :]:
                await host.connect((await other.addresses())[0])
        peers = tuple(host.peer_id for host in hosts)
        members: list[PipelineMember] = []
        for own, host in enumerate(hosts):
            links = dict(zip(peers, links_of(plan.instance, own), strict=True))
            del links[host.peer_id]
            member = PipelineMember(
                await stack.enter_async_context(MemberStreams(host)),
                key=keys[own],
                averager=SoloExchange(),
                settings=PATIENT,
                compute=EmulatedCompute(plan.instance, own),
                pace=EmulatedLinks(links, seed=seed),
                idle=switches[own],
            )
            members.append(await stack.enter_async_context(member))
            switches[own].times = member.times
        for own, member in enumerate(members):
            model = load_stage(folder, StagePart(own, own + 1, has_ends=own == 0), StageSettings())
            worker = StageWorker(model, slots=AGENTS, max_tokens=256)
            optimizer = torch.optim.AdamW(worker.model.trainable().values())
            member.assign(Assignment(plan, digest(plan), peers, own, 0), worker, optimizer)
        yield Pipeline(plan, members, peers[0], switches)


async def measure(
    folder: Path, pairs: int
) -> tuple[float, list[Iteration], list[Iteration], list[IdleStats]]:
    disable_progress_bar()
    small_model(NODES).save_pretrained(folder)
    own = small_model(2)
    plan = schedule(instance(), seed=0, budget=SearchBudget(steps=2000)).plan
    switches = [Switch(own, node) for node in range(NODES)]
    without: list[Iteration] = []
    having: list[Iteration] = []
    async with pipeline(plan, folder, switches, seed=1) as members:
        # What has not worked may not be delayed; and the first of anything is slow.
        for rollouts in (False, True):
            await members.iterate(rollouts=rollouts)
        for pair in range(pairs):
            # Whichever comes first may find the machine in another state.
            for rollouts in (pair % 2 == 0, pair % 2 == 1):
                (having if rollouts else without).append(await members.iterate(rollouts=rollouts))
            print(
                f"pair {pair}: {without[-1].seconds:.3f} s without, {having[-1].seconds:.3f} s with rollouts"
            )
    return simulate(plan).makespan_s, without, having, [switch.idle.stats() for switch in switches]


def delay_shares(having: list[Iteration]) -> list[float]:
    """By member, over all iterations with rollouts."""
    delays, works = ([one.overrun_s for one in having], [one.busy_s for one in having])
    return [sum(d) / sum(w) for d, w in zip(zip(*delays, strict=True), zip(*works, strict=True), strict=True)]


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        planned_s, without, having, stats = asyncio.run(measure(Path(folder), 2 if options.quick else 8))
    slowdowns = [r - 1 for r in ratios([one.seconds for one in having], [one.seconds for one in without])]
    found = {
        "idle_share_used": [one.used_s / one.idle_s for one in having],
        "slowdown": slowdowns,
        "tokens": [float(one.tokens) for one in having],
        "delay_share": delay_shares(having),
        "tokens_per_idle_s": [one.tokens / one.idle_s for one in having],
        "idle_share": [one.idle_s / (NODES * one.seconds) for one in having],
        "iteration_s": [one.seconds for one in without],
    }
    claims = {name: middle(values)[0] for name, values in found.items()}
    spread = {name: middle(values)[1] for name, values in found.items()}
    for name in found:
        print(f"{name:20} {claims[name]:9.4f}   ({spread[name][0]:.4f} to {spread[name][1]:.4f})")
    overruns, pieces = sum(one.overruns for one in stats), sum(one.pieces for one in stats)
    print(f"planned {planned_s:.3f} s; {overruns} of {pieces} steps ended after stage work had come")
    report(
        "pipeline_idle",
        {name: claims[name] for name in ("idle_share_used", "slowdown", "tokens", "delay_share")},
        {name: spread[name] for name in ("idle_share_used", "slowdown", "tokens", "delay_share")},
        options.json,
        {
            "planned_s": planned_s,
            "iteration_s": claims["iteration_s"],
            "idle_share": claims["idle_share"],
            "tokens_per_idle_s": claims["tokens_per_idle_s"],
            "rows": [one.rows for one in stats],
            "paused": [one.paused for one in stats],
            "too_short": [one.too_short for one in stats],
            "overruns": overruns,
            "pieces": pieces,
        },
    )


if __name__ == "__main__":
    main()
