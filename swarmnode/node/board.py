"""Keeps the node's status, and tells whoever shows it: every change of the one record goes through here.

node.py -> [StatusBoard] -> NodeStatus -> /status, /metrics
                                |
                                +-> [Monitors] -> metrics.jsonl | panel.py | a stream

Monitors are told after every round: the JSONL file always, a panel on a terminal, plain lines elsewhere.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, TextIO

import msgspec

from swarmnode import __version__
from swarmnode.errors import NetworkError
from swarmnode.exchange.reputation import ExchangeStats
from swarmnode.network.host import Host
from swarmnode.node.learner import RoundRollouts
from swarmnode.node.status import (
    Network,
    NodeStatus,
    Phase,
    PipelineStatus,
    Progress,
    Saved,
    Sharing,
    SharingEffect,
    Speed,
    measurements,
)
from swarmnode.training.foreign.sharing_gauge import SharingGauge
from swarmnode.training.records import Counters, TrainReport
from swarmnode.types import RolloutGroup, mean_or_none

logger = logging.getLogger(__name__)

MOST_LOG_BYTES = 64 * 2**20
"""Then the file is put aside once, so that a node that runs for months keeps its disk."""

policy_label: ContextVar[str] = ContextVar("policy_label", default="")
"""The policy's label before every line of the story that is about one of several policies; empty with one."""


class StatusBoard:
    """`status` is always whole: readers in other threads see the record before a change or after it."""

    def __init__(
        self,
        *,
        peer_id: str,
        name: str,
        swarm: str,
        model: str,
        rounds_limit: int | None,
        policy: int = 0,
        policies: int = 1,
        neighbours: Collection[str] = (),
        learns: bool = True,
    ) -> None:
        """`neighbours`: peer ids of the other policies of this process. `learns`: there is a policy."""
        now = time.time()
        self.peers_outside = 0
        """Connected peers that are not of this process."""
        self._neighbours = frozenset(neighbours)
        self.status = NodeStatus(
            peer_id=peer_id,
            name=name,
            swarm=swarm,
            model=model,
            version=__version__,
            pid=os.getpid(),
            started_at=now,
            phase=Phase("starting", now),
            progress=Progress(rounds_limit=rounds_limit),
            policy=policy,
            policies=policies,
            learns=learns,
        )

    def enter(self, name: str, detail: str = "") -> None:
        """Say what is being done; the clock of a phase runs on while its name stays the same."""
        since = self.status.phase.since if self.status.phase.name == name else time.time()
        self._set(phase=Phase(name, since, detail))

    def counted(self, counters: Counters, policy_version: int) -> None:
        """Take over the numbers that continue over restarts."""
        progress = msgspec.structs.replace(
            self.status.progress,
            round=counters.round,
            policy_version=policy_version,
            tokens=counters.tokens,
            seconds=counters.seconds,
        )
        self._set(progress=progress)

    def trained(
        self, rollouts: RoundRollouts, external: Sequence[RolloutGroup], report: TrainReport, round_s: float
    ) -> None:
        """A round is over."""
        reward = msgspec.structs.replace(
            self.status.reward, own=_mean_reward(rollouts.groups), external=_mean_reward(external)
        )
        speed = Speed(
            tokens_per_s=rollouts.tokens / rollouts.seconds if rollouts.seconds else None,
            generate_s=rollouts.seconds,
            train_s=report.seconds,
            round_s=round_s,
        )
        self._set(reward=reward, speed=speed, generation=rollouts.generation, training=report)

    def learned(self, report: TrainReport) -> None:
        """An iteration is over that nothing was generated for."""
        speed = Speed(train_s=report.seconds, round_s=report.seconds)
        self._set(speed=speed, training=report)

    def evaluated(self, counters: Counters, per_task: Mapping[str, float | None]) -> None:
        reward = msgspec.structs.replace(
            self.status.reward,
            eval_first=counters.reward_first,
            eval_last=counters.reward_last,
            eval_round=counters.evaluated_round,
            eval_tasks=dict(per_task),
        )
        self._set(reward=reward)

    def saved(self, round: int) -> None:
        self._set(checkpoint=Saved(round, time.time()))

    def not_saved(self, why: str) -> None:
        """The last attempt failed; the checkpoint before it is still the newest."""
        self._set(checkpoint=msgspec.structs.replace(self.status.checkpoint, error=why))

    def shared(self, stats: ExchangeStats | None, trained: Mapping[str, int]) -> None:
        """Take over the exchange's counters; None where there is no exchange."""
        if stats is None:
            self._set(exchange=Sharing(trained=dict(trained)))
            return
        sharing = Sharing(
            published=stats.published,
            headers=stats.headers_seen,
            fetched=stats.fetched,
            accepted=stats.accepted,
            dropped=dict(stats.dropped),
            buffered=stats.buffered,
            unpublished=dict(stats.unpublished),
            served=stats.served,
            bytes_in=stats.bytes_in,
            bytes_out=stats.bytes_out,
            banned_peers=len(stats.banned_peers),
            trained=dict(trained),
        )
        self._set(exchange=sharing)

    def weighed(self, gauge: SharingGauge, wanted: int) -> None:
        """What sharing brings, and how much is taken of `wanted` groups a round."""
        if wanted == 0:
            return
        found = gauge.estimate
        effect = SharingEffect(
            agreement=None if found is None else found.mean,
            error=None if found is None else found.error,
            verdict="open" if found is None else found.verdict,
            groups=gauge.groups(wanted),
            groups_most=wanted,
        )
        self._set(sharing=effect)

    def relayed(self, heard: Sharing) -> None:
        """Take over what a seed heard; it has no exchange that would count more."""
        self._set(exchange=heard)

    def in_pipeline(self, pipeline: PipelineStatus) -> None:
        self._set(pipeline=pipeline)

    async def look_at(self, host: Host) -> None:
        """Ask the host for its state, peers and addresses. While it is down it has no peers."""
        state = host.status()
        peers: Sequence[str] = ()
        addresses = self.status.network.addresses
        if state.state == "up":
            try:
                peers, addresses = await host.peers(), await host.addresses()
            except NetworkError as error:
                logger.debug("the network did not answer: %s", error)
        self.peers_outside = len(set(peers) - self._neighbours)
        network = Network(
            state.state, state.since, state.restarts, state.detail, len(peers), addresses,
            state.memory_restarts, dict(state.skipped),
        )  # fmt: skip
        self._set(network=network)

    def _set(self, **parts: object) -> None:
        self.status = msgspec.structs.replace(self.status, **parts)


def _mean_reward(groups: Sequence[RolloutGroup]) -> float | None:
    return mean_or_none([mean for group in groups if (mean := group.reward_mean) is not None])


# ---- monitors ----


class Monitor(Protocol):
    """Told after every round and evaluation, and on every tick (about twice a second)."""

    def round_done(self, status: NodeStatus) -> None: ...

    def evaluated(self, status: NodeStatus) -> None: ...

    def tick(self, status: NodeStatus) -> None: ...

    def close(self) -> None: ...


class JsonlMonitor:
    """Appends one JSON object per event. A full disk pauses the log, says so once, and is tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._paused = False

    def round_done(self, status: NodeStatus) -> None:
        self._append("round", status)

    def evaluated(self, status: NodeStatus) -> None:
        self._append("evaluation", status)

    def tick(self, status: NodeStatus) -> None:
        pass

    def close(self) -> None:
        pass

    def _append(self, event: str, status: NodeStatus) -> None:
        record = {"event": event, "time": time.time(), "peer": status.peer_id, **measurements(status)}
        try:
            self._write(json.dumps(record))
        except OSError as error:
            if not self._paused:
                logger.warning(
                    "metrics paused: cannot write %s (%s); training goes on", self.path, error.strerror
                )
            self._paused = True
            return
        if self._paused:
            logger.info("metrics resumed: %s can be written again", self.path)
        self._paused = False

    def _write(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > MOST_LOG_BYTES:
            self.path.replace(self.path.with_suffix(".1.jsonl"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class PlainMonitor:
    """One line per round, without escape codes."""

    def __init__(self, stream: TextIO, label: str = "") -> None:
        """`label` says whose rounds these are, where several policies write to one stream."""
        self._stream = stream
        self._label = label

    def round_done(self, status: NodeStatus) -> None:
        self._stream.write(f"{time.strftime('%H:%M:%S')} {self._label}{round_line(status)}\n")
        self._stream.flush()

    def evaluated(self, status: NodeStatus) -> None:
        pass

    def tick(self, status: NodeStatus) -> None:
        pass

    def close(self) -> None:
        self._stream.flush()


class Monitors:
    """Several monitors as one. One whose output is gone (a closed pipe) is dropped; the node goes on."""

    def __init__(self, members: Sequence[Monitor]) -> None:
        self._members = list(members)

    def round_done(self, status: NodeStatus) -> None:
        self._each(lambda member: member.round_done(status))

    def evaluated(self, status: NodeStatus) -> None:
        self._each(lambda member: member.evaluated(status))

    def tick(self, status: NodeStatus) -> None:
        self._each(lambda member: member.tick(status))

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, tell: Callable[[Monitor], None]) -> None:
        for member in tuple(self._members):
            try:
                tell(member)
            except OSError as error:
                self._members.remove(member)
                logger.warning("%s stops showing anything: %s", type(member).__name__, error)


def round_line(status: NodeStatus) -> str:
    """A round in one line: reward, data, speed, swarm."""
    training, progress = status.training, status.progress
    book = f", {training.replayed} of {training.book} answers in the book" if training.book else ""
    limit = f"/{progress.rounds_limit}" if progress.rounds_limit is not None else ""
    return (
        f"round {progress.round}{limit}  reward {shown(status.reward.own)} own"
        f" {shown(status.reward.external)} external"
        f"  trained on {training.own_groups} own + {training.external_groups} external groups{book}"
        f"  {shown(status.speed.tokens_per_s, '.0f')} tokens/s  {status.network.peers} peers"
        f"  accepted {status.exchange.accepted} dropped {sum(status.exchange.dropped.values())}"
    )


def shown(value: float | None, spec: str = ".3f") -> str:
    """A number, or `-` for what is unknown.

    >>> shown(None), shown(0.25)
    ('-', '0.250')
    """
    return "-" if value is None else format(value, spec)
