"""Decides which headers to fetch, which groups to draw, and how long to wait; all of it is pure.

pool -> [choose] -> Fetcher;   buffer -> [draw] -> trainer;   pool, buffer -> [is_fresh] -> leave or stay

The paper's rule (SAPO section 5) is to leave out groups without advantage and to sample uniformly from all
others. It assumes a swarm whose members are known. Here an identity costs nothing, so the rule applies to
authors that have earned it, and the part of all others is bounded for all of them together, not one by one:

- An author is *proven* once PROVEN_AFTER groups were accepted from it, *slow* if it is proven but was late or
  delivered nothing the last time, and a *newcomer* otherwise. Slow authors together and newcomers together
  each have a share of the fetches under way; the rest is for proven ones. A thousand identities that announce
  and never deliver occupy as much as one.
- All proven authors are equally likely to be chosen, and so are all slow ones; then one of the author's
  headers is chosen. A node that announces a thousand headers is no likelier to be heard than one that
  announces ten. Only authors whose groups take our judge longer are asked less often, so that each has the
  same time of it.
- Newcomers are tried in order of their cost: fewest failures in a row, then groups that are quick to judge,
  then most groups accepted, then a connection to us (which is not free); ties are broken by lot.
- The choice among an author's headers follows our own need, with a preference for tasks that we fail on. The
  author is chosen first, so nobody is heard more for announcing what we need, or more of it.
- In a draw each author has a share, and newcomers together have one.

Apart from the spread that the paper asks for, no claimed reward or model size affects what is fetched or
drawn: a claim costs its author nothing.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import DELAYED_SHARE, LEAST_NEED, MAX_WAIT_SHARE, NEWCOMER_SHARE, THRIFTY_S
from swarmnode.exchange.messages import Arrival
from swarmnode.exchange.peers.reputation import Trust


@dataclass(frozen=True, slots=True)
class Candidate:
    """An author that has headers waiting and may be asked now."""

    author: str
    trust: Trust
    failures: int = 0
    """Fetches in a row that gave us nothing."""
    accepted: int = 0
    connected: bool = False
    """We hold a connection to it, or to the peer that gave us its last body."""
    judge_s: float = 0.0
    """Seconds that judging one of its groups takes."""


def choose(
    candidates: Sequence[Candidate], running: Mapping[Trust, int], slots: int, rng: random.Random
) -> Candidate | None:
    """Returns the author to fetch from next, or None if there is none to fetch from. `running`: the fetches
    under way, by the trust in their authors; `slots`: the most that there may be.

    >>> known, stranger = Candidate("known", "proven"), Candidate("stranger", "newcomer")
    >>> choose([known, stranger], {"newcomer": 1}, 4, random.Random(0))
    Candidate(author='known', trust='proven', failures=0, accepted=0, connected=False, judge_s=0.0)
    """
    free = {trust for trust in ("neighbour", "proven", "slow", "newcomer") if _is_free(trust, running, slots)}
    first = [one for one in candidates if one.trust in ("neighbour", "proven") and one.trust in free]
    slow = [one for one in candidates if one.trust == "slow" and "slow" in free]
    new = [one for one in candidates if one.trust == "newcomer" and "newcomer" in free]
    if new and (rng.random() < NEWCOMER_SHARE or not (first or slow)):
        return rng.choice(_cheapest(new))
    if first:
        return _by_time(first, rng)
    return _by_time(slow, rng) if slow else None


def _by_time(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Returns one of them at random; authors whose groups take the judge longer are less likely."""
    return rng.choices(candidates, [1 / max(THRIFTY_S, one.judge_s) for one in candidates])[0]


def choose_header(tasks: Sequence[str], needs: Mapping[str, float], rng: random.Random) -> int:
    """Returns the index of one of an author's headers, given their tasks. Each is as likely as we need its
    task, by our own measure from 0 to 1. A task that is not in `needs` counts 1: we know nothing about it.

    >>> [choose_header(["gcd", "rev"], {"gcd": 0.0, "rev": 1.0}, random.Random(seed)) for seed in range(4)]
    [1, 1, 1, 1]
    """
    weights = [max(LEAST_NEED, needs.get(task, 1.0)) for task in tasks]
    return rng.choices(range(len(tasks)), weights)[0]


def slots_of(trust: Trust, slots: int) -> int:
    """Returns how many of the fetches under way may be from authors of this kind.

    >>> [slots_of(trust, 16) for trust in ("proven", "slow", "newcomer")], slots_of("slow", 2)
    ([16, 4, 4], 1)
    """
    return slots if trust in ("neighbour", "proven") else max(1, int(slots * DELAYED_SHARE))


def _is_free(trust: Trust, running: Mapping[Trust, int], slots: int) -> bool:
    # Proven authors do not wait until others give up: fetches from slow authors and newcomers do not count
    # here.
    return trust == "neighbour" or running.get(trust, 0) < slots_of(trust, slots)


def _cheapest(newcomers: Sequence[Candidate]) -> list[Candidate]:
    def cost(one: Candidate) -> tuple[int, bool, int, bool]:
        return (one.failures, one.judge_s > THRIFTY_S, -one.accepted, not one.connected)

    least = min(cost(one) for one in newcomers)
    return [one for one in newcomers if cost(one) == least]


def author_share(groups: int, authors: int) -> int:
    """Returns how many of `groups` groups each of `authors` authors may give: an equal part for each of them
    and one more part, but never less than a quarter. In a swarm of two that is half: the other half is our
    own.

    >>> [author_share(16, authors) for authors in (1, 2, 3, 100)], author_share(1, 3)
    ([8, 6, 4, 4], 1)
    """
    return ceil(groups / min(max(authors + 1, 2), 4))


def newcomer_share(groups: int, *, anybody_proven: bool) -> int:
    """Returns how many of `groups` groups all newcomers together may give.

    >>> newcomer_share(16, anybody_proven=True), newcomer_share(16, anybody_proven=False)
    (4, 8)
    """
    return ceil(groups * NEWCOMER_SHARE) if anybody_proven else ceil(groups / 2)


def draw(
    authors: Sequence[str], trust_of: Callable[[str], Trust], count: int, known: int, rng: random.Random
) -> list[int]:
    """Returns the indices of at most `count` groups, given the authors of all. They are drawn uniformly
    without replacement, within the shares of authors and of newcomers. `known`: number of authors that we
    hear from and that had a group accepted. Neighbours have the same owner as we do, so they have no share to
    keep to.

    >>> len(draw(["a", "a", "a", "a"], lambda author: "proven", 4, 1, random.Random(0)))
    2
    """
    trusts = {author: trust_of(author) for author in authors}
    own_share = author_share(count, known)
    for_newcomers = newcomer_share(count, anybody_proven=any(t != "newcomer" for t in trusts.values()))
    taken: Counter[str] = Counter()
    places: list[int] = []
    for place in rng.sample(range(len(authors)), len(authors)):
        author = authors[place]
        if len(places) == count:
            break
        if trusts[author] != "neighbour" and taken[author] >= own_share:
            continue
        if trusts[author] == "newcomer" and for_newcomers == 0:
            continue
        for_newcomers -= trusts[author] == "newcomer"
        taken[author] += 1
        places.append(place)
    return sorted(places)


def drawable(counts: Mapping[str, int], trust_of: Callable[[str], Trust], count: int, known: int) -> int:
    """Returns how many of `count` groups `draw` would find, given the number of each author's groups.

    >>> drawable({"a": 9, "b": 1}, lambda author: "proven", 4, 2)
    3
    """
    share, found = author_share(count, known), dict.fromkeys(("neighbour", "proven", "slow", "newcomer"), 0)
    for author, groups in counts.items():
        trust = trust_of(author)
        found[trust] += groups if trust == "neighbour" else min(groups, share)
    others = sum(number for trust, number in found.items() if trust != "newcomer")
    newcomers = min(found["newcomer"], newcomer_share(count, anybody_proven=others > 0))
    return min(count, others + newcomers)


def longest_wait_s(worked_s: float, deadline_s: float) -> float:
    """Returns the seconds that a round may wait for others: a tenth of the time that its own work took, and
    at most `deadline_s`.

    Nearly everything is fetched while the round is generated and trained on, so groups of authors at the
    usual speed are already there. An author that is slower, out of ill will or over a thin line, costs a
    tenth and no more, whatever it announces; its groups count for a later round, and this one is filled with
    our own.

    >>> longest_wait_s(2.0, 5.0), longest_wait_s(300.0, 5.0)
    (0.2, 5.0)
    """
    return min(MAX_WAIT_SHARE * max(0.0, worked_s), deadline_s)


def is_fresh(arrival: Arrival, now: Arrival, settings: ExchangeSettings) -> bool:
    """Returns True if a group that came in at `arrival` may still be trained on at `now`.

    >>> is_fresh(Arrival(at=100.0, policy_version=3), Arrival(110.0, 5), ExchangeSettings())
    True
    """
    too_old = now.at - arrival.at > settings.max_age_s
    return not too_old and now.policy_version - arrival.policy_version <= settings.max_age_versions
