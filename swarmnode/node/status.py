"""What the node knows about itself, as one frozen record: the only source of every number on a screen.

node.py replaces parts of it -> [NodeStatus] -> panel, JSONL, /status, /metrics, `swarmnode status`
                                     |
                                     +-> [summarise] -> the last line that `swarmnode join` prints

All of them read the same record, so they can never disagree. None means unknown, zero is a measurement.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmnode.node.learner import Generation
from swarmnode.printable import printable
from swarmnode.training.records import Counters, TrainReport

OF_SEEDS = ("pid", "started_at", "phase.", "network.", "exchange.headers", "exchange.bytes_in")
"""What the names of measurements begin with that a member has which only connects others."""


class Phase(msgspec.Struct, frozen=True):
    """What the node is doing or waiting for, and since when (seconds since the epoch)."""

    name: str
    since: float
    detail: str = ""


class Progress(msgspec.Struct, frozen=True):
    round: int = 0
    rounds_limit: int | None = None
    policy_version: int = 0
    tokens: int = 0
    """Completion tokens generated for training, over all starts."""
    seconds: float = 0.0
    """Wall time spent in rounds, over all starts."""


class Rewards(msgspec.Struct, frozen=True):
    """Mean rewards. own and external: groups of the last round, both scored here."""

    own: float | None = None
    external: float | None = None
    eval_first: float | None = None
    eval_last: float | None = None
    eval_round: int | None = None
    eval_tasks: dict[str, float | None] = {}


class Speed(msgspec.Struct, frozen=True):
    """Speed of the last round."""

    tokens_per_s: float | None = None
    generate_s: float | None = None
    train_s: float | None = None
    round_s: float | None = None


class Network(msgspec.Struct, frozen=True):
    state: str = "off"
    since: float = 0.0
    restarts: int = 0
    detail: str = ""
    peers: int = 0
    addresses: tuple[str, ...] = ()
    memory_restarts: int = 0
    """Times that the network process was replaced because strangers had made it grow."""
    skipped: dict[str, int] = {}
    """What came in from peers and could not be used, by cause."""


class Sharing(msgspec.Struct, frozen=True):
    """Counters of the exchange since this start; `trained` over all starts."""

    published: int = 0
    headers: int = 0
    fetched: int = 0
    accepted: int = 0
    dropped: dict[str, int] = {}
    buffered: int = 0
    unpublished: dict[str, int] = {}
    """Own groups that were not announced, by reason."""
    served: int = 0
    """Bodies handed to others."""
    bytes_in: int = 0
    bytes_out: int = 0
    banned_peers: int = 0
    trained: dict[str, int] = {}


class SharingEffect(msgspec.Struct, frozen=True):
    """Whether what others teach helps us (training/foreign/agreement.py), and what follows from it."""

    agreement: float | None = None
    """Mean cosine of what their answers ask of the policy with the gradient of our own reward, over the last
    rounds. None: not known."""
    error: float | None = None
    """Standard error of that mean."""
    verdict: str = ""
    """helps, harms or open; empty: nothing is taken from others."""
    groups: int = 0
    """J: groups of others that a round asks for now."""
    groups_most: int = 0
    """The same as it is set."""


class Saved(msgspec.Struct, frozen=True):
    """The last checkpoint, and why the last attempt failed if it did."""

    round: int | None = None
    at: float | None = None
    error: str = ""


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a larger model that this node holds. Counters are since this start."""

    name: str = ""
    """Empty: the node is in no pipeline."""
    stage: int | None = None
    """None: there is no plan yet, or it has no place for us."""
    stages: int | None = None
    first_layer: int | None = None
    end_layer: int | None = None
    """One past the last."""
    replicas: int | None = None
    """Members that hold our stage."""
    members: int = 0
    """Alive, ourselves included."""
    plans: int = 0
    """Agreed on since the start: one, and one more for each time that somebody came or went."""
    iteration: int = 0
    """Optimizer steps taken by the pipeline."""
    iteration_s: float | None = None
    """Time of the last iteration, its step included."""
    planned_s: float | None = None
    """What the plan says it takes, without the step."""
    busy_share: float | None = None
    """Share of the last iteration in which we computed."""
    repaired: int = 0
    """Micro-batches that got another path because a member on theirs was lost."""
    given_up: int = 0
    stragglers: int = 0
    """Members that an iteration did not wait for."""
    lost: int = 0
    """Members that were there and are not any more."""
    idle_tokens: int = 0
    """Generated with a policy of our own while the stage had to wait."""
    idle_share: float | None = None
    """Share of the time that the stage had to wait which went into generating `idle_tokens`. None: there is
    no such policy, or the stage has not worked yet."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    peer_id: str
    name: str
    swarm: str
    model: str
    version: str
    pid: int
    started_at: float
    phase: Phase
    learns: bool = True
    """False: it only connects others (`swarmnode seed`). What is about a policy means nothing then."""
    policy: int = 0
    """Its number among the policies of its process."""
    policies: int = 1
    progress: Progress = Progress()
    reward: Rewards = Rewards()
    speed: Speed = Speed()
    generation: Generation = Generation()
    network: Network = Network()
    exchange: Sharing = Sharing()
    sharing: SharingEffect = SharingEffect()
    pipeline: PipelineStatus = PipelineStatus()
    training: TrainReport = TrainReport()
    checkpoint: Saved = Saved()


def invitation(status: NodeStatus) -> str | None:
    """What another machine types to join this node's swarm; None while nobody could reach us."""
    if not status.network.addresses:
        return None
    swarm = "" if status.swarm == "commons" else f" --swarm {status.swarm}"
    return f"swarmnode join {status.network.addresses[0]}{swarm}"


def printable_status(status: NodeStatus) -> NodeStatus:
    """The status with every text in it fit for a terminal: names, details and reasons may quote a peer."""
    return msgspec.convert(_printable(msgspec.to_builtins(status)), NodeStatus)


def measurements(status: NodeStatus) -> dict[str, float]:
    """Every known number by dotted name; the names of JSONL and, with underscores, of Prometheus.

    Unknown ones are absent: a gauge at zero would be a lie. Of a seed, so is all that is about a policy.
    """
    found = dict(_numbers("", msgspec.to_builtins(status)))
    return {name: value for name, value in found.items() if status.learns or name.startswith(OF_SEEDS)}


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run came to. Numbers continue over restarts; None means not measured."""

    peer: str
    rounds: int
    tokens: int
    seconds: float
    reward_first: float | None
    reward_last: float | None
    evaluated_round: int | None
    """The round that `reward_last` was measured at."""
    external_groups_trained: dict[str, int]
    saved_round: int | None
    """Round of the newest checkpoint; less than `rounds` when the disk was full."""
    stopped: str


def summarise(status: NodeStatus, counters: Counters, stopped: str) -> Summary:
    """Put together what is known at the end; `stopped` says why it ended."""
    return Summary(
        peer=status.peer_id,
        rounds=counters.round,
        tokens=counters.tokens,
        seconds=round(counters.seconds, 3),
        reward_first=counters.reward_first,
        reward_last=counters.reward_last,
        evaluated_round=counters.evaluated_round,
        external_groups_trained=dict(counters.external_groups_trained),
        saved_round=status.checkpoint.round,
        stopped=stopped,
    )


def _numbers(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}{key}.", value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def _printable(tree: Any) -> Any:
    if isinstance(tree, str):
        return printable(tree)
    if isinstance(tree, dict):
        return {_printable(key): _printable(value) for key, value in tree.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(tree, list | tuple):
        return [_printable(value) for value in tree]  # pyright: ignore[reportUnknownVariableType]
    return tree
