"""The dynamic programme behind partitioning: finds the layers and members of each stage, in integers.

partition.py (members and layers on a grid) -> [best_cut] -> LayerDivision

With members sorted by memory, stages 1..S-1 are held by consecutive runs of members. Given a limit on the
busiest stage, a table over (stage, layers placed) stores the fewest members used: using fewer is never worse
for the stages that follow. Bisection finds the smallest limit. Members of stage 0 are chosen greedily in two
ways, largest first and best fit, so the result is exact for given members of stage 0 and runs in that order.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

SPEED_GRID = 1000
"""Speeds are rounded to thousandths of the reference device."""
UNREACHABLE = 10**24
"""A speed above that of any group of members."""


@dataclass(frozen=True, slots=True)
class GridMember:
    """A member with its numbers rounded to the grid."""

    peer_id: str
    free_bytes: int
    speed: int
    holds_data: bool


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The costs of stages, as functions of their number of layers."""

    layers: int
    layer_bytes: int
    """Bytes of a layer, with the activations of all micro-batches in flight."""
    layer_work: int
    """Picoseconds of one token through a layer."""
    ends_bytes: int
    ends_work: int
    path_length: int
    stages: int
    least: int
    """Smallest number of layers of a stage."""
    most: int

    @property
    def beginnings(self) -> range:
        """Possible numbers of layers in stage 0. One is enough, because stage 0 also holds the ends."""
        return range(1, min(self.most, self.layers - self.stages + 1) + 1)

    def first_bytes(self, count: int) -> int:
        return self.ends_bytes + count * self.layer_bytes

    def first_load(self, count: int) -> int:
        """Return the load of stage 0. Loads share the denominator S - 1: every micro-batch visits stage 0."""
        return (self.ends_work + count * self.layer_work) * (self.stages - 1)

    def load_of(self, count: int) -> int:
        return count * self.layer_work * (self.path_length - 1)


@dataclass(frozen=True, slots=True)
class LayerDivision:
    """A solution: the end of each stage, and its members."""

    ends: tuple[int, ...]
    groups: tuple[tuple[GridMember, ...], ...]


def best_cut(sums: LayerSums, peers: tuple[GridMember, ...]) -> LayerDivision | None:
    """Return the even cut whose busiest stage is fastest (the most even one among equals), or else any cut,
    or else None.

    In an even cut, each stage has half to one and a half times the mean number of layers, so skips are alike.
    """
    mean, more = sums.layers // sums.stages, -(-sums.layers // sums.stages)
    for band in (replace(sums, least=max(1, mean // 2), most=more + mean // 2), sums):
        found = _fastest(band, peers)
        if found is not None:
            limit, cut = found
            for slack in range(mean // 2):
                narrow = replace(sums, least=max(1, mean - slack), most=more + slack)
                for end in reversed(narrow.beginnings):
                    cut_there = feasible(narrow, peers, end, limit)
                    if cut_there is not None:
                        return cut_there
            return cut
    return None


def _fastest(sums: LayerSums, peers: tuple[GridMember, ...]) -> tuple[int, LayerDivision] | None:
    """Return the smallest limit and a cut that keeps it, found by bisection for each number of layers that
    stage 0 may have."""
    best: tuple[int, LayerDivision] | None = None
    for end in sums.beginnings:
        high = memory_only_limit(sums) if best is None else best[0] - 1
        found = partial(feasible, sums, peers, end)
        if (cut := found(high)) is None:
            continue
        limit = bisect_left(range(high), True, key=lambda limit: found(limit) is not None)
        best = limit, found(limit) or cut
        if limit == 0:
            break
    return best


def memory_only_limit(sums: LayerSums) -> int:
    """Return a limit that even the slowest member keeps with all layers, so that only memory matters."""
    return (sums.ends_work + sums.layers * sums.layer_work) * sums.stages * SPEED_GRID


def feasible(sums: LayerSums, peers: tuple[GridMember, ...], end: int, limit: int) -> LayerDivision | None:
    """Return a cut with layers[:end] in stage 0 whose busiest stage takes at most `limit`, or None if there
    is none."""
    for group in _first_groups(sums, peers, end, limit):
        rest = tuple(peer for peer in peers if peer not in group)
        found = _others(sums, rest, end, limit)
        if found is not None:
            return LayerDivision((end, *found.ends), (group, *found.groups))
    return None


def _first_groups(
    sums: LayerSums, peers: tuple[GridMember, ...], end: int, limit: int
) -> Iterator[tuple[GridMember, ...]]:
    """Yield groups of members for stage 0: first the largest members, then the smallest that fit, which leave
    the large ones free."""
    need, load = sums.first_bytes(end), sums.first_load(end)
    able = [peer for peer in peers if peer.holds_data and peer.free_bytes >= need]
    for order in (able, able[::-1]):
        speeds = list(accumulate(peer.speed for peer in order))
        taken = bisect_left(speeds, _speed_for(load, limit))
        if taken < len(order):
            yield tuple(order[: taken + 1])


def _others(sums: LayerSums, peers: tuple[GridMember, ...], start: int, limit: int) -> LayerDivision | None:
    """Divide layers[start:] into stages 1.. with as few of `peers` (largest memory first) as possible."""
    speeds = [0, *accumulate(peer.speed for peer in peers)]
    # By layers placed, the fewest members used, and the end and the last member of each stage on the way.
    used: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {start: (0, ())}
    for stages_left in reversed(range(sums.stages - 1)):
        ends: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        for first, (taken, cut) in used.items():
            if taken == len(peers):
                continue
            last = min(first + sums.most, sums.layers - stages_left * sums.least)
            for end in range(first + sums.least, last + 1):
                need = (end - first) * sums.layer_bytes
                if need > peers[taken].free_bytes:
                    break
                wanted = speeds[taken] + _speed_for(sums.load_of(end - first), limit)
                count = max(taken + 1, bisect_left(speeds, wanted))
                if count > len(peers) or need > peers[count - 1].free_bytes:
                    continue
                if end not in ends or count < ends[end][0]:
                    ends[end] = count, (*cut, (end, count))
        used = ends
    if sums.layers not in used:
        return None
    _, cut = used[sums.layers]
    groups = (peers[before:count] for (_, before), (_, count) in pairwise(((start, 0), *cut)))
    return LayerDivision(tuple(end for end, _ in cut), tuple(groups))


def _speed_for(load: int, limit: int) -> int:
    """Return the lowest speed at which a load keeps the limit."""
    return max(1, -(-load * SPEED_GRID // limit)) if limit > 0 else UNREACHABLE
