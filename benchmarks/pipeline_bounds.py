"""Lower bounds of the makespan of any plan, against which a reported makespan is compared.

Instance -> [makespan_bound_s, free_map_bound_s] -> pipeline_schedule.py

Every bound here is a relaxation with its proof in the docstring, over all paths, orders and policies that
`violations` allows. The best of them is reported; none knows how long agents wait for each other between
nodes, so a plan above the bound may still be the best there is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf

from swarmnode.extensions.pipeline.scheduling.instance import Instance, agents, least_visits

ROUNDS = 150
"""Bound of the price updates of `_chain_bound_s`. Each gives a valid bound, and the best is kept."""

FOCUS = 20.0
"""Sharpness of the initial weights: data nodes whose agents need less time alone begin with less weight."""

SMALLEST = 1e-6
"""Smallest weight of an agent."""

LINKS_LOOKED_AT = 4_000_000
"""Work of `_chain_bound_s`, so that a large instance does not spend its planning time on its bound."""


def makespan_bound_s(instance: Instance, data_nodes: Sequence[int] | None = None) -> float:
    """Return a lower bound for plans of agents with these data nodes (default `agents(instance)`) on this
    stage map."""
    own = list(agents(instance) if data_nodes is None else data_nodes)
    stages = range(1, len(instance.stages))
    return max(
        _data_node_bound_s(instance, own),
        _chain_bound_s(instance, own),
        *(_stage_bound_s(instance, stage, len(own)) for stage in stages),
    )


def free_map_bound_s(instance: Instance, agent_count: int | None = None) -> float:
    """Return a lower bound for plans with this number of agents, on any stage map.

    Proof. A trip goes round a cycle of path_length different nodes and back, so it passes every link of the
    cycle in both directions. Split each link's two-way time evenly between its ends: a node on the cycle
    pays at least its work and half of its two quickest two-way links (of one link, twice, where the cycle
    has two nodes). All agents hold agent_count * path_length slots together; they cost at least the
    cheapest so many slots there are, and the slowest agent takes at least the mean.
    """
    count = len(agents(instance)) if agent_count is None else agent_count
    work = 1 + instance.backward_factor
    slots: list[float] = []
    for node in range(instance.node_count):
        two_way = sorted(
            instance.hop_s[node][i] + instance.hop_s[i][node] for i in range(instance.node_count) if i != node
        )
        quickest = two_way[:2] if instance.path_length > 2 else two_way[:1] * 2
        links_s = sum(quickest) / 2 if instance.path_length > 1 else 0.0
        slots += [work * instance.forward_s[node] + links_s] * instance.memory[node]
    cheapest = sum(sorted(slots)[: count * instance.path_length])
    loss_s = instance.loss_factor * min(instance.forward_s)
    return instance.waves * (cheapest / count + loss_s) + (instance.waves - 1) * instance.gap_s


def _data_node_bound_s(instance: Instance, own: Sequence[int]) -> float:
    """Bound by the data nodes: each runs forward, loss and backward of all its micro-batches, with gaps
    between."""
    bound_s = 0.0
    for node in set(own):
        work_s = instance.forward_s[node] * (1 + instance.loss_factor + instance.backward_factor)
        each_s = work_s + instance.first_gap_s + 2 * instance.gap_s
        bound_s = max(bound_s, own.count(node) * instance.waves * each_s - instance.gap_s)
    return bound_s


def _stage_bound_s(instance: Instance, stage: int, agent_count: int) -> float:
    """Bound by one stage: its nodes share the visits that it needs.

    Proof. Nothing reaches node v before a data node's forward and a hop to v, and after its last backward a
    hop and a data node's backward follow. In between, k visits take k * u_v with u_v = (forward + backward
    + 2 gaps), but for the last gap. With M the makespan: k_v <= (M - head - tail + gap) / u_v, and the k_v
    add up to the visits of all waves.
    """
    nodes = instance.stages[stage]
    visits = least_visits(instance, agent_count)[stage] * instance.waves
    if not visits:
        return 0.0
    others = [u for u in range(instance.node_count) if u not in nodes]
    first_s = min(instance.forward_s[d] for d in instance.stages[0])
    head_s = first_s + min(instance.hop_s[u][v] for u in others for v in nodes)
    tail_s = first_s * instance.backward_factor + min(instance.hop_s[v][u] for u in others for v in nodes)
    each_s = [(1 + instance.backward_factor) * instance.forward_s[v] + 2 * instance.gap_s for v in nodes]
    busy_s = visits / sum(1 / s for s in each_s) - instance.gap_s
    return head_s + busy_s + tail_s


@dataclass(slots=True)
class _Prices:
    """Multipliers of the relaxed rules; any values >= 0 give a valid bound, with `weight` normalised."""

    weight: dict[int, float]
    """Weight of an agent, by its data node; over all agents the weights add up to 1."""
    slot: list[float]
    """Price of one slot, by node."""
    visit: list[float]
    """Price of one needed visit, by stage."""


def _chain_bound_s(instance: Instance, own: Sequence[int]) -> float:
    """Lagrangian bound by the slowest agent's uncontended trips when slots are scarce.

    Proof. Let W be the waves. The k-th agent that a data node d starts (k = 0, 1, ...) starts no earlier
    than k * (forward + first_gap), needs W trips, and a gap passes between two of them. So for weights w_d
    >= 0 that add up to 1 over the agents, M >= sum over agents of w_d * (start + W * trip + (W - 1) * gap).
    The trips respect slots (visits of v <= memory) and shares (visits of a stage >= least_visits). Relax
    both with prices p_v, q_s >= 0: the sum is at least
        sum over agents of min over paths [w_d * W * trip + sum over its nodes v of (p_v - q_stage(v))]
        - sum p_v * memory_v + sum q_s * least_s + the constant part.
    Each minimum is a shortest path by dynamic programming. Prices follow the subgradient;
    whatever they are, the value is a bound.
    """
    search = _ShortestTrips(instance)
    counts = {node: own.count(node) for node in dict.fromkeys(own)}
    least = least_visits(instance, len(own))
    fixed_s = {
        d: (count - 1) / 2 * (instance.forward_s[d] + instance.first_gap_s)
        + (instance.waves - 1) * instance.gap_s
        + instance.waves * instance.loss_factor * instance.forward_s[d]
        for d, count in counts.items()
    }
    # A data node alone: without prices, its last agent to start takes at least its shortest trips.
    free = [0.0] * instance.node_count
    alone_s = {
        d: fixed_s[d]
        + (count - 1) / 2 * (instance.forward_s[d] + instance.first_gap_s)
        + instance.waves * search.shortest(d, free)[0]
        for d, count in counts.items()
    }
    slowest_s = max(alone_s.values())
    # Weights begin near the slowest data node, whose own bound is a good one already.
    weight = {d: exp(FOCUS * (s - slowest_s) / slowest_s) for d, s in alone_s.items()}
    prices = _Prices(weight, [0.0] * instance.node_count, [0.0] * len(instance.stages))
    _normalise(prices.weight, counts)
    best_s = slowest_s
    rounds = min(ROUNDS, max(3, LINKS_LOOKED_AT // (search.links * len(counts))))
    for number in range(rounds):
        value_s, taken, trips_s = _value(instance, prices, counts, fixed_s, least, search)
        best_s = max(best_s, value_s)
        _follow(instance, prices, counts, taken, trips_s, least, (1 - number / rounds) * best_s)
    return best_s


def _value(
    instance: Instance,
    prices: _Prices,
    counts: dict[int, int],
    fixed_s: dict[int, float],
    least: Sequence[int],
    search: "_ShortestTrips",
) -> tuple[float, list[float], dict[int, float]]:
    """Return the bound at these prices, the visits of every node that attain it, and the finish of each data
    node's agents."""
    stage_of, waves = instance.stage_of, instance.waves
    value_s = -sum(p * m for p, m in zip(prices.slot, instance.memory, strict=True))
    value_s += sum(q * n for q, n in zip(prices.visit, least, strict=True))
    visits = [0.0] * instance.node_count
    finishes_s: dict[int, float] = {}
    for d, count in counts.items():
        scale = prices.weight[d] * waves
        extra = [(p - prices.visit[stage]) / scale for p, stage in zip(prices.slot, stage_of, strict=True)]
        cost_s, path = search.shortest(d, extra)
        value_s += count * prices.weight[d] * (fixed_s[d] + waves * cost_s)
        for node in path[1:]:
            visits[node] += count
        finishes_s[d] = fixed_s[d] + waves * (cost_s - sum(extra[node] for node in path[1:]))
    return value_s, visits, finishes_s


def _follow(
    instance: Instance,
    prices: _Prices,
    counts: dict[int, int],
    visits: Sequence[float],
    finishes_s: dict[int, float],
    least: Sequence[int],
    step_s: float,
) -> None:
    """Raise the prices of slots and visits that are over-used, and the weights of slow data nodes."""
    agent_count = sum(counts.values())
    mean_s = sum(finishes_s[d] * count for d, count in counts.items()) / agent_count
    for d in counts:
        prices.weight[d] *= exp(0.15 * (finishes_s[d] - mean_s) / mean_s)
    _normalise(prices.weight, counts)
    rate = 0.02 * step_s / agent_count
    for stage, nodes in enumerate(instance.stages[1:], start=1):
        for node in nodes:
            excess = (visits[node] - instance.memory[node]) / instance.memory[node]
            prices.slot[node] = max(prices.slot[node] + rate * excess, 0.0)
        if least[stage]:
            lack = (least[stage] - sum(visits[node] for node in nodes)) / least[stage]
            prices.visit[stage] = max(prices.visit[stage] + rate * lack, 0.0)


def _normalise(weight: dict[int, float], counts: dict[int, int]) -> None:
    """Scale the weights to a sum of 1 over all agents, none of them zero, as they are divided by."""
    for _ in range(2):
        total = sum(weight[d] * count for d, count in counts.items())
        for d in counts:
            weight[d] = max(weight[d] / total, SMALLEST)
    total = sum(weight[d] * count for d, count in counts.items())
    for d in counts:
        weight[d] /= total


class _ShortestTrips:
    """Finds the cheapest uncontended trip from a data node when nodes have an extra cost."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._work_s = [(1 + instance.backward_factor) * s for s in instance.forward_s]
        reach = instance.max_gap
        last = len(instance.stages) - 1
        self._before: list[list[int]] = [[]]
        for stage in range(1, last + 1):
            former = [s for s in range(1, stage) if stage - s <= reach]
            self._before.append([node for s in former for node in instance.stages[s]])
        self._starts = [node for nodes in instance.stages[1 : reach + 1] for node in nodes]
        self.links = 1 + instance.path_length * sum(
            len(before) * len(nodes) for before, nodes in zip(self._before, instance.stages, strict=True)
        )

    def shortest(self, data_node: int, extra: Sequence[float]) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of the trip without the loss, `extra` of each visited node but the first
        included, and its path."""
        instance, hop_s = self._instance, self._instance.hop_s
        base_s = self._work_s[data_node]
        wanted = instance.path_length - 1
        if wanted == 0:
            return base_s + 2 * hop_s[data_node][data_node], (data_node,)
        there = hop_s[data_node]
        cost = {v: base_s + there[v] + hop_s[v][data_node] + self._work_s[v] + extra[v] for v in self._starts}
        paths: dict[int, tuple[int, ...]] = {v: (data_node, v) for v in cost}
        for _ in range(wanted - 1):
            cost, paths = self._longer(cost, paths, extra)
        ends = [(s + hop_s[v][data_node] + hop_s[data_node][v], v) for v, s in cost.items()]
        cost_s, end = min(ends, default=(inf, -1))
        return cost_s, paths.get(end, (data_node,))

    def _longer(
        self, cost: dict[int, float], paths: dict[int, tuple[int, ...]], extra: Sequence[float]
    ) -> tuple[dict[int, float], dict[int, tuple[int, ...]]]:
        hop_s = self._instance.hop_s
        new_cost: dict[int, float] = {}
        new_paths: dict[int, tuple[int, ...]] = {}
        for stage, before in enumerate(self._before):
            known = [(cost[u], u) for u in before if u in cost]
            if not known:
                continue
            for v in self._instance.stages[stage]:
                cost_s, u = min((s + hop_s[u][v] + hop_s[v][u], u) for s, u in known)
                new_cost[v] = cost_s + self._work_s[v] + extra[v]
                new_paths[v] = (*paths[u], v)
        return new_cost, new_paths
