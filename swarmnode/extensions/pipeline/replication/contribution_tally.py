"""Decides which contributions of an iteration count, from what the answering replicas say they hold. Pure.

replica_exchange.py (contributions that came, what others hold) -> [combined] -> Combined

A contribution counts if more than half of the answering replicas hold it, so one from a replica that died
half-way is in all sums or in none. A contribution is left out if it claims many times the others' tokens (its
weight), or if its gradient per token is many times larger. The reference is the lower median. With two
replicas that is the smaller one: both must get the same answer, and a missing step costs less than a wrong
one. A replica that tells different stories may leave the others with different sums, so weights are compared
after the step (replica_vote.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from swarmnode.extensions.pipeline.replication.contributions import Contribution
from swarmnode.extensions.pipeline.replication.gradient_exchange import Combined, ContributionFault
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum

MAX_WEIGHT_RATIO = 8.0
"""Largest ratio of a replica's tokens to those of the (lower) median one. Slots limit how unequal the plan
makes them; this limits how much more weight a liar can have than an honest replica."""

Held = Mapping[str, str]
"""By author, the digest of the contribution that a replica holds."""


def combined(
    came: Mapping[str, Contribution],
    faults: Mapping[str, str],
    held: Sequence[Held],
    *,
    max_norm_ratio: float,
) -> Combined:
    """Return the sum, added in the order of peer ids: the same additions, and so the same bits, everywhere.

    `came`: contributions by author, including our own. `faults`: by replica, the reason why no sound
    contribution came. `held`: the contributions that each answering replica holds, including ours.
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
    """Return the authors with at most this multiple of the lower median size. The median ignores sizes of
    zero."""
    sizes = sorted(found for one in authors if (found := size(one)) > 0)
    if not sizes:
        return list(authors)
    reference = sizes[(len(sizes) - 1) // 2]
    return [one for one in authors if size(one) <= max_ratio * reference]
