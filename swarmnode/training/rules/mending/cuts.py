"""Finds the parts that an answer could do without, judged only by how likely its tokens are to us.

readings of rows of tokens -> [is_suspicious, cuts_of, score] -> mending.py

We read an answer as the output of a noisy channel: a text that is likely to us, with runs of tokens inserted
by somebody. Deleting a run costs RUN_NATS, plus TOKEN_NATS for each of its tokens; keeping a token costs its
surprise. So a lesson stays, however surprising its few tokens are, and an advertisement goes: nothing in it
is predictable, nor is the text that follows it. All functions are pure; places are counted from 0 in a row.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

DOUBTFUL_NATS = 6.0
"""A token with a log-probability below minus this is doubtful; two of them close together prompt a closer
look. Honest answers have few of them: one token in 400 of our own sampler's."""

DOUBTFUL_TOGETHER = 2

NEARBY_TOKENS = 32
"""The distance within which two doubtful tokens make an answer suspicious. They meet by chance in a long
answer, but seldom within a line or two."""

SURPRISING_NATS = 2.0
"""A cut begins at a token with a log-probability below minus this: we would have continued otherwise
there."""

NATURAL_NATS = 3.0
"""A token with a log-probability above minus this is one that we would continue with."""

CALM_NATS = 0.5
"""The usual cost of a token in undisturbed text."""

MOST_STARTS = 32
"""The most places where a cut may begin, at the most surprising tokens. Bounds the work on hostile text."""

LONGEST_CUT = 64
"""The most tokens of one cut, unless it removes the whole rest. Longer runs take several cuts."""

RUN_NATS = 6.0
TOKEN_NATS = 3.0
"""The price of deletion (see above). Deleting what one author repeats and others do not write is free."""


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A completion to be read after its prompt. `looks`: places at which to read other tokens as well."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    looks: Collection[int] | None = None
    """None: nowhere. A set: at these places, and wherever the row's token is below -SURPRISING_NATS."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A policy's log-probabilities of a row."""

    logprobs: Sequence[float]
    """The log-probability of each token, given those before it."""
    after_cut: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    """place -> log-probability of each later token (the next one first) if it stood at that place."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens [start, end) of a row, and how much its score may rise without them."""

    start: int
    end: int
    gain: float
    """The rise if later tokens stay as unlikely as they are."""
    hope: float
    """The rise if they recover. -inf if we would not continue with the token after the cut."""


def is_suspicious(logprobs: Sequence[float], odd: Collection[int] = ()) -> bool:
    """Returns True if an answer needs a closer look: DOUBTFUL_TOGETHER of its tokens within NEARBY_TOKENS are
    doubtful or `odd`.

    >>> is_suspicious([-0.1, -9.0, -0.1, -0.2]), is_suspicious([-9.0, -0.1, -7.0])
    (False, True)
    """
    places = [place for place, logprob in enumerate(logprobs) if logprob < -DOUBTFUL_NATS or place in odd]
    lasts = places[DOUBTFUL_TOGETHER - 1 :]
    return any(last - first < NEARBY_TOKENS for first, last in zip(places, lasts, strict=False))


def places_to_look_at(logprobs: Sequence[float], looks: Collection[int]) -> list[int]:
    """Returns the places of a row where a cut may begin, at most MOST_STARTS. The last token, the end, stays.

    >>> places_to_look_at([-0.1, -5.0, -0.2, -3.0, -9.0], {2})
    [1, 2, 3]
    """
    inside = enumerate(logprobs[:-1])
    found = [place for place, logprob in inside if logprob < -SURPRISING_NATS or place in looks]
    return sorted(sorted(found, key=lambda place: logprobs[place])[:MOST_STARTS])


def cuts_of(reading: Reading, odd: Collection[int] = ()) -> list[Cut]:
    """Returns the cuts of a row and what the reading tells of each. The row's last token, the end, stays.

    The effect of a cut on later tokens is unknown until the rest is read. Inserted text makes the text after
    it unlikely, too, so each cut has two guesses: later tokens stay unlikely, or they recover.
    """
    logprobs = reading.logprobs
    saved = [0.0, *accumulate(-logprob - _price(place, odd) for place, logprob in enumerate(logprobs))]
    recovered = list(accumulate(max(0.0, -logprob - CALM_NATS) for logprob in reversed(logprobs)))[::-1]
    last = len(logprobs) - 1
    found: list[Cut] = []
    for start, behind in reading.after_cut.items():
        run = 0.0 if start in odd else RUN_NATS
        for end in (*range(start + 1, min(start + LONGEST_CUT, last - 1) + 1), last):
            rejoined = behind[end - start - 1]
            gain = saved[end] - saved[start] - run + rejoined - logprobs[end]
            natural = rejoined > -NATURAL_NATS
            later = recovered[end + 1] if end < last else 0.0
            found.append(Cut(start, end, gain, gain + later if natural else float("-inf")))
    return found


def score(logprobs: Sequence[float], kept: Sequence[int], length: int, odd: Collection[int] = ()) -> float:
    """Returns the score of a part of a row of `length` tokens: its log-probability less the price of the
    rest.

    >>> score([-1.0, -2.0], kept=[0, 3], length=4)
    -15.0
    """
    gone = runs_between(kept, length)
    prices = (0.0 if start in odd else RUN_NATS for start, _ in gone)
    return sum(logprobs) - sum(prices) - sum(_price(place, odd) for run in gone for place in range(*run))


def runs_between(kept: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Returns the runs [start, end) of a row of `length` tokens that are not kept.

    >>> runs_between([0, 3, 4], 6)
    [(1, 3), (5, 6)]
    """
    edges = [-1, *kept, length]
    return [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def _price(place: int, odd: Collection[int]) -> float:
    return 0.0 if place in odd else TOKEN_NATS
