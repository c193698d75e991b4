"""Dictionaries that hold a bounded number of entries, so that strangers cannot make us remember more.

[BoundedDict] -> Traffic, Fetcher, RecentlySeen, OddPieces
"""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dictionary of at most `most` entries: the ones set last, in that order.

    >>> table = BoundedDict[str, int](2)
    >>> table["a"], table["b"], table["a"], table["c"] = 1, 2, 3, 4
    >>> dict(table)
    {'a': 3, 'c': 4}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
