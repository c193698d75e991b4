"""A gauge of others' worth to us, which tells how much to take of their answers.

TrainReport.agreement, round by round -> [SharingGauge] -> J for the exchange, the share of what is replayed
                                              |
                                              +-> Counters (checkpoint), board.py (sharing: +0.04, J 16)

The gauge is pure: a value, and each round makes the next one of it. A cosine (gradient_agreement.py) is
noisy, and a test that is repeated every round finds something in pure noise sooner or later: two standard
errors halved the amount in 28 to 87 % of runs of 100 rounds in which others did no harm at all. So evidence
is gathered by a test that may be looked at after every round (`_evidence`), and a verdict needs it to be
EVIDENCE to one:

- below: what others teach works against us. Half of it, down to an eighth and PROBE groups: never nothing, or
  nobody would notice when the swarm has something for us again.
- above: it helps. Twice as much, up to all that was asked for.
- neither, for `patience` rounds: twice as much, too. Each time that this turns out to have been wrong, the
  patience doubles, so that a node among strangers that harm it does not try them over and over.

After every change the verdict begins anew: rounds before it had another amount. A verdict that changes
nothing keeps the newest WINDOW rounds, so that years of help do not hide harm, and none looks at more than
MEMORY.

No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import fmean, stdev
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

WINDOW = 32
"""Rounds that the mean which is shown is taken over, at most, and that are kept after a verdict."""

MEMORY = 256
"""Rounds that one verdict may look at."""

LEAST = 8
"""Rounds that a verdict needs, at least."""

EVIDENCE = 20.0
"""Likelihood of the rounds under some mean over that under zero that makes a verdict. If the mean is zero,
one of so many runs at most ever gets there."""

ALIKE, DOUBT = 0.9, 24
"""Likeness that neighbouring rounds are thought to have before it is known, and the rounds after which the
likeness that was seen counts as much: two dozen rounds in a row may be one stroke of luck."""

EXPECTED = 4.0
"""Rounds after which a mean is expected to have shown: means are thought to be some half of what single
rounds scatter by. It decides how soon a verdict comes, and not how often it is wrong."""

LOWEST_LEVEL = 3
"""Halvings of the amount, at most: an eighth is left."""

PROBE = 2
"""Groups of others that a round has in any case, if it is to have so many at all."""

FIRST_PATIENCE = 32
LONGEST_PATIENCE = 256

Verdict = Literal["helps", "harms", "open"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of some rounds, and its standard error."""

    mean: float
    error: float


class SharingGauge(msgspec.Struct, frozen=True, kw_only=True):
    """The agreements of some rounds, and the amount that is taken in the next.

    >>> SharingGauge().after(0.25).after(None).agreements
    (0.25,)
    """

    agreements: Annotated[tuple[float, ...], Meta(max_length=MEMORY)] = ()
    """Cosines of the newest rounds that had one, the newest last."""
    level: Annotated[int, Meta(ge=0, le=LOWEST_LEVEL)] = 0
    """Halvings of the amount."""
    rounds: Annotated[int, Meta(ge=0)] = 0
    """Rounds with a cosine since the level changed."""
    quiet: Annotated[int, Meta(ge=0)] = 0
    """The newest of these in a row that brought no verdict."""
    patience: Annotated[int, Meta(ge=1, le=LONGEST_PATIENCE)] = FIRST_PATIENCE
    """Rounds without a verdict after which more is tried."""

    @property
    def share(self) -> float:
        """Share of others' answers that is taken, of all that may be."""
        return 0.5**self.level

    def groups(self, wanted: int) -> int:
        """Returns J, the groups of others that a round takes of `wanted`.

        >>> [SharingGauge(level=level).groups(16) for level in range(4)], SharingGauge(level=3).groups(1)
        ([16, 8, 4, 2], 1)
        """
        return min(wanted, max(PROBE, wanted >> self.level))

    @property
    def estimate(self) -> Estimate | None:
        """The estimate over the newest rounds, whatever was taken then. None: fewer than LEAST rounds."""
        newest = self.agreements[-WINDOW:]
        if len(newest) < LEAST:
            return None
        return Estimate(fmean(newest), stdev(newest) / len(newest) ** 0.5)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the amount that is taken now."""
        return _verdict(self.agreements[-self.rounds :] if self.rounds else ())

    @property
    def shown(self) -> Verdict:
        """The verdict on the newest rounds, whatever was taken then: for people."""
        return _verdict(self.agreements[-WINDOW:])

    def after(self, agreement: float | None) -> "SharingGauge":
        """The gauge after one more round. None: the round had nothing to compare."""
        if agreement is None:
            return self
        agreements = (*self.agreements, agreement)[-MEMORY:]
        rounds = self.rounds % MEMORY + 1
        seen = msgspec.structs.replace(self, agreements=agreements, rounds=rounds)
        match seen.verdict:
            case "harms":
                return seen._at(self.level + 1, min(2 * self.patience, LONGEST_PATIENCE))
            case "helps":
                return seen._at(self.level - 1, FIRST_PATIENCE)
            case "open":
                if self.quiet + 1 < self.patience or self.level == 0:
                    return msgspec.structs.replace(seen, quiet=self.quiet + 1)
                return seen._at(self.level - 1, self.patience)

    def in_full(self) -> "SharingGauge":
        """Returns the gauge with nothing halved, for a rule that only looks at it."""
        return msgspec.structs.replace(self, level=0)

    def _at(self, level: int, patience: int) -> "SharingGauge":
        """The gauge at another level, as far as there is one."""
        if not 0 <= level <= LOWEST_LEVEL:
            stays = self.patience if level > 0 else patience
            rounds = min(self.rounds, WINDOW)
            return msgspec.structs.replace(self, rounds=rounds, quiet=0, patience=stays)
        return msgspec.structs.replace(self, level=level, rounds=0, quiet=0, patience=patience)


def told(before: SharingGauge, after: SharingGauge, wanted: int) -> str:
    """A change of the amount, for the log.

    >>> told(SharingGauge(), SharingGauge(agreements=(-0.1, -0.11) * 8, level=1), wanted=16)
    'what others teach works against us (-0.105 +- 0.001): from now on 8 of 16 groups a round'
    """
    found = after.estimate
    why = "" if found is None else f" ({found.mean:+.3f} +- {found.error:.3f})"
    amount = f"from now on {after.groups(wanted)} of {wanted} groups a round"
    if after.level > before.level:
        return f"what others teach works against us{why}: {amount}"
    return f"what others teach does not work against us any more{why}: {amount}"


def _verdict(seen: Sequence[float]) -> Verdict:
    if len(seen) < LEAST or _evidence(seen) < EVIDENCE:
        return "open"
    return "helps" if sum(seen) > 0 else "harms"


def _evidence(seen: Sequence[float]) -> float:
    """Returns the likelihood of these rounds under some mean over that under zero, whatever their spread.

    The sequential t-test with a normal prior on the mean over the spread (Gönen and others 2005). Under a
    mean of zero it is a test martingale, so it may be looked at after every round (Pérez-Ortiz and others
    2024). Rounds that resemble the one before tell less; what they share with it is taken out first.

    >>> _evidence([-0.1, -0.2, -0.1, -0.15] * 4) > EVIDENCE, _evidence([-0.1, 0.1] * 20) > 1
    (True, False)
    """
    alike = _autocorrelation(seen)
    fresh = [now - alike * before for before, now in pairwise(seen)] if alike > 0 else list(seen)
    count, total, squares = len(fresh), sum(fresh), sum(one * one for one in fresh)
    left = squares - total * total / (count + EXPECTED)
    if squares <= 0:
        return 1.0
    exponent = 0.5 * count * log(squares / left) - 0.5 * log(1 + count / EXPECTED)
    return exp(min(exponent, 700.0))


def _autocorrelation(seen: Sequence[float]) -> float:
    """Returns the correlation of neighbours, with what small samples are known to hide (Kendall 1954)."""
    mean = fmean(seen)
    scatter = sum((one - mean) ** 2 for one in seen)
    if scatter <= 1e-9 * len(seen) * mean * mean:
        return 0.0
    found = sum((before - mean) * (now - mean) for before, now in pairwise(seen)) / scatter
    found += (1 + 4 * found) / len(seen)
    return min(0.95, (len(seen) * found + DOUBT * ALIKE) / (len(seen) + DOUBT))
