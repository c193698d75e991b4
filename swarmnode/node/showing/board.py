"""Keeps the node's status and tells its watchers: every change of the one record goes through here.

node.py -> [StatusBoard] -> NodeStatus -> /status, /metrics
                                |
                                +-> [Watchers] -> monitors.py | extensions/panel/ | a stream

Watchers are called after every round: monitors.py and the log always, a panel only on a terminal.
"""

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from statistics import fmean
from typing import Literal, Protocol

import msgspec

from swarmnode import __version__
from swarmnode.errors import NetworkError
from swarmnode.exchange.drop_reasons import NOT_NEEDED, Reason, in_words
from swarmnode.exchange.exchange_stats import ExchangeStats
from swarmnode.exchange.library.borrower import Borrower
from swarmnode.network.daemon.relaying import RELAY_IN_WORDS
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import is_relayed, scope_of
from swarmnode.network.reach import Reach
from swarmnode.node.catching_up import CatchingUp
from swarmnode.node.learner import RoundRollouts
from swarmnode.node.showing.figures import figure
from swarmnode.node.showing.node_status import (
    ConnectedPeer,
    LibraryStatus,
    Network,
    NodeStatus,
    Phase,
    Progress,
    Saved,
    Sharing,
    Speed,
    invitation,
    joins_from,
    short_invitation,
)
from swarmnode.settings.config import Config, NodeConfig
from swarmnode.training.records import Counters, TrainReport
from swarmnode.types import RolloutGroup, by_reward, mean_or_none, spread_of

logger = logging.getLogger(__name__)

Occasion = Literal["round", "evaluation", "tick"]

MOST_EARLIER = 24
"""Phases that are remembered."""
MOST_PEERS = 64
"""Peers that a status lists one by one."""

policy_label: ContextVar[str] = ContextVar("policy_label", default="")
"""Prefix of every log line that is about one of several policies; empty with a single one."""


class StatusBoard:
    """`status` is always consistent: readers in other threads see the record before or after a change."""

    def __init__(
        self,
        config: Config,
        *,
        peer_id: str,
        name: str,
        model: str,
        run: str = "",
        policy: int = 0,
        neighbours: Collection[str] = (),
        learns: bool = True,
    ) -> None:
        """`run`: the name of the run. `policy`: the number of this policy in the process. `neighbours`: the
        peer ids of the other policies there. `learns`: it has a policy."""
        now, node = time.time(), config.node if learns else NodeConfig()
        self.peers_outside = 0
        """Connected peers outside this process."""
        self._neighbours = frozenset(neighbours)
        self._starving = Starving()
        self.status = NodeStatus(
            peer_id=peer_id,
            name=name,
            swarm=config.swarm.name,
            model=model,
            run=run,
            version=__version__,
            pid=os.getpid(),
            started_at=now,
            phase=Phase("starting", now),
            progress=Progress(rounds_limit=node.rounds),
            policy=policy,
            policies=node.policies,
            learns=learns,
        )

    def enter(self, name: str, detail: str = "") -> None:
        """Enter a phase. Its clock keeps running while the name stays the same."""
        since = self.status.phase.since if self.status.phase.name == name else time.time()
        earlier = self.status.earlier
        if self.status.phase.name != name:
            earlier = (*earlier, self.status.phase)[-MOST_EARLIER:]
        self.show(phase=Phase(name, since, detail), earlier=earlier)

    def show_counters(self, counters: Counters, policy_version: int) -> None:
        """Take over the counters that continue across restarts."""
        trained = dict(counters.external_groups_trained)
        progress = msgspec.structs.replace(
            self.status.progress,
            round=counters.round,
            policy_version=policy_version,
            tokens=counters.tokens,
            seconds=counters.seconds,
        )
        self.show(progress=progress, exchange=msgspec.structs.replace(self.status.exchange, trained=trained))

    def show_round(
        self, rollouts: RoundRollouts, external: Sequence[RolloutGroup], report: TrainReport, round_s: float
    ) -> None:
        """Record a finished round."""
        parts = by_reward(scores for group in rollouts.groups for scores in group.scores)
        flat = Counter(_cause_of_no_gradient(group) for group in rollouts.groups if not group.has_gradient)
        spreads = [std for group in rollouts.groups if (std := group.reward_std) is not None]
        reward = msgspec.structs.replace(
            self.status.reward,
            own=_mean_reward(rollouts.groups),
            external=_mean_reward(external),
            own_std=mean_or_none(spreads),
            own_tasks=_reward_by_task(rollouts.groups),
            external_tasks=_reward_by_task(external),
            groups=len(rollouts.groups),
            without_gradient=dict(flat),
            parts={name: fmean(values) for name, values in parts.items()},
            parts_std={name: spread_of(values) for name, values in parts.items()},
        )
        speed = Speed(
            tokens_per_s=rollouts.tokens / round_s if round_s else None,
            generate_s=rollouts.seconds,
            train_s=report.seconds,
            round_s=round_s,
            done_at=time.time(),
        )
        training = msgspec.structs.replace(report, zero_advantage_own=flat.total())
        self.show(reward=reward, speed=speed, generation=rollouts.generation, training=training)

    def show_iteration(self, report: TrainReport) -> None:
        """Record a finished iteration without generation."""
        speed = Speed(train_s=report.seconds, round_s=report.seconds, done_at=time.time())
        self.show(speed=speed, training=report)

    def show_evaluation(self, counters: Counters, per_task: Mapping[str, float | None]) -> None:
        reward = msgspec.structs.replace(
            self.status.reward,
            eval_first=counters.reward_first,
            eval_last=counters.reward_last,
            eval_round=counters.evaluated_round,
            eval_tasks=dict(per_task),
        )
        self.show(reward=reward)

    def show_checkpoint(self, round: int) -> None:
        self.show(checkpoint=Saved(round, time.time()))

    def show_failed_checkpoint(self, why: str) -> None:
        """Record a failed attempt; the previous checkpoint is still the newest."""
        self.show(checkpoint=msgspec.structs.replace(self.status.checkpoint, error=why))

    def show_sharing(self, stats: ExchangeStats) -> None:
        """Take over the exchange's counters."""
        found = {
            **msgspec.to_builtins(stats),
            "headers": stats.headers_seen,
            "banned_peers": len(stats.banned_peers),
            "upload_mb_per_s": stats.upload_bytes_per_s / 1e6,
            "trained": self.status.exchange.trained,
            "starved": self._starving.advise(stats.accepted, stats.dropped, time.monotonic()),
        }
        sharing = msgspec.convert(found, Sharing)
        if sharing.starved and not self.status.exchange.starved:
            logger.warning("%s", sharing.starved)
        self.show(exchange=sharing, help=stats.help, receipts=stats.receipts, health=stats.health)

    def show_library(self, library: Borrower, state: CatchingUp) -> None:
        """Record what this node keeps of the swarm's library, and what it learnt from it."""
        self.show(
            library=LibraryStatus(
                kept=len(library.shelf),
                pages_served=library.pages.served,
                borrowed=library.groups,
                lenders=len(library.lenders),
                answers=state.answers,
                catching_up=state.phase == "on",
                rounds=state.rounds,
                rounds_worth=state.rounds_worth,
            )
        )

    async def look_at(self, host: Host, reach: Reach | None = None) -> None:
        """Ask the host for its state, peers and addresses. While it is down it has no peers.

        The log reports each change of the verdict on who can reach us once."""
        state = host.status()
        ends: Mapping[str, Sequence[str]] = {}
        addresses = self.status.network.addresses
        if state.state == "up":
            try:
                ends, addresses = await host.far_ends(), await host.addresses()
            except NetworkError as error:
                logger.debug("the network process did not respond: %s", error)
        self.peers_outside = len(ends.keys() - self._neighbours)
        network = Network(
            state.state, state.since, state.restarts, state.detail, len(ends), addresses,
            state.memory_restarts, dict(state.skipped), reach or Reach(), private=state.private,
            relay=RELAY_IN_WORDS if state.relays_for_others else "",
            connected=tuple(ConnectedPeer(peer, _distance(ends[peer])) for peer in sorted(ends)[:MOST_PEERS]),
        )  # fmt: skip
        before = self.status.network.reach.verdict
        short = short_invitation(self.status.swarm, network)
        self.show(network=msgspec.structs.replace(network, invitation=short))
        if network.reach.verdict not in ("unknown", before):
            self._log_reach()

    def _log_reach(self) -> None:
        network = self.status.network
        is_bad = network.reach.verdict == "nobody"
        logger.log(logging.WARNING if is_bad else logging.INFO, "%s", network.reach.as_line())
        if network.invitation:
            logger.info("%s joins with: %s", joins_from(self.status), invitation(self.status))
            logger.info("or: swarmnode join %s", network.invitation)

    def show(self, **parts: object) -> None:
        """Replaces these parts of the status, named by its fields."""
        self.status = msgspec.structs.replace(self.status, **parts)


STARVED_AFTER_S = 60.0
NOT_FETCHED = (Reason.UNAVAILABLE, Reason.TIMEOUT)
IN_VAIN = (
    *NOT_FETCHED, Reason.WRONG_BODY, Reason.BAD_COMPRESSION, Reason.MALFORMED_BODY, Reason.BODY_MISMATCH,
    Reason.NOT_DRAWABLE, Reason.NO_TOKENS, Reason.TOO_LONG, Reason.UNPLAYABLE, Reason.UNFINISHED,
    Reason.LONG_PROMPT, Reason.COPIED, Reason.UNSCORABLE, Reason.SCORE_TIMEOUT, Reason.PLAY_TIMEOUT,
)  # fmt: skip
"""Reasons why a fetch gave nothing, after which its author is asked less often."""


class Starving:
    """Notices that others announce groups of which none can be fetched or used."""

    def __init__(self) -> None:
        self._accepted = 0
        self._before = Counter[str]()
        """Failures, by reason, up to the last accepted group."""
        self._since_s: float | None = None

    def advise(self, accepted: int, dropped: Mapping[str, int], now_s: float) -> str:
        """Returns the problem and what to do, or "" while there is none. `accepted`: number of groups so far;
        `dropped`: the others by reason."""
        in_vain = Counter[str]({reason: dropped.get(reason, 0) for reason in IN_VAIN})
        if accepted > self._accepted:
            self._accepted, self._before, self._since_s = accepted, in_vain, None
        since = in_vain - self._before
        if since and self._since_s is None:
            self._since_s = now_s
        if self._since_s is None or now_s < self._since_s + STARVED_AFTER_S:
            return ""
        if since.keys() <= set(NOT_FETCHED):
            return (
                f"others announce groups, but none arrived for {STARVED_AFTER_S:.0f} s: no peer connected"
                " to both you and them passes them on; join a seed of this version, or forward a port (see"
                " `swarmnode doctor`)"
            )
        return (
            f"groups of others arrive, but none could be used for {STARVED_AFTER_S:.0f} s, so their authors"
            f" are asked less often: {in_words(since)}"
        )


def _distance(ends: Sequence[str]) -> str:
    """Returns how far away the nearest end of a peer is. Anything but an address is ignored."""
    found = set[str]()
    for end in ends:
        with suppress(NetworkError):
            found.add("relayed" if is_relayed(end) else scope_of(end))
    return next((one for one in ("machine", "lan", "public", "relayed") if one in found), "")


def _reward_by_task(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    means: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        if (mean := group.reward_mean) is not None:
            means[group.example.key.task].append(mean)
    return {task: fmean(found) for task, found in means.items()}


def _cause_of_no_gradient(group: RolloutGroup) -> str:
    """Returns why a group has no gradient, judged by its first reward."""
    known = [reward for reward in group.rewards if reward is not None]
    if not known:
        return "unscored"
    return "all_zero" if known[0] <= 0 else "all_full" if known[0] >= 1 else "all_equal"


def _mean_reward(groups: Sequence[RolloutGroup]) -> float | None:
    return mean_or_none(group.reward_mean for group in groups)


# ---- watchers ----


class Watcher(Protocol):
    """Follows the status of a node, or of all policies of a process."""

    def see(self, event: Occasion, status: NodeStatus) -> None:
        """Called after every round and every evaluation, and on every tick (about twice a second)."""
        ...

    def close(self) -> None: ...


class RoundLines:
    """Logs a line for each round. The live panel shows rounds itself and leaves these lines out."""

    logger = logging.getLogger("swarmnode.rounds")

    def see(self, event: Occasion, status: NodeStatus) -> None:
        if event == "round":
            self.logger.info("%s", round_line(status))

    def close(self) -> None:
        pass


class Watchers:
    """Several watchers as one. A watcher whose output is closed is dropped; the node continues."""

    def __init__(self, members: Sequence[Watcher]) -> None:
        self._members = list(members)

    def see(self, event: Occasion, status: NodeStatus) -> None:
        self._each(lambda member: member.see(event, status))

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, tell: Callable[[Watcher], None]) -> None:
        for member in tuple(self._members):
            try:
                tell(member)
            except OSError as error:
                self._members.remove(member)
                logger.warning("%s stopped, its output is closed: %s", type(member).__name__, error)


def round_line(status: NodeStatus) -> str:
    """Returns a round as one line: reward, data, speed, swarm."""
    training, progress = status.training, status.progress
    book = f", {training.replayed} of {training.book} answers in the book" if training.book else ""
    limit = f"/{progress.rounds_limit}" if progress.rounds_limit is not None else ""
    dropped = status.exchange.dropped
    not_needed = sum(count for reason, count in dropped.items() if reason in NOT_NEEDED)
    return (
        f"round {progress.round}{limit}  reward {figure(status.reward.own)} own"
        f" {figure(status.reward.external)} external"
        f"  trained on {training.own_groups} own + {training.external_groups} external groups{book}"
        f"  {figure(status.speed.tokens_per_s, '.0f')} tokens/s  {status.network.peers} peers"
        f"  accepted {status.exchange.accepted} not needed {not_needed}"
        f" dropped {sum(dropped.values()) - not_needed}"
    )
