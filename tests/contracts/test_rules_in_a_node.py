"""Each rule in a whole node: real policies that answer, exchange, learn, save and go on."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.identity.node_key import NodeKey
from swarmnode.model.base_model import load_base_model
from swarmnode.model.policy import Policy
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.node.learner import Overlap
from swarmnode.node.node import NodeLoop
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.node.showing.board import StatusBoard, Watchers
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.registry import SEAMS
from swarmnode.rollout.decode.embedded import EmbeddedEngine
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import TrainReport
from swarmnode.training.rules.book_rule import BookRule
from swarmnode.training.rules.lessons import Rule
from swarmnode.types import Example, ExampleKey, RolloutGroup, Scores
from tests.own_rules import OWN_RULE

SETTINGS = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "rollout.mode='sync'",
    "exchange.local_groups=2",
    "exchange.external_groups=2",
    "training.learning_rate=1e-2",
    "tasks.eval_examples=1",
    "node.checkpoint_every=1",
)
ROUNDS = 3
RULES_OF_EXAMPLES = ("examples.rules.rescue:Rescue", "examples.rules.hacpo:Hacpo")
FAST = [NodeKey(bytes([number]) * 32) for number in (1, 2)]


class Odd:
    """An answer is right when its length is odd, which is luck."""

    name = "odd"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(1000):
            yield Example(ExampleKey(self.name, self.version, seed, index), f"say {seed % 1000} {index}=")

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        return [{"odd": float(len(text) % 2)} for text in completions]


class Learns(PolicyLearner):
    """Remembers what it was given."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.external = 0

    def train(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> TrainReport:
        self.external += len(external)
        return super().train(own, external)


Make = Callable[[NodeKey, Config], Learns]


@pytest.fixture
def make(quick_model: Path, tmp_path: Path) -> Make:
    def build(key: NodeKey, config: Config) -> Learns:
        base = load_base_model(str(quick_model), config.policy)
        return Learns(
            config,
            Policy(base, config.policy, seed=0),
            EmbeddedEngine(base.model, base.eos_token_ids, max_slots=16, max_length=96),
            Renderer(base.tokenizer, base.eos_token_ids),
            {"odd": Odd()},
            CheckpointStore(tmp_path / key.peer_id / "quick"),
            author=key.peer_id,
            seed=key.seed[0],
            overlap=Overlap(on=False, sleep=False, reason="as set"),
        )

    return build


@pytest.fixture(autouse=True)
def everybody_may_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here luck is judged: what others found pulls nowhere in particular."""
    monkeypatch.setattr(Rule, "measures_teachers", False)


def configured(name: str, rounds: int, *more: str) -> Config:
    settings = [*SETTINGS, *more, f"exchange.rule={name}", f"node.rounds={rounds}"]
    return load_config(environ={}, assignments=settings).config


def member(
    network: MemoryNetwork, key: NodeKey, learner: Learns, config: Config, *, room: int = 12
) -> tuple[NodeLoop, NetworkParts]:
    host = network.host(key.peer_id)
    renderer = learner._renderer
    exchange = Exchange(
        host,
        key,
        {"odd": Odd()},
        encode=renderer.encode_completion,
        prompt_ids=renderer.prompt_ids,
        settings=ExchangeSettings(max_tokens=room, patience_s=2.0),
        model_family="tiny",
        model_size=1,
    )
    network_parts = NetworkParts(host, exchange, Discovery(host, PeerBook(), (), "/swarmnode/1/commons"))
    node = NodeLoop(
        config,
        learner,
        StatusBoard(config, peer_id=key.peer_id, name=key.name, model="quick"),
        Watchers([]),
        seed=key.seed[0],
        network=network_parts,
    )
    return node, network_parts


async def run_two(
    name: str,
    rounds: int,
    make: Make,
    *more: str,
    room: int = 12,
    until: Callable[[Learns], bool] | None = None,
) -> list[Learns]:
    """`until`: both stop sooner once this holds for one of them."""
    config = configured(name, rounds, *more)
    learners = [make(key, config) for key in FAST]
    network = MemoryNetwork(seed=0)
    members = [
        member(network, key, learner, config, room=room) for key, learner in zip(FAST, learners, strict=True)
    ]
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node) for node, _ in members]
        (_, first), (_, second) = members
        await first.host.connect((await second.host.addresses())[0])
        running = asyncio.gather(*(node.run() for node in nodes))
        while until and not running.done() and not any(map(until, learners)):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.02)
        if until is not None:
            for node in nodes:
                node.request_stop()
        await running
    return learners


@pytest.mark.parametrize("name", [*SEAMS["rule"].ours, OWN_RULE, *RULES_OF_EXAMPLES])
async def test_two_nodes_learn_from_each_other_by_every_rule_and_go_on_after_a_restart(
    name: str, make: Make
) -> None:
    learners = await run_two(name, ROUNDS, make)
    assert all(learner.policy_version > 0 for learner in learners)
    assert (sum(learner.external for learner in learners) > 0) == (name != "own_book")
    kept = [learner._rule.state() for learner in learners]

    again = await run_two(name, ROUNDS, make)
    assert [learner.policy_version for learner in again] == [one.policy_version for one in learners]
    assert [learner._rule.state() for learner in again] == kept, "it had nothing to do but to read"
    books = [learner._rule.book.entries for learner in again if isinstance(learner._rule, BookRule)]
    assert all(entries and all(entry.prompt.startswith("say ") for entry in entries) for entries in books)
    # One of the two may hear of the other's answers too late for a run of so few rounds.
    assert any(not entry.own for entries in books for entry in entries) == (name == "book")
