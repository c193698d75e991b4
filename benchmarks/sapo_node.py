"""One node of a simulated swarm: the real learner and the real exchange, moved on by hand, a round at a time.

config, model folder -> [SwarmNode] -> [round_together]: generate, publish, collect, train -> NodeRecord

Everything is the product's (PolicyLearner, Exchange, MemoryNetwork) but the clock: a round takes ROUND_S on
it, whatever it takes here, and the swarm's nodes are in lock-step. So what is compared are rounds and tokens,
and neither the machine's load nor who is faster changes who hears whom.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.network.memory_network import MemoryHost, MemoryNetwork
from swarmnode.node.building.assemble import exchange_settings
from swarmnode.node.building.local_policy import LocalPolicy, checkpoint_store, load_policy
from swarmnode.node.building.machine_memory import longest_sequence
from swarmnode.node.catching_up import CatchingUp, library_round
from swarmnode.node.learner import Overlap
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.settings.config import Config
from swarmnode.tasks.task import Task
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.lessons import GroupLesson, Lessons
from swarmnode.training.rules.rules import Sapo, groups_wanted, own_to_learn_from
from swarmnode.training.rules.task_marks import needs_of
from swarmnode.types import RolloutGroup

ROUND_S = 8.0
"""What a round takes on the clock of the swarm: an age of half an hour is 225 rounds."""

PATIENCE_S = 0.02
"""What `collect` waits for a first announcement. In lock-step whatever is to come has been announced."""

DEADLINE_S = 20.0
"""Of a collection, and of what it fetches: generous, since waiting takes no round longer here."""

LOOK_S = 0.001
MOST_LOOKS = 20_000
"""Looks, so far apart, for what is on its way, at most."""

ALONE = Overlap(on=False, sleep=False, reason="off: nodes take turns")


class Clock:
    """Seconds of the simulated swarm."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class NodeRecord:
    """What one node did, round by round of its own."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of the answers that it sampled."""
    answers: list[int] = field(default_factory=list)
    """How many those were."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Reward on held-out examples after so many rounds."""
    injected: list[float] = field(default_factory=list)
    """Share of sampled answers with the text that attackers inject."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    received_tokens: int = 0
    """Tokens of the groups of others that it took."""
    received_groups: int = 0
    sent_bytes: int = 0


class OwnGains(Sapo):
    """A control: of its own answers, too, a node learns from those only that are better than their group."""

    def lessons(
        self,
        own: Sequence[RolloutGroup],
        external: Sequence[RolloutGroup],
        *,
        version: int,
    ) -> Lessons:
        return Lessons(tuple(GroupLesson(group, gains_only=True) for group in own), self._external(external))


class SwarmNode:
    """`async with SwarmNode(...) as node`, then per round generate, publish, collect and train."""

    def __init__(
        self,
        config: Config,
        model: Path,
        tasks: dict[str, Task],
        *,
        name: str,
        seed: int,
        network: MemoryNetwork | None,
        clock: Clock,
        drops_own_failures: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        """`network` None: it trains alone. `shelf`: it takes part in the library, and catches up by it."""
        self.config = config
        self.record = NodeRecord()
        self._seed = seed
        self._tasks = tasks
        self._clock = clock
        self.key = node_key(name)
        self._folder = TemporaryDirectory(prefix="sapo-node-")
        paths = _paths(Path(self._folder.name))
        self.local = load_policy(config, str(model), paths, _silent, seed=seed)
        self.learner = PolicyLearner(
            config,
            self.local.policy,
            self.local.engine,
            self.local.renderer,
            tasks,
            checkpoint_store(config, str(model), paths, self.local.base),
            author=self.key.peer_id,
            seed=seed,
            overlap=ALONE,
        )
        if drops_own_failures:
            self.learner._trainer.rule = OwnGains()
        self.host: MemoryHost | None = None if network is None else network.host(self.key.peer_id)
        self.exchange: Exchange | None = None
        if self.host is not None:
            self.exchange = _exchange(config, self.host, self.key, tasks, self.local, clock, name, shelf)
        self._stack = AsyncExitStack()
        self._number = 0
        self.catching_up = CatchingUp()

    async def __aenter__(self) -> "SwarmNode":
        async with AsyncExitStack() as stack:
            stack.callback(self._folder.cleanup)
            stack.callback(self.learner.close)
            if self.host is not None and self.exchange is not None:
                await stack.enter_async_context(self.host)
                await stack.enter_async_context(self.exchange)
                if self.exchange.library is not None:
                    self.exchange.library.note_book(())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def rounds(self) -> int:
        """Rounds it has begun."""
        return self._number

    def generate(self) -> tuple[RolloutGroup, ...]:
        """Answer and judge the examples of its next round."""
        self._number += 1
        self.learner.use_newest_policy()
        found = self.learner.rollouts(self._number)
        rewards = [r for group in found.groups for r in group.rewards if r is not None]
        self.record.rewards.append(sum(rewards) / len(rewards))
        self.record.answers.append(len(rewards))
        self.record.generated_tokens += found.tokens
        return found.groups

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """Announce them to the others."""
        if self.exchange is not None:
            await self.exchange.publish(groups)

    async def collect(self) -> Sequence[RolloutGroup]:
        """What it takes of the others this round."""
        wanted = groups_wanted(self.config)
        if self.exchange is None or wanted == 0:
            return ()
        limit = self.catching_up.groups_to_borrow(self.config)
        borrowed = self.exchange.library.draw(limit) if self.exchange.library else ()
        found = await self.exchange.collect(wanted, self.learner.policy_version, DEADLINE_S)
        self.record.received_groups += len(found)
        self.record.received_tokens += sum(len(c.token_ids) for g in found for c in g.completions)
        self.record.sent_bytes = self.exchange.stats().bytes_out
        return (*found, *borrowed)

    async def arrived(self) -> None:
        """Let what is fetched ahead be judged. All nodes share a thread: the judge's time for strangers
        would count what the others train meanwhile, and be used up by it."""
        for _ in range(MOST_LOOKS):
            if self.exchange is None or not self.exchange.stats().fetching:
                return
            await asyncio.sleep(LOOK_S)

    def train(self, groups: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        """One round of learning, from own groups and those of others."""
        chance = random.Random(f"{self._seed}:{self._number}:own")
        own = own_to_learn_from(groups, len(external), self.config, chance)
        report = self.learner.train(own, external)
        self.record.trained_tokens += report.tokens
        if self.exchange is not None and report.pass_rates:
            self.exchange.prefer(needs_of(report.pass_rates))
        if self.exchange is not None:
            self.exchange.doubt(report.doubted)
        if self.exchange is not None and self.exchange.library is not None:
            self._catch_up(groups, report, self.exchange.library)

    def _catch_up(self, groups: Sequence[RolloutGroup], report: TrainReport, library: Borrower) -> None:
        """What SwarmMember does after a round."""
        origins = self.learner.origins()
        library.note_book(origins.keys())
        seen = library_round(groups, library.count_drawn(origins), report, self.config)
        self.catching_up = self.catching_up.after_round(seen)
        self.learner.catch_up(self.catching_up.mix(self.config))

    def evaluate(self) -> None:
        """Measure it on held-out examples."""
        found = self.learner.evaluate()
        assert found is not None and found.mean is not None
        self.record.held_out[self._number] = found.mean


def node_key(name: str) -> NodeKey:
    """The key of a node of this name, the same in every run."""
    return NodeKey(hashlib.sha256(name.encode()).digest())


async def round_together(nodes: Sequence[SwarmNode]) -> list[tuple[RolloutGroup, ...]]:
    """A round of each, in lock-step: what is announced in it can be taken in it, by everybody alike. Returns
    their own groups."""
    groups = [node.generate() for node in nodes]
    for node, own in zip(nodes, groups, strict=True):
        await node.publish(own)
    await settled()
    external = await asyncio.gather(*(node.collect() for node in nodes))
    await settled()
    await asyncio.gather(*(node.arrived() for node in nodes))
    for node, own, others in zip(nodes, groups, external, strict=True):
        node.train(own, others)
    return groups


async def settled() -> None:
    """Let what was announced arrive everywhere."""
    for _ in range(8):
        await asyncio.sleep(0)


def _exchange(
    config: Config,
    host: MemoryHost,
    key: NodeKey,
    tasks: dict[str, Task],
    local: LocalPolicy,
    clock: Clock,
    name: str,
    shelf: Shelf | None,
) -> Exchange:
    longest = longest_sequence(config, local.base.name, local.base.max_positions) - config.rollout.max_tokens
    settings = exchange_settings(config, longest)
    return Exchange(
        host,
        key,
        tasks=tasks,
        encode=local.renderer.encode_completion,
        prompt_ids=local.renderer.prompt_ids,
        settings=replace(settings, patience_s=PATIENCE_S, fetch_timeout_s=DEADLINE_S),
        model_family=local.base.family,
        model_size=local.base.parameters,
        clock=clock,
        rng=random.Random(name),
        shelf=shelf,
    )


def _paths(folder: Path) -> Paths:
    """Its own folders, but the compiled kernels of everybody."""
    return replace(resolve_paths(folder), cache=resolve_paths().cache)


def _silent(done: int, total: int, what: str) -> None:
    pass
