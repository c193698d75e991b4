"""One member's part in a plan: which node it is, and who holds the same stage.

planning.py (AgreedPlan) -> own_stage.py -> [Assignment] -> pipeline_member.py, replica_answers.py
"""

from dataclasses import dataclass

from swarmnode.extensions.pipeline.scheduling.plan import Plan


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member's position in a plan, from an iteration on."""

    plan: Plan
    digest: str
    """Digest of the plan (plan.digest)."""
    peers: tuple[str, ...]
    """The peer id of each node of the plan's instance."""
    own: int
    """The number of our node."""
    iteration: int
    """The first iteration that runs under this plan: optimizer steps taken before it."""

    @property
    def stage(self) -> int:
        return self.plan.instance.stage_of[self.own]

    @property
    def replicas(self) -> tuple[str, ...]:
        """Peer ids of the members of our stage, our own among them."""
        return tuple(self.peers[node] for node in self.plan.instance.stages[self.stage])

    @property
    def data_nodes(self) -> frozenset[int]:
        """Nodes that start micro-batches under this plan."""
        return frozenset(path[0] for path in self.plan.paths)
