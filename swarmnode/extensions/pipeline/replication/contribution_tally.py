"""Decides which contributions of an iteration count, by what the replicas that answer say they hold. Pure.

replica_exchange.py (contributions that came, what others hold) -> [combined] -> Combined

What more than half of those that answer hold counts, so a replica that died half-way is in no sum or in all
of them. Out is one that claims many times the others' tokens (they are its weight), or whose gradient a token
is many times larger. The reference is the lower median: with two replicas the smaller one, since both must
come to the same answer, and a step left out costs less than one gone wrong. Whoever tells two stories may
leave the others with different sums: the weights after the step are compared (replica_vote.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swarmnode.extensions.pipeline.replication.contributions import Contribution
from swarmnode.extensions.pipeline.replication.gradient_exchange import Combined, ContributionFault
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum

MAX_WEIGHT_RATIO = 8.0
"""Largest ratio of a replica's tokens to those of the (lower) median one. Slots bound how unequal the plan
makes them; this bounds how much more than an honest replica a liar can weigh."""

Held = Mapping[str, str]
"""By author, the digest of the contribution that a replica holds."""


def combined(
    came: Mapping[str, Contribution],
    faults: Mapping[str, str],
    held: Sequence[Held],
    *,
    max_norm_ratio: float,
) -> Combined:
    """Return the sum in the order of the peer ids: the same additions at every replica, so the same bits.

    `came`: by author, our own among them. `faults`: of replicas from which nothing sound came. `held`: what
    each replica that answers holds, ours among them.
    """
    votes = Counter(each for one in held for each in one.items())
    known = [author for author in sorted(came) if 2 * votes[author, came[author].digest] > len(held)]
    weighed = _within(known, MAX_WEIGHT_RATIO, lambda author: float(came[author].sum.tokens))
    chosen = _within(weighed, max_norm_ratio, lambda one: came[one].norm / max(came[one].sum.tokens, 1))
    rejected = dict(faults)
    for author in came:
        if author not in known:
            rejected[author] = ContributionFault.LATE
        elif author not in weighed:
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
