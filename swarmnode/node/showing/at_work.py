"""The verdict on a running node: it works, waits for a reason, or has stopped making progress.

node_status.py -> [at_work] -> `swarmnode status --healthy` -> HEALTHCHECK of docker/Dockerfile

An open port says little: a node whose engine hangs still answers. So the verdict depends on when the last
round was done. A node that waits and says for what, or was paused, is healthy.
"""

from swarmnode.node.showing.node_status import NodeStatus

PATIENCE_S = 1800.0
"""A round, a download or an evaluation may take this long without any sign."""

PATIENCE_ROUNDS = 10.0
"""Or this many times the length of the last round, if that is longer."""

WAITS = ("paused", "resting", "waiting", "serving", "stopped")
"""Prefixes of the phases in which no round is expected; their detail says why."""

NETWORK_PATIENCE_S = 120.0
"""Time within which the network of a seed should be up again."""


def at_work(status: NodeStatus, now_s: float) -> tuple[bool, str]:
    """Returns True if the node works, and in words what it does or for how long it has made no progress."""
    doing = f"{status.phase.name}, {status.phase.detail}" if status.phase.detail else status.phase.name
    if not status.learns:
        down = status.network.state != "up" and now_s - status.network.since > NETWORK_PATIENCE_S
        return not down, f"network {status.network.state}, {status.network.peers} peers"
    if status.phase.name.startswith(WAITS):
        return True, doing
    heard_at = max(status.phase.since, status.speed.done_at or 0.0)
    quiet_s = now_s - heard_at
    patience_s = max(PATIENCE_S, PATIENCE_ROUNDS * (status.speed.round_s or 0.0))
    if quiet_s > patience_s:
        return False, f"no progress for {quiet_s / 60:.0f} min: {doing}"
    return True, f"round {status.progress.round} is done, {doing}"
