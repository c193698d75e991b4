"""A node's knowledge of itself as one frozen record: the only source of every number on a screen.

node.py replaces parts of it -> [NodeStatus] -> panel, JSONL, /status, /metrics, `swarmnode status`
                                     |
                                     +-> [summary_of] -> the last line that `swarmnode join` prints

All of them read the same record, so they can never disagree. None means unknown, zero is a measurement.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from swarmnode.errors import NetworkError
from swarmnode.exchange.exchange_stats import HealthStats, HelpStats, PeerFigures, ReceiptStats
from swarmnode.network.finding.invitation import MAX_SEEDS, Invitation
from swarmnode.network.multiaddr import Scope, is_relayed, scope_of
from swarmnode.network.reach import Reach
from swarmnode.node.learner import Generation
from swarmnode.printable import printable
from swarmnode.training.records import TrainReport

OF_SEEDS = (
    *("pid", "started_at", "phase.", "network.", "health."),
    *(
        f"exchange.{name}"
        for name in ("headers", "bytes_in", "bytes_out", "pulled", "served", "banned_peers")
    ),
)
"""Prefixes of the measurements of a member that only connects others."""


class Phase(msgspec.Struct, frozen=True):
    """The present work of a node, or its reason to wait, and since when."""

    name: str
    """generating, training, evaluating, waiting for peers, stopped, and so on."""
    since: float
    """When it began, in seconds since the epoch."""
    detail: str = ""
    """More of it, for people."""


class Progress(msgspec.Struct, frozen=True):
    round: int = 0
    """Rounds that are done, over all starts."""
    rounds_limit: int | None = None
    """node.rounds: how many there will be. None: no end."""
    policy_version: int = 0
    """Rounds that changed the policy."""
    tokens: int = 0
    """Completion tokens generated for training, over all starts."""
    seconds: float = 0.0
    """Wall time spent in rounds, over all starts."""


class Rewards(msgspec.Struct, frozen=True):
    """Mean rewards. own and external: groups of the last round, both scored here."""

    own: float | None = None
    """Mean reward of our own groups of the last round."""
    external: float | None = None
    """Mean reward of the groups of others used in it."""
    own_std: float | None = None
    """Standard deviation of the rewards within a group of ours, mean over the groups."""
    own_tasks: dict[str, float] = {}
    """Mean reward of our own groups of the last round, by task."""
    external_tasks: dict[str, float] = {}
    """Mean reward of the groups of others used in it, by task."""
    groups: int = 0
    """Our own groups of the last round."""
    without_gradient: dict[str, int] = {}
    """Groups among them without a gradient, by cause: equal rewards of zero or less (all_zero), of one or
    more (all_full), in between (all_equal), or none (unscored)."""
    parts: dict[str, float] = {}
    """Mean of each reward over our own answers of the last round, before its weight, by name."""
    parts_std: dict[str, float] = {}
    """Standard deviation of each reward over these answers, by name."""
    eval_first: float | None = None
    """Mean reward on held-out examples before the first round, with the run's engine."""
    eval_last: float | None = None
    """The newest such mean."""
    eval_round: int | None = None
    """Round after which it was measured."""
    eval_tasks: dict[str, float | None] = {}
    """That newest mean by task."""


class Speed(msgspec.Struct, frozen=True):
    """Speed of the last round."""

    tokens_per_s: float | None = None
    """Completion tokens of the round's groups divided by `round_s`, whatever ran in parallel."""
    generate_s: float | None = None
    """Time until the round's answers were complete and scored. With overlap it runs in parallel with the
    training of the previous round, and with refill some answers were complete before."""
    train_s: float | None = None
    """Time of its training."""
    round_s: float | None = None
    """Wall time of the whole round."""
    done_at: float | None = None
    """When it finished, in seconds since the epoch."""


class ConnectedPeer(msgspec.Struct, frozen=True):
    peer: str
    """Its peer id."""
    distance: str
    """machine, lan, public or relayed; empty: unknown."""


class Network(msgspec.Struct, frozen=True):
    state: str = "off"
    """starting, up, restarting, closed, or off: there is no network."""
    since: float = 0.0
    """When it entered this state, in seconds since the epoch."""
    restarts: int = 0
    """Restarts of the network process."""
    detail: str = ""
    """Why it is in this state."""
    peers: int = 0
    """Connected peers."""
    addresses: tuple[str, ...] = ()
    """Addresses that others can dial, the best first."""
    memory_restarts: int = 0
    """Times that the network process was replaced because strangers had made it grow too large."""
    skipped: dict[str, int] = {}
    """Things from peers that could not be used, counted by cause."""
    reach: Reach = Reach()
    """Who can reach this node."""
    invitation: str = ""
    """Short string for outsiders to join with. Empty: outsiders cannot join."""
    private: bool = False
    """Only holders of the swarm's key can take part."""
    relay: str = ""
    """Its limits as a relay for peers that nobody can dial, in words. Empty: it is not a relay."""
    connected: tuple[ConnectedPeer, ...] = ()
    """Up to 64 of the connected peers, each with its distance: machine, lan, public or relayed."""


class Sharing(msgspec.Struct, frozen=True):
    """Counters of the exchange since this start; `trained` over all starts."""

    published: int = 0
    """Own groups that were announced."""
    headers: int = 0
    """Announcements heard."""
    fetched: int = 0
    """Bodies of groups that were fetched."""
    accepted: int = 0
    """Groups of others that passed all checks."""
    dropped: dict[str, int] = {}
    """Groups of others that were not used, by reason; crowded_out, stale and over_share mean that there were
enough."""
    buffered: int = 0
    """Accepted groups waiting for a round."""
    unpublished: dict[str, int] = {}
    """Own groups that were not announced, by reason."""
    served: int = 0
    """Bodies handed to others."""
    pulled: int = 0
    """Bodies of others that were fetched because a peer asked for them."""
    through_holders: int = 0
    """Bodies received from a peer other than their author."""
    starved: str = ""
    """Why nothing arrives although others announce, and what to do; empty while something arrives."""
    bytes_in: int = 0
    """Bytes that came from peers."""
    bytes_out: int = 0
    """Bytes that went to peers."""
    upload_mb_per_s: float | None = None
    """Upload limit for bodies, in megabytes per second."""
    banned_peers: int = 0
    """Peers that are banned for now."""
    peers: tuple[PeerFigures, ...] = ()
    """Up to 64 peers, largest contributors first: groups accepted, groups dropped by their fault, score."""
    trained: dict[str, int] = {}
    """Groups that training was given, by author: more than were learned from, as some teach nothing."""


class LibraryStatus(msgspec.Struct, frozen=True):
    """This node's part of the swarm's library, and what it learnt of others' since this start."""

    kept: int = 0
    """Groups kept for others because the book has answers of them."""
    pages_served: int = 0
    """Pages of the library sent to others."""
    borrowed: int = 0
    """Groups of libraries that passed all checks."""
    lenders: int = 0
    """Peers that they came from."""
    answers: int = 0
    """Right answers from libraries added to the book."""
    catching_up: bool = False
    """Rounds have few own groups and replay much of the book."""
    rounds: int = 0
    """Rounds of catching up."""
    rounds_worth: float | None = None
    """Rounds that our own sampling would have needed to find as many right answers, at its pass rate when
    catching up began. None: nothing was taken, or nothing found."""


class WeekContribution(msgspec.Struct, frozen=True):
    """Totals of what this machine gave and received in the last seven days, over all policies of the
    process."""

    hours: float | None = None
    """Time that it worked. None: not recorded."""
    kwh: float | None = None
    """Energy used by processor and card in that time, by all programs. None: the machine does not report
    it."""
    given: int = 0
    """Own groups that were announced."""
    learnt: int = 0
    """Groups of others that were learned from."""
    thanked_by: int = 0
    """Nodes that reported learning from ours."""

    def in_words(self) -> str:
        """Returns it as a line.

        >>> WeekContribution(31.4, 4.2, 412, 220, 9).in_words()
        'this week: 31 h, 4.2 kWh, 412 groups given, learnt from by 9 nodes, 220 learnt from'
        """
        hours = self.hours or 0.0
        parts = [
            f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h",
            *([] if self.kwh is None else [f"{self.kwh:.1f} kWh"]),
            f"{self.given:,} groups given",
            *([f"learnt from by {self.thanked_by} nodes"] if self.thanked_by > 1 else []),
            *(["learnt from by 1 node"] if self.thanked_by == 1 else []),
            f"{self.learnt:,} learnt from",
        ]
        return f"this week: {', '.join(parts)}"


class Saved(msgspec.Struct, frozen=True):
    """The last checkpoint, and why the last attempt failed if it did."""

    round: int | None = None
    """Round of the newest checkpoint. None: there is none."""
    at: float | None = None
    """When it was written, in seconds since the epoch."""
    error: str = ""
    """Why the last attempt failed. Empty: it succeeded."""


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a larger model that this node holds. Counters are since this start."""

    name: str = ""
    """Empty: the node is in no pipeline."""
    stage: int | None = None
    """Our stage. None: there is no plan yet, or none of its stages is ours."""
    stages: int | None = None
    """Stages of the plan."""
    first_layer: int | None = None
    """The first layer of our stage."""
    end_layer: int | None = None
    """One past the last."""
    replicas: int | None = None
    """Members that hold our stage."""
    members: int = 0
    """Members that are alive, including us."""
    plans: int = 0
    """Plans agreed on since the start: one, plus one each time that a member joined or left."""
    iteration: int = 0
    """Optimizer steps taken by the pipeline."""
    iteration_s: float | None = None
    """Time of the last iteration, its step included."""
    planned_s: float | None = None
    """Time that the plan predicts for an iteration, without the step."""
    busy_share: float | None = None
    """Share of the last iteration in which we computed."""
    repaired: int = 0
    """Micro-batches rerouted because a member on their path was lost."""
    given_up: int = 0
    """Micro-batches for which no other path was found."""
    stragglers: int = 0
    """Micro-batches of other data nodes that were dropped when an iteration ended."""
    lost: int = 0
    """Members that have not answered us."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's state at one moment, as its page and `on_round` show it (docs/metrics.md)."""

    peer_id: str
    """The node's peer id."""
    name: str
    """The name that its peer id stands for, for people."""
    swarm: str
    """The swarm it is in."""
    model: str
    """Its base model."""
    run: str = ""
    """Name of the run that is trained; empty: runs have none (a pipeline, a seed)."""
    version: str
    """Version of swarmnode."""
    pid: int
    """Its process id."""
    started_at: float
    """When this start was, in seconds since the epoch."""
    phase: Phase
    """Its current work."""
    earlier: tuple[Phase, ...] = ()
    """Its previous work, the newest last."""
    learns: bool = True
    """False: it only connects others (`swarmnode seed`), and fields about a policy have no meaning."""
    policy: int = 0
    """Its number among the policies of its process."""
    policies: int = 1
    """Number of policies in its process."""
    progress: Progress = Progress()
    """Rounds, tokens and seconds so far."""
    reward: Rewards = Rewards()
    """Rewards of its answers."""
    speed: Speed = Speed()
    """Times of the last round."""
    generation: Generation = Generation()
    """The state of generation."""
    network: Network = Network()
    """Its connections."""
    exchange: Sharing = Sharing()
    """Rollouts that it gave and received."""
    library: LibraryStatus = LibraryStatus()
    """Its part of the swarm's library, and what it learnt of others'."""
    help: HelpStats = HelpStats()
    """Requests for help: its own, and those that it answered."""
    receipts: ReceiptStats = ReceiptStats()
    """Receipts from nodes that learnt from it."""
    health: HealthStats = HealthStats()
    """The swarm as seen by this node."""
    week: WeekContribution = WeekContribution()
    """Contribution of its machine in the last seven days."""
    pipeline: PipelineStatus = PipelineStatus()
    """Its part of a pipeline, if any."""
    training: TrainReport = TrainReport()
    """The last round of learning."""
    checkpoint: Saved = Saved()
    """The newest checkpoint."""
    advice: str = ""
    """Tasks with nothing to learn from, and what helps (drought.py). Empty: none."""
    page: str = ""
    """Address of the status page, which serves this record. Empty: there is none yet."""


def invitation(status: NodeStatus) -> str | None:
    """Returns the command by which another machine joins this node's swarm, or None while it is unreachable.

    It is for outsiders if they can use it, else for those that `joins_from` names."""
    addresses = _usable(status)[1]
    if not addresses:
        return None
    join = "swarmnode join" + (f" --pipeline {status.pipeline.name}" if status.pipeline.name else "")
    if status.network.private:
        return (
            f"{join} INVITATION, printed by `swarmnode swarm invite --swarm {status.swarm}` here,"
            " with the --home of this node"
        )
    swarm = "" if status.swarm == "commons" else f" --swarm {status.swarm}"
    return f"{join} {addresses[0]}{swarm}"


def joins_from(status: NodeStatus) -> str:
    """Returns who can use the invitation: `another machine`, or one that is nearer."""
    nearer = {"lan": "another machine on this LAN", "machine": "another node on this machine"}
    return nearer.get(_usable(status)[0], "another machine")


def short_invitation(swarm: str, network: Network) -> str:
    """Returns the invitation for outsiders as a string (network/finding/invitation.py), or "" if there is
    none.

    That of a private swarm contains its key, which no status reveals."""
    addresses = () if network.private else _for_outsiders(network)
    return Invitation(name=swarm, seeds=addresses[:MAX_SEEDS]).text() if addresses else ""


def _usable(status: NodeStatus) -> tuple[Scope, tuple[str, ...]]:
    """Returns the addresses for the farthest scope that can use any."""
    found = _for_outsiders(status.network)
    if found:
        return "public", found
    own = status.network.addresses
    near = _within("lan", own)
    return ("lan", near) if near else ("machine", _within("machine", own))


def _for_outsiders(network: Network) -> tuple[str, ...]:
    """Returns the addresses that were found to work; before any check, our public addresses."""
    if network.reach.verdict != "unknown" or network.reach.addresses:
        return network.reach.addresses
    return _within("public", network.addresses)


def _within(scope: Scope, addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns the addresses of a scope. Anything else is left out, as a status may come from elsewhere."""
    found: list[str] = []
    for address in addresses:
        with suppress(NetworkError):
            # Joining machines cannot dial addresses at a relay; only members of a pipeline can
            # (network.relays).
            found += [address] if scope_of(address) == scope and not is_relayed(address) else []
    return tuple(found)


def swarm_of(status: NodeStatus) -> str:
    """Returns the name of the swarm as a screen shows it."""
    return f"{status.swarm} (private)" if status.network.private else status.swarm


def printable_status(status: NodeStatus) -> NodeStatus:
    """Returns the status with all text safe for a terminal: names, details and reasons may quote a peer."""
    return msgspec.convert(_printable(msgspec.to_builtins(status)), NodeStatus)


def measurements(status: NodeStatus) -> dict[str, float]:
    """Returns every known number by dotted name, as in JSONL and, with underscores, in Prometheus.

    Unknown numbers are absent: a gauge at zero would be a lie. A seed also lacks everything about a policy.
    """
    found = dict(_numbers("", msgspec.to_builtins(status)))
    return {name: value for name, value in found.items() if status.learns or name.startswith(OF_SEEDS)}


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of one run. Numbers are the run's, over all starts; None means not measured."""

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
    """Round of the newest checkpoint; less than `rounds` if the disk was full."""
    stopped: str
    advice: str = ""
    """The node's last advice about tasks with nothing to learn from, and the judges' last failure since this
    start. Empty: none."""
    run: str = ""
    """Its name; empty in a pipeline."""
    not_saved: str = ""
    """The rounds lost because their checkpoint could not be written, and why. Empty: none."""


def summary_of(status: NodeStatus) -> Summary:
    """Returns the summary of a run that ends at this status."""
    generation, advice = status.generation, [status.advice] if status.advice else []
    if generation.failure:
        advice.append(
            f"groups without a reward: {generation.unjudged_groups}, the last because {generation.failure}"
        )
    return Summary(
        peer=status.peer_id,
        rounds=status.progress.round,
        tokens=status.progress.tokens,
        seconds=round(status.progress.seconds, 3),
        reward_first=status.reward.eval_first,
        reward_last=status.reward.eval_last,
        evaluated_round=status.reward.eval_round,
        external_groups_trained=dict(status.exchange.trained),
        saved_round=status.checkpoint.round,
        stopped=status.phase.detail if status.phase.name == "stopped" else "interrupted",
        advice="; ".join(advice),
        run=status.run,
        not_saved=_not_saved(status),
    )


def _not_saved(status: NodeStatus) -> str:
    saved, done = status.checkpoint.round or 0, status.progress.round
    if not status.checkpoint.error or saved == done:
        return ""
    lost = "round" if done == saved + 1 else f"rounds {saved + 1} to"
    return f"{lost} {done} could not be saved: {status.checkpoint.error}"


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
