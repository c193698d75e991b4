"""Which sequences share a forward pass, when none of them has keys and values yet.

prefill.py, scoring.py, fallback.py -> [batches]
"""

from collections.abc import Iterator, Sequence

BATCH_TOKENS = 2048
"""Tokens of one forward pass over whole sequences, with padding: enough to fill a processor, few enough to
keep."""

PADDING = 16
"""Sequences of one batch differ in length by at most this."""

LONG = 512
"""From this length on only sequences of equal length share a batch: it needs no mask, which is quadratic."""

LOGITS_AT_ONCE = 1 << 24
"""Logits held at once: 64 MiB in float32."""


def alike(lengths: Sequence[int], padding: int = PADDING) -> Iterator[list[int]]:
    """Indices of sequences of similar length, longest first, each batch within `BATCH_TOKENS` (or of one).

    >>> list(alike([3, 700, 5, 40]))
    [[1], [3], [2, 0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else lengths[index]
        allowed = padding if longest < LONG else 0
        if batch and ((len(batch) + 1) * longest > BATCH_TOKENS or longest - lengths[index] > allowed):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
