"""Reactions to the loss of a member during an iteration: another path, a keeper for copies, a deadline.

Plan, who is lost -> [recovery] -> the driver's next attempt, state_service.py (whom copies go to), deadlines

All functions are pure: every member gets the same answer from the same facts. A path is repaired in place. A
lost node is replaced by a living replica of its stage that has a free slot; otherwise the stage is skipped,
which the model is trained for. The order of visits stays the same, and no micro-batch waits for a slot that
another one holds, so a repair cannot deadlock.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from swarmnode.extensions.pipeline.scheduling.instance import Instance, Route
from swarmnode.extensions.pipeline.scheduling.plan import Plan
from swarmnode.extensions.pipeline.scheduling.simulator import simulate


def repaired_path(
    plan: Plan, path: Route, lost: Collection[int], tried: Collection[int], load: Mapping[int, int]
) -> Route | None:
    """Return the path of the next attempt at a micro-batch that took `path`, or None.

    `lost`: nodes that are gone or did not answer. `tried`: living nodes that had no slot for it. Nodes in
    either are replaced by the nearest replica of their stage (hops to and from it, and its work) that has a
    free slot, or left out. `load`: by node, the visits that it holds now, as far as known. The slots of the
    plan's own agents are reserved even if they are not in use.

    A path has at least two stages as long as any untried node of another stage lives; if none lives, it
    consists of the data node alone. Returns None if the data node is lost or all living nodes have been
    tried; in the latter case, another attempt with `tried` empty may succeed later.

    >>> link = tuple(tuple(float(i != j) for j in range(4)) for i in range(4))
    >>> four = Instance(("a", "b", "c", "d"), (1.0,) * 4, link, (2,) * 4, ((0,), (1, 2), (3,)), 3, waves=1)
    >>> repaired_path(Plan(four, ((0, 1, 3),)), (0, 1, 3), lost={1}, tried=(), load={})
    (0, 2, 3)
    """
    gone = {*lost, *tried}
    if not path or path[0] in lost:
        return None
    instance = plan.instance
    stage_of, taken = instance.stage_of, _taken(plan, load)
    repaired = [path[0]]
    for position, node in enumerate(path[1:], 1):
        if node not in gone:
            repaired.append(node)
            continue
        after = next((later for later in path[position + 1 :] if later not in gone), path[0])
        free = [
            other
            for other in instance.stages[stage_of[node]]
            if other not in gone and taken[other] < instance.memory[other]
        ]
        if free:
            repaired.append(_nearest(instance, repaired[-1], after, free))
    if len(repaired) > 1:
        return tuple(repaired)
    return _shortest(instance, path[0], lost, gone, taken)


def _taken(plan: Plan, load: Mapping[int, int]) -> Counter[int]:
    """Return the taken slots of each node: those reserved for the plan's agents, or more if more are in
    use."""
    return Counter(node for path in plan.paths for node in path) | Counter(load)


def _nearest(instance: Instance, before: int, after: int, nodes: Sequence[int]) -> int:
    """Return the cheapest node to visit between two others, the first one among equals."""
    hop_s = instance.hop_s
    return min(
        nodes, key=lambda node: (hop_s[before][node] + hop_s[node][after] + instance.forward_s[node], node)
    )


def _shortest(
    instance: Instance, data_node: int, lost: Collection[int], gone: Collection[int], taken: Mapping[int, int]
) -> Route | None:
    """Return a path of two stages over the remaining nodes, to one that seems to have a free slot if
    possible."""
    others = [node for nodes in instance.stages[1:] for node in nodes if node not in lost]
    if not others:
        return (data_node,)
    willing = [node for node in others if node not in gone]
    free = [node for node in willing if taken[node] < instance.memory[node]]
    if not willing:
        return None
    return (data_node, _nearest(instance, data_node, data_node, free or willing))


@lru_cache(maxsize=8)
def neighbours(instance: Instance) -> tuple[int | None, ...]:
    """Return, by node, the node that keeps a copy of its state: as near as possible, and of another stage.

    Copies are spread evenly: each node chooses the nearest of the nodes that keep the fewest copies. Nodes of
    the largest stage choose first, because they have the least choice. So no node keeps more than one copy
    above the necessary minimum. None if the node is in no stage, or if there is no other stage.
    """
    hop_s, keeps = instance.hop_s, Counter[int]()
    keeper: list[int | None] = [None] * instance.node_count
    for nodes in sorted(instance.stages, key=len, reverse=True):
        others = [other for stage in instance.stages if stage is not nodes for other in stage]
        for node in sorted(nodes) if others else ():
            chosen = min(others, key=lambda each: (keeps[each], hop_s[node][each] + hop_s[each][node], each))
            keeps[chosen] += 1
            keeper[node] = chosen
    return tuple(keeper)


@lru_cache(maxsize=8)
def predicted_s(plan: Plan) -> tuple[tuple[float, ...], ...]:
    """Return [agent][wave]: seconds from the start of a micro-batch's first forward pass to the end of its
    last backward pass, including the time spent waiting for others.

    >>> link = ((0.0, 1.0), (1.0, 0.0))
    >>> two = Instance(("a", "b"), (1.0, 1.0), link, (1, 1), ((0,), (1,)), path_length=2, waves=1)
    >>> predicted_s(Plan(two, paths=((0, 1),)))
    ((9.25,),)
    """
    starts: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for task in simulate(plan).tasks:
        # Tasks are in order of start, and those of a micro-batch follow each other.
        starts.setdefault((task.agent, task.wave), task.start_s)
        ends[task.agent, task.wave] = task.end_s
    waves = range(plan.instance.waves)
    return tuple(
        tuple(ends[agent, wave] - starts[agent, wave] for wave in waves) for agent in range(len(plan.paths))
    )
