"""How much to take from others, by whether it goes our way.

TrainReport.agreement, round by round -> [SharingGauge] -> J for the exchange, the share of what is replayed
                                              |
                                              +-> Counters (checkpoint), board.py (sharing: +0.04, J 16)

Pure: the gauge is a value, and each round makes the next one of it. A cosine (agreement.py) is noisy, so the
mean over a window decides, and only where it is two standard errors from zero:

- below: what others teach works against us. Half of it, down to an eighth and PROBE groups: never nothing, or
  nobody would notice when the swarm has something for us again.
- above: it helps. Twice as much, up to all that was asked for.
- neither, for `patience` rounds: twice as much, too. Each time that this turns out to have been wrong, the
  patience doubles, so that a node among strangers that harm it does not try them over and over.

After every change the verdict begins anew: rounds before it had another amount. No torch here.
"""

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

WINDOW = 32
"""Rounds that a mean is taken over, at most."""

LEAST = 8
"""Rounds that a verdict needs, at least."""

ERRORS = 2.0
"""Standard errors between a mean and zero that make a verdict."""

LOWEST_LEVEL = 3
"""How often the amount can be halved: an eighth is left."""

PROBE = 2
"""Groups of others that a round has in any case, if it is to have so many at all."""

FIRST_PATIENCE = 16
LONGEST_PATIENCE = 256

Verdict = Literal["helps", "harms", "open"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of some rounds, and its standard error."""

    mean: float
    error: float

    @property
    def verdict(self) -> Verdict:
        """
        >>> Estimate(0.04, 0.01).verdict, Estimate(0.01, 0.01).verdict, Estimate(-0.04, 0.01).verdict
        ('helps', 'open', 'harms')
        """
        if self.mean > ERRORS * self.error:
            return "helps"
        return "harms" if self.mean < -ERRORS * self.error else "open"


class SharingGauge(msgspec.Struct, frozen=True, kw_only=True):
    """What is known after some rounds, and how much is taken in the next.

    >>> SharingGauge().after(0.25).after(None).agreements
    (0.25,)
    """

    agreements: Annotated[tuple[float, ...], Meta(max_length=WINDOW)] = ()
    """Cosines of the newest rounds that had one, the newest last."""
    level: Annotated[int, Meta(ge=0, le=LOWEST_LEVEL)] = 0
    """How often the amount is halved."""
    rounds: Annotated[int, Meta(ge=0)] = 0
    """Rounds with a cosine since the level changed."""
    quiet: Annotated[int, Meta(ge=0)] = 0
    """The newest of these in a row that brought no verdict."""
    patience: Annotated[int, Meta(ge=1, le=LONGEST_PATIENCE)] = FIRST_PATIENCE
    """Rounds without a verdict after which more is tried."""

    @property
    def share(self) -> float:
        """How much of what may be taken from others is taken."""
        return 0.5**self.level

    def groups(self, wanted: int) -> int:
        """J: of `wanted` groups of others a round, how many.

        >>> [SharingGauge(level=level).groups(16) for level in range(4)], SharingGauge(level=3).groups(1)
        ([16, 8, 4, 2], 1)
        """
        return min(wanted, max(PROBE, wanted >> self.level))

    @property
    def estimate(self) -> Estimate | None:
        """The estimate over the whole window, whatever was taken then. None: fewer than LEAST rounds."""
        return _estimate(self.agreements)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the amount that is taken now."""
        found = _estimate(self.agreements[-self.rounds :]) if self.rounds else None
        return "open" if found is None else found.verdict

    def after(self, agreement: float | None) -> "SharingGauge":
        """The gauge after one more round. None: the round had nothing to compare."""
        if agreement is None:
            return self
        agreements = (*self.agreements, agreement)[-WINDOW:]
        seen = msgspec.structs.replace(self, agreements=agreements, rounds=self.rounds + 1)
        match seen.verdict:
            case "harms":
                return seen._at(self.level + 1, min(2 * self.patience, LONGEST_PATIENCE))
            case "helps":
                return seen._at(self.level - 1, FIRST_PATIENCE)
            case "open":
                if self.quiet + 1 < self.patience:
                    return msgspec.structs.replace(seen, quiet=self.quiet + 1)
                return seen._at(self.level - 1, self.patience)

    def in_full(self) -> "SharingGauge":
        """The same with all that may be taken: where it is only looked at."""
        return msgspec.structs.replace(self, level=0)

    def _at(self, level: int, patience: int) -> "SharingGauge":
        """The gauge at another level, as far as there is one."""
        if not 0 <= level <= LOWEST_LEVEL:
            stays = self.patience if level > 0 else patience
            return msgspec.structs.replace(self, quiet=0, patience=stays)
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


def _estimate(agreements: tuple[float, ...]) -> Estimate | None:
    if len(agreements) < LEAST:
        return None
    return Estimate(fmean(agreements), stdev(agreements) / len(agreements) ** 0.5)
