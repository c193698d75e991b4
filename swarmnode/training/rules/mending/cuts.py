"""The parts that an answer could do without, judged by nothing but how likely its tokens are to us.

readings of rows of tokens -> [is_suspicious, cuts_of, score] -> mending.py

An answer is read as what came out of a noisy channel: a text that is likely to us, into which somebody put
runs of tokens. To delete a run costs RUN_NATS and TOKEN_NATS for each of its tokens, to keep a token costs
what it surprises us. So a lesson stays, however surprising its few tokens are, and an advertisement does not:
nothing in it is to be expected, nor what follows it. All pure; places are counted from 0 in a row.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

DOUBTFUL_NATS = 6.0
"""A token below minus this makes one look, if another one does so nearby. Few tokens of honest answers are:
of those of our own sampler, one in 400."""

DOUBTFUL_TOGETHER = 2

NEARBY_TOKENS = 32
"""The distance within which two doubtful tokens make an answer suspicious: in a long answer they meet by
chance, but seldom within a line or two."""

SURPRISING_NATS = 2.0
"""A cut begins at a token below minus this: where we would have gone on otherwise."""

NATURAL_NATS = 3.0
"""A token above minus this is one of those that we would go on with."""

CALM_NATS = 0.5
"""Nats that a token costs if nothing disturbs."""

MOST_STARTS = 32
"""Places where a cut may begin, those of the most surprising tokens: bounds the work for hostile text."""

LONGEST_CUT = 64
"""Tokens of one cut, unless it takes all that is left. What is longer goes in several."""

RUN_NATS = 6.0
TOKEN_NATS = 3.0
"""The price of deleting: see above. Where one author repeats what others do not write, deleting is free."""


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A completion to be read after its prompt. `looks`: places where one asks for other tokens, too."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    looks: Collection[int] | None = None
    """None: nowhere. A set: in these, and wherever the row's token is below -SURPRISING_NATS."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A policy's log-probabilities of a row."""

    logprobs: Sequence[float]
    """The log-probability of each token after those before it."""
    after_cut: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    """place -> log-probability of each token behind it (the next one first), were it to stand there."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens [start, end) of a row, and how much its score may rise without them."""

    start: int
    end: int
    gain: float
    """If later tokens stay as unlikely as they are."""
    hope: float
    """If they recover. -inf where the token behind the cut is not one that we would go on with."""


def is_suspicious(logprobs: Sequence[float], odd: Collection[int] = ()) -> bool:
    """Returns True if an answer needs a closer look: it has DOUBTFUL_TOGETHER tokens that we find doubtful,
    or that are `odd`, within NEARBY_TOKENS.

    >>> is_suspicious([-0.1, -9.0, -0.1, -0.2]), is_suspicious([-9.0, -0.1, -7.0])
    (False, True)
    """
    places = [place for place, logprob in enumerate(logprobs) if logprob < -DOUBTFUL_NATS or place in odd]
    lasts = places[DOUBTFUL_TOGETHER - 1 :]
    return any(last - first < NEARBY_TOKENS for first, last in zip(places, lasts, strict=False))


def looked_at(logprobs: Sequence[float], looks: Collection[int]) -> list[int]:
    """Places of a row where a cut may begin, MOST_STARTS at most. The last token, the end, stays.

    >>> looked_at([-0.1, -5.0, -0.2, -3.0, -9.0], {2})
    [1, 2, 3]
    """
    inside = enumerate(logprobs[:-1])
    found = [place for place, logprob in inside if logprob < -SURPRISING_NATS or place in looks]
    return sorted(sorted(found, key=lambda place: logprobs[place])[:MOST_STARTS])


def cuts_of(reading: Reading, odd: Collection[int] = ()) -> list[Cut]:
    """Cuts of a row that ends with a token which stays (that of the end), and what the reading tells of them.

    What a cut does to later tokens is unknown until the rest is read. Text that does not belong makes what
    follows it unlikely, too: so there is a guess that it stays so, and one that it recovers.
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
    """The score of what is kept of a row of `length` tokens: its log-probability less the price of the rest.

    >>> score([-1.0, -2.0], kept=[0, 3], length=4)
    -15.0
    """
    gone = runs_between(kept, length)
    prices = (0.0 if start in odd else RUN_NATS for start, _ in gone)
    return sum(logprobs) - sum(prices) - sum(_price(place, odd) for run in gone for place in range(*run))


def runs_between(kept: Sequence[int], length: int) -> list[tuple[int, int]]:
    """The runs [start, end) of a row of `length` tokens that are not kept.

    >>> runs_between([0, 3, 4], 6)
    [(1, 3), (5, 6)]
    """
    edges = [-1, *kept, length]
    return [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def _price(place: int, odd: Collection[int]) -> float:
    return 0.0 if place in odd else TOKEN_NATS
