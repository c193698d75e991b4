"""Decides which contributions of an iteration count. Pure.

replica_exchange.py (contributions that came) -> [combined] -> Combined

Out is one that claims many times the others' tokens (they are its weight), or whose gradient a token is many
times larger. The reference is the lower median: with two replicas the smaller one, since both must come to
the same answer, and a step left out costs less than one gone wrong. A replica that died half-way, or tells
two stories, may leave the others with different sums: the weights after the step are compared
(replica_vote.py).
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swarmnode.extensions.pipeline.replication.contributions import Contribution
from swarmnode.extensions.pipeline.replication.gradient_exchange import Combined, ContributionFault
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum

MAX_WEIGHT_RATIO = 8.0
"""Largest ratio of a replica's tokens to those of the (lower) median one. Slots bound how unequal the plan
makes them; this bounds how much more than an honest replica a liar can weigh."""


def combined(
    came: Mapping[str, Contribution],
    faults: Mapping[str, ContributionFault],
    *,
    max_norm_ratio: float,
) -> Combined:
    """Return the sum in the order of the peer ids: the same additions at every replica, so the same bits.

    `came`: by author, our own among them. `faults`: of replicas from which nothing sound came.
    """
    weighed = _within(sorted(came), MAX_WEIGHT_RATIO, lambda author: float(came[author].sum.tokens))
    chosen = _within(weighed, max_norm_ratio, lambda one: came[one].norm / max(came[one].sum.tokens, 1))
    rejected = dict(faults)
    for author in came:
        if author not in weighed:
            rejected[author] = ContributionFault.WEIGHT
        elif author not in chosen:
            rejected[author] = ContributionFault.NORM
    return Combined(sum_in_order([came[author].sum for author in chosen]), tuple(chosen), rejected)


def sum_in_order(sums: Sequence[GradientSum]) -> GradientSum:
    """Return the sum that one member would have if it had seen all micro-batches of these replicas, in new
    tensors."""
    total: dict[str, Tensor] = {}
    for one in sums:
        for name, tensor in one.tensors.items():
            if name in total:
                total[name].add_(tensor)
            else:
                total[name] = tensor.clone()
    return GradientSum(total, sum(one.tokens for one in sums), sum(one.visits for one in sums))


def _within(authors: Sequence[str], max_ratio: float, size: Callable[[str], float]) -> list[str]:
    """Return the authors with at most this multiple of the lower median size. Sizes of zero do not enter the
    median."""
    sizes = sorted(found for one in authors if (found := size(one)) > 0)
    if not sizes:
        return list(authors)
    reference = sizes[(len(sizes) - 1) // 2]
    return [one for one in authors if size(one) <= max_ratio * reference]
