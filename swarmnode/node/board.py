"""Keeps the node's status: every change of the one record that all screens read goes through here.

node.py -> [StatusBoard] -> NodeStatus -> monitors, /status, /metrics
"""

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from swarmnode import __version__
from swarmnode.errors import NetworkError
from swarmnode.exchange.ledger import ExchangeStats
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
)
from swarmnode.training.foreign.sharing_gauge import SharingGauge
from swarmnode.training.records import Counters, TrainReport
from swarmnode.types import RolloutGroup, mean_or_none

logger = logging.getLogger(__name__)


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
