"""What sapo.py runs and what comes of it, as records.

sapo_swarms.py, sapo_rules.py -> [Run] -> sapo_store.py (cache, processes) -> sapo_run.py -> [Outcome]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """One swarm under one rule: everything that its outcome depends on, besides the code."""

    swarm: str
    rule: str
    learning_rate: float | None
    """None: that of the preset as shipped."""
    seed: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run, by node."""

    rewards: list[list[float]]
    """Mean sampled reward, round by round of the node's own."""
    answers: list[list[int]]
    """Answers sampled in each of those rounds."""
    joined: list[int]
    """The tick at which the node began."""
    held_out: list[float]
    """Reward on held-out examples at the end."""
    injected: list[list[float]]
    """Share of sampled answers with the injected text, round by round. Empty where nobody attacks."""
    generated_tokens: int
    trained_tokens: int
    received_tokens: int | None
    """None: it was not counted."""
    sent_bytes: int
    cpu_s: float
    answers_a_round: int
    """Of one node, where nothing is over-sampled: what a round counts as."""

    @property
    def cumulative(self) -> float:
        """Sum over rounds of the mean sampled reward, mean over nodes. Rounds of more answers count more."""
        return sum(self.cumulative_of(node) for node in range(len(self.rewards))) / len(self.rewards)

    def cumulative_of(self, node: int) -> float:
        """The same of one node."""
        rounds = zip(self.rewards[node], self.answers[node], strict=True)
        return sum(reward * answers for reward, answers in rounds) / self.answers_a_round

    @property
    def last(self) -> float:
        """Held-out reward at the end, mean over nodes."""
        return sum(self.held_out) / len(self.held_out)


@dataclass(frozen=True, slots=True)
class Swarm:
    """Who is in it, and for how long."""

    models: str
    """Which policies its nodes start from (sapo_models.py)."""
    nodes: int = 4
    rounds: int = 50
    every: tuple[int, ...] = ()
    """Node k does a round every so many ticks. Empty: all do one each tick."""
    joins: tuple[int, ...] = ()
    """The tick at which node k begins. Empty: all begin at once."""
    attackers: int = 0
    """The last so many nodes attack, and learn nothing."""
    attack: str = "advertisement"
    """What they do (swarmnode/testing/attackers.py)."""
    world: str = "builtin"
    """Which tasks and judges (sapo_worlds.py)."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    processes: bool = False
    """Its nodes are `swarmnode join` over libp2p, each at its own pace (sapo_processes.py)."""

    def every_of(self, node: int) -> int:
        return self.every[node] if self.every else 1

    def joins_at(self, node: int) -> int:
        return self.joins[node] if self.joins else 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How a node learns, as settings of the product."""

    settings: Mapping[str, Any]
    shares: bool = True
    """False: nothing is exchanged, each node is alone."""
    halves: bool = False
    """Half of a round's groups are own ones, half those of others. False: as the preset has it."""
    drops_own_failures: bool = False
    """Of its own answers it learns from those only that are better than their group's mean."""
    equal_answers: bool = False
    """It ends with the answers that a lone node samples in so many rounds, not with the rounds."""
