"""Which headers to fetch, and what is still fresh: the decisions of the exchange, as pure functions.

pool -> [choose] -> Fetcher;   pool, buffer -> [is_fresh] -> leave or stay

The paper's rule (SAPO section 5): leave out groups without advantage, then sample uniformly over all others.
Ours is the same, drawn in two steps: an author, uniformly among those who have headers waiting; then one of
that author's headers, uniformly. When authors announce equally much, each header is as likely as under the
paper's rule. When they do not, a node that announces a thousand headers is no likelier to be heard than one
that announces ten: flooding buys nothing, and a fast node does not drown the others. Beyond the spread that
the paper asks for, no claimed reward or model size enters into the choice: a claim costs its author nothing.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from swarmnode.exchange.messages import Arrival

T = TypeVar("T")


def choose(
    waiting: Mapping[str, Sequence[T]], may_ask: Callable[[str], bool], rng: random.Random
) -> T | None:
    """One waiting header of an author who may be asked now, or None.

    >>> choose({"a": ["header"], "b": []}, lambda author: True, random.Random(0))
    'header'
    """
    authors = [author for author, headers in waiting.items() if headers and may_ask(author)]
    if not authors:
        return None
    return rng.choice(waiting[rng.choice(authors)])


def is_fresh(
    arrival: Arrival, now: float, policy_version: int, *, max_age_s: float, max_age_versions: int
) -> bool:
    """Whether what arrived then may still be trained on.

    >>> is_fresh(Arrival(at=100.0, policy_version=3), 110.0, 5, max_age_s=60.0, max_age_versions=2)
    True
    """
    return now - arrival.at <= max_age_s and policy_version - arrival.policy_version <= max_age_versions
