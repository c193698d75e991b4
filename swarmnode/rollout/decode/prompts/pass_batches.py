"""Groups sequences that share a forward pass while none of them has keys and values yet.

prompt_store.py, pipeline stages -> [alike, within] -> batches of bounded size
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

BATCH_TOKENS = 2048
"""The most tokens of one forward pass over whole sequences, with padding: enough to fill a processor, few
enough to keep."""

PADDING = 16
"""The greatest difference in length, in tokens, between sequences of one batch."""

LONG = 512
"""Length from which only equally long sequences share a batch: such a batch needs no mask, which is
quadratic."""


def alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields indices of sequences of similar length, longest first, each batch within `BATCH_TOKENS` (or a
    single one).

    >>> list(alike([3, 700, 5, 40]))
    [[1], [3], [2, 0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else lengths[index]
        allowed = PADDING if longest < LONG else 0
        if batch and ((len(batch) + 1) * longest > BATCH_TOKENS or longest - lengths[index] > allowed):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def within(items: Sequence[T], tokens: Sequence[int]) -> Iterator[list[T]]:
    """Yields the items in their order, in batches within `BATCH_TOKENS` (or of a single one).

    >>> list(within("abc", [2000, 40, 2009]))
    [['a', 'b'], ['c']]
    """
    batch: list[T] = []
    total = 0
    for item, count in zip(items, tokens, strict=True):
        if batch and total + count > BATCH_TOKENS:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += count
    if batch:
        yield batch
