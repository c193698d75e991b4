"""One member's part in a plan: the number of its node, and the members that hold the same stage.

planning.py (AgreedPlan) -> own_stage.py -> [Assignment] -> pipeline_member.py, replica_answers.py
"""

from dataclasses import dataclass

from swarmnode.extensions.pipeline.scheduling.plan import Plan


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member's position in a plan, starting with one iteration."""

    plan: Plan
    digest: str
    """Digest of the plan (plan.digest)."""
    peers: tuple[str, ...]
    """Peer ids of all nodes in the plan's instance, by node number."""
    own: int
    """The number of our node."""
    iteration: int
    """The first iteration under this plan: the number of optimizer steps taken before it."""

    @property
    def stage(self) -> int:
        return self.plan.instance.stage_of[self.own]

    @property
    def replicas(self) -> tuple[str, ...]:
        """Peer ids of all members of our stage, including our own."""
        return tuple(self.peers[node] for node in self.plan.instance.stages[self.stage])

    @property
    def data_nodes(self) -> frozenset[int]:
        """Nodes that start micro-batches under this plan."""
        return frozenset(path[0] for path in self.plan.paths)
