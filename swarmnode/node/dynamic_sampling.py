"""How many more groups to ask for: DAPO's dynamic sampling as a decision (Yu et al. 2025, section 3.2).

generated groups -> [more_groups] -> generate that many more, or train

A group whose rewards are all equal has no gradient. Left in its place it makes the batch smaller and its
gradient noisier, and the better the policy becomes the more of them there are.
"""

from math import floor


def more_groups(wanted: int, with_gradient: int, asked_so_far: int, factor: float) -> int:
    """Groups to ask for now; 0: enough have a gradient, or the bound is reached, so train on what there is.

    `wanted` groups should have a gradient, `with_gradient` have one of the `asked_so_far` of this round, and
    never more than `factor * wanted` are asked for in all. Sized by the share that was useful so far. One
    imagined useful group is counted with the measured ones: so a round begins with as many as are wanted,
    there is a share before there is a measurement, and a round without luck asks for some and not at once for
    all. Every answer above 0 uses up part of the bound, so asking again and again ends.

    >>> more_groups(8, 0, 0, factor=3.0), more_groups(8, 4, 8, factor=3.0), more_groups(8, 8, 16, factor=3.0)
    (8, 8, 0)
    >>> more_groups(8, 4, 8, factor=1.0)
    0
    """
    missing = wanted - with_gradient
    left = floor(factor * wanted) - asked_so_far
    if missing <= 0 or left <= 0:
        return 0
    # missing / useful share, rounded up, in whole numbers: the same on every machine.
    needed = -(-missing * (asked_so_far + 1) // (with_gradient + 1))
    return min(left, needed)
