"""Chooses the stages that a prompt's completions visit, and the members that currently hold them. Pure.

plan -> [routing] -> chain.py, pipeline_engine.py

The path is part of the policy, so it depends only on the prompt: all completions of a group take the same
path, whichever member samples or resumes them. The replica that serves a stage may change at any time, since
replicas are equal.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers

ChoosePath = Callable[[Sequence[int]], StagePath]
"""Token ids of a prompt -> the path of its completions."""

PlanNode = tuple[str, int]
"""Digest of a plan, and the number of a node in that plan."""


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that currently hold the stages of a path."""

    stages: StagePath
    nodes: tuple[int, ...]
    """Nodes in order of visit, starting with the sampling node."""
    plan: str
    """Digest of the plan in which the nodes have these numbers."""


def path_of_prompt(paths: Sequence[StagePath], prompt_ids: Sequence[int]) -> StagePath:
    """Return one of the paths by a hash of the prompt, each about as often as it occurs in `paths`.

    >>> path_of_prompt([(0, 1), (0, 2)], [5, 6]) == path_of_prompt([(0, 1), (0, 2)], [5, 6])
    True
    """
    data = b"".join(token.to_bytes(4, "big") for token in prompt_ids)
    return paths[int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") % len(paths)]


def route_along(members: PlanMembers, stages: StagePath, lost: Collection[int]) -> Route | None:
    """Return the route of a path without lost nodes, and without stages that have no other nodes.

    Replicas take turns over the paths. Returns None if the plan has no such stages.
    """
    if stages[:1] != (0,) or len(set(stages)) < len(stages) or not set(stages) <= set(members.stage_of):
        return None
    nodes = [members.own]
    for stage in stages[1:]:
        holders = [node for node, held in enumerate(members.stage_of) if held == stage and node not in lost]
        if holders:
            nodes.append(holders[_turn(members.own, stages) % len(holders)])
    return Route(tuple(members.stage_of[node] for node in nodes), tuple(nodes), members.plan)


def _turn(own: int, stages: StagePath) -> int:
    digest = hashlib.blake2b(f"{own}/{stages}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
