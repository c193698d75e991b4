"""Samples next tokens from logits, with one random stream per request, independent of the rest of the batch.

decoder.py | generate_engine.py -> logits -> [sampler] -> tokens and their log-probabilities
                                          |
                                          v  on a CPU, where nobody filters:
                                          cpu_kernels.py

A token is the winner of an exponential race: argmax of p_i / e_i with independent e_i ~ Exp(1) picks i with
probability p_i (the Gumbel-max trick without logarithms of p). The e_i depend only on (seed, position, i), so
a request draws the same tokens alone, among others, or resumed. If another batch shape changes the last bit
of the logits, the winner changes as rarely as the distribution does; looking up a uniform number in the
cumulative sum would not guarantee that.
"""

import hashlib
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.cpu_kernels import Streams, kernels
from swarmnode.rollout.engine import SamplingParams

WORDS = 1 << 18
"""Random words per table. Two tables give 2^36 different rows of noise."""

STRIDES = (162_015, 100_129)
"""Steps of the two offsets per position. Both are odd, so that each visits its whole table before it
repeats."""

TABLE_SEED = 0x5EED
UNIT = (1 - 2**-24) / 2**31
"""Maps 31 random bits to (0, 1), but never to 1.0 in float32, where noise would be infinite."""

NUMBERS_AT_ONCE = 1 << 17
"""Number of logits sampled in one portion on a CPU, so that its cache holds them: this takes a third of the
time at 32000 tokens and 64 rows."""

RUN = 64
"""Length of the runs in which the smallest number is searched: a minimum is many times as fast as its
index."""

WORTH_RUNS = 1 << 16
"""Size of a table from which runs are worth their additional operations."""

NEVER_CUT = 2.0
"""A top_p that keeps every token: a rounded cumulative sum may exceed 1 before the last of them."""


class Noise:
    """Standard exponential noise [rows, vocab], one stream per row.

    Two tables hold fixed random words. A row reads one window of each, at offsets given by its seed and
    position, and adds them modulo 2^32: the sum is uniform whatever one of them holds, and rows share noise
    only if both offsets agree. This takes two copies; hashing every cell would take a dozen passes.
    """

    def __init__(self, vocab: int, rows: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(TABLE_SEED)
        size = (2, WORDS + vocab)
        words = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, generator=generator)
        # Even words and odd words: their sum is never 0, and neither is the noise.
        self._words = words.bitwise_and_(-2).add_(torch.tensor([[0], [1]], dtype=torch.int32)).to(device)
        self._windows = [table.as_strided((WORDS, vocab), (1, 1)) for table in self._words]
        self._offsets = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._strides = torch.tensor(STRIDES, device=device)[:, None]

    def seed(self, rows: Tensor, seeds: Sequence[int | None], positions: Sequence[int]) -> None:
        """Starts the streams of `rows` just before `positions`. A stream without a seed cannot be
        repeated."""
        offsets = [_offsets(seed, position - 1) for seed, position in zip(seeds, positions, strict=True)]
        self._offsets.index_copy_(1, rows, torch.tensor(offsets, device=rows.device).T)

    def keep(self, rows: Tensor) -> None:
        """Moves row `rows[i]` to row i."""
        self._offsets[:, : len(rows)] = self._offsets[:, rows]

    def advance(self, rows: int, first: int = 0) -> Tensor:
        """Returns minus the noise of the next position, for `rows` rows from `first` on."""
        offsets = self._offsets.narrow(1, first, rows).add_(self._strides).bitwise_and_(WORDS - 1)
        words = self._windows[0].index_select(0, offsets[0])
        words.add_(self._windows[1].index_select(0, offsets[1]))
        # log1p(-u), not log(u): float32 is fine near 0, where the winners are, and coarse near 1.
        return words.abs_().float().mul_(-UNIT).log1p_()

    def streams(self, rows: int) -> Streams:
        """Returns the streams of the first `rows` rows, for a kernel that advances them and forms the same
        noise."""
        return Streams(self._words, WORDS, STRIDES, UNIT, self._offsets.narrow(1, 0, rows))


def _offsets(seed: int | None, position: int) -> tuple[int, int]:
    key = secrets.token_bytes(16) if seed is None else seed.to_bytes(16, "little", signed=True)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    starts = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    first, second = (
        (start + position * stride) % WORDS for start, stride in zip(starts, STRIDES, strict=True)
    )
    return first, second


TEMPERATURE, TOP_P, GREEDY = range(3)
"""Indices of the settings in a row's column."""


class Sampler:
    """Sampling settings and random streams of up to `rows` rows."""

    def __init__(self, vocab: int, rows: int, device: torch.device) -> None:
        self._noise = Noise(vocab, rows, device)
        self._vocab = vocab
        self._settings = torch.zeros(3, rows, device=device)
        self.reset()

    def reset(self) -> None:
        """Forgets which settings occur: no row is in use."""
        self._any_sampled = self._any_greedy = self._any_tempered = self._any_filtered = False

    def write(self, rows: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> None:
        """Sets up `rows` for requests whose next token has these positions in its sequence."""
        settings = torch.tensor([_settings(params) for params in sampling], device=rows.device)
        self._settings.index_copy_(1, rows, settings.T)
        self._noise.seed(rows, [params.seed for params in sampling], positions)
        greedy = [params.temperature == 0 for params in sampling]
        self._any_greedy |= any(greedy)
        self._any_sampled |= not all(greedy)
        self._any_tempered |= any(params.temperature not in (0, 1) for params in sampling)
        self._any_filtered |= any(params.temperature > 0 and params.top_p < 1 for params in sampling)

    def keep(self, rows: Tensor) -> None:
        """Moves row `rows[i]` to row i."""
        self._settings[:, : len(rows)] = self._settings[:, rows]
        self._noise.keep(rows)

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens [rows] and their log-probabilities [rows] for float32 logits [rows, vocab]."""
        count = len(logits)
        if kernels().fits(logits) and not self._any_filtered:
            temperature, greedy = self._settings[TEMPERATURE, :count], self._settings[GREEDY, :count]
            return kernels().sample(logits, temperature, greedy, self._noise.streams(count))
        portion = count
        if logits.device.type == "cpu":
            portion = max(1, NUMBERS_AT_ONCE // self._vocab)
        if portion >= count:
            return self._sample(logits, 0)
        sampled = [self._sample(logits[first : first + portion], first) for first in range(0, count, portion)]
        return torch.cat([tokens for tokens, _ in sampled]), torch.cat([logprobs for _, logprobs in sampled])

    def _sample(self, logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Samples the rows from `first` on, as `sample` does."""
        rows = slice(first, first + len(logits))
        if self._any_tempered:
            logits = logits / self._settings[TEMPERATURE, rows, None]
        if self._any_filtered:
            logits = keep_likely(logits, self._settings[TOP_P, rows, None])
        probs = logits.softmax(-1)
        if not self._any_sampled:
            tokens = probs.argmax(-1)
        else:
            noise = self._noise.advance(len(logits), first)
            if self._any_greedy:
                noise.masked_fill_(self._settings[GREEDY, rows, None].bool(), -1.0)
            tokens = smallest(torch.div(probs, noise, out=noise))
        return tokens, probs.gather(1, tokens[:, None])[:, 0].log_()


def _settings(params: SamplingParams) -> tuple[float, float, float]:
    """Returns temperature, top_p, greedy. A greedy row reports the plain softmax, to which no other setting
    applies."""
    if params.temperature == 0:
        return 1.0, NEVER_CUT, 1.0
    return params.temperature, params.top_p if params.top_p < 1 else NEVER_CUT, 0.0


def smallest(table: Tensor) -> Tensor:
    """Returns the index of the smallest number in each row of [rows, n], the first of equal ones:
    `argmin(-1)`.

    >>> smallest(torch.tensor([[3.0, 1.0, 1.0]])).tolist()
    [1]
    """
    rows, length = table.shape
    if table.numel() < WORTH_RUNS or length % RUN or table.device.type != "cpu":
        return table.argmin(-1)
    runs = table.view(rows, -1, RUN)
    run = runs.amin(-1).argmin(-1)
    within = runs[torch.arange(rows), run].argmin(-1)
    return run * RUN + within


def keep_likely(logits: Tensor, top_p: Tensor) -> Tensor:
    """Sets logits to -inf except for the smallest set of likeliest tokens with `top_p` [rows, 1] of the mass.

    The likeliest token always stays; equal logits rank by token id.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1).sub_(probs)
    ordered.masked_fill_(mass_before >= top_p, float("-inf"))
    return torch.empty_like(logits).scatter_(1, tokens, ordered)
