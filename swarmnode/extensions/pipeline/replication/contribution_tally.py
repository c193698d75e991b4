"""Decides which contributions of an iteration count: from the heads that each replica has seen to one sum.

replica_exchange.py (what arrives) -> [ContributionTally] -> Combined

Pure bookkeeping. Replicas tell each other which signed heads they have seen, and which of them with sound
bytes behind. Everything that one replica saw reaches all that still answer, so they come to the same set, and
what is decided is decided from that set alone: whoever signed two contributions is out, and so is one that
claims many times the others' tokens (they are its weight) or whose gradient a token is many times larger. The
reference is the lower median: with two replicas the smaller one, since both must come to the same answer, and
a step left out costs less than one gone wrong.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.replication.contributions import (
    MAX_HEAD_BYTES,
    Contribution,
    SignedHead,
    open_head,
    size_bytes,
)
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    Combined,
    ContributionBounds,
    ContributionFault,
    StageIteration,
)
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum

MAX_REPLICAS = 64
MAX_WEIGHT_RATIO = 8.0
"""Largest ratio of a replica's tokens to those of the (lower) median one. Slots bound how unequal the plan
makes them; this bounds how much more than an honest replica a liar can weigh."""

KEPT_HEADS = 2
"""Heads that are kept of one replica: two prove that it equivocates, more prove nothing else."""


class SeenHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One head that a replica has seen."""

    sealed: Annotated[bytes, Meta(max_length=MAX_HEAD_BYTES)]
    sound: bool
    """True if the replica has the bytes too, and they are sound."""


class SeenHeads(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The heads that a replica has seen by the end of a round."""

    held: Annotated[tuple[SeenHead, ...], Meta(max_length=KEPT_HEADS * MAX_REPLICAS)]
    closed: bool
    """True if the replica goes on with this set, whatever else may come."""


View = frozenset[tuple[str, bytes, bool]]
"""(author, signed head, sound)"""


class ContributionTally:
    """The contributions to one iteration of one stage, as one of its replicas knows them."""

    def __init__(
        self,
        own: Contribution,
        exchange: StageIteration,
        replicas: Sequence[str],
        expected: ContributionBounds,
        *,
        max_norm_ratio: float,
    ) -> None:
        self.exchange = exchange
        self.replicas = tuple(sorted(replicas))
        self.expected = expected
        self._own = own.signed.author
        self._max_norm_ratio = max_norm_ratio
        self._heads: dict[str, dict[bytes, SignedHead]] = {}
        self._sound: dict[bytes, Contribution] = {}
        self._unsound: set[bytes] = set()
        self._holders: dict[bytes, set[str]] = {}
        self._doubted: set[tuple[str, bytes]] = set()
        self._faults: dict[str, ContributionFault] = {}
        self._adopted: frozenset[str] | None = None
        self.add(own)

    def note(self, signed: SignedHead) -> None:
        """Record a head that its author signed. Raises Rejected as `size_bytes` if it breaks the bounds; it
        is recorded all the same."""
        known = self._heads.setdefault(signed.author, {})
        if signed.payload not in known and len(known) < KEPT_HEADS:
            known[signed.payload] = signed
        try:
            size_bytes(signed.head, self.expected)
        except Rejected:
            self._unsound.add(signed.payload)
            raise

    def add(self, contribution: Contribution) -> None:
        self.note(contribution.signed)
        self._sound[contribution.signed.payload] = contribution

    def fail(self, author: str, fault: ContributionFault, head: SignedHead | None = None) -> None:
        """Record that nothing sound has come from this replica so far. `head`: its bytes have the signed
        digest and are not sound."""
        self._faults[author] = fault
        if head is not None:
            self._unsound.add(head.payload)

    def found(self, author: str) -> Contribution | None:
        """Return the sound contribution of a replica; None if there is none or if it equivocated."""
        heads = self._heads.get(author, {})
        return self._sound.get(next(iter(heads))) if len(heads) == 1 else None

    def holdings(self, *, closed: bool = False) -> SeenHeads:
        held = [
            SeenHead(signed.sealed, payload in self._sound)
            for author in sorted(self._heads)
            for payload, signed in sorted(self._heads[author].items())
        ]
        return SeenHeads(tuple(held), closed)

    def learn(self, peer_id: str, holdings: SeenHeads) -> View:
        """Take in the heads that another replica has seen. Heads without their author's signature are
        ignored."""
        view: set[tuple[str, bytes, bool]] = set()
        for held in holdings.held:
            try:
                signed = open_head(held.sealed, self.exchange, among=self.replicas)
            except Rejected:
                continue
            view.add((signed.author, signed.payload, held.sound))
            if held.sound and (peer_id, signed.payload) not in self._doubted:
                self._holders.setdefault(signed.payload, set()).add(peer_id)
            try:
                self.note(signed)
            except Rejected as rejected:
                self._faults[signed.author] = ContributionFault(rejected.reason)
        return frozenset(view)

    def doubt(self, peer_id: str, head: SignedHead) -> None:
        """Record that this peer says it holds sound bytes and does not hand them out."""
        self._doubted.add((peer_id, head.payload))
        self._holders[head.payload].discard(peer_id)

    def lacking(self) -> list[tuple[SignedHead, list[str]]]:
        """Return heads of which others hold sound bytes and we do not, each with those peers, sorted."""
        lone = (next(iter(heads.values())) for heads in self._heads.values() if len(heads) == 1)
        return [
            (signed, sorted(self._holders.get(signed.payload, ())))
            for signed in lone
            if signed.payload not in self._sound
            and signed.payload not in self._unsound
            and self._holders.get(signed.payload)
        ]

    def same(self, view: View) -> bool:
        """Return True if a replica with this view comes to our set. Doubted claims are ignored."""
        return self._decisive(view) == self._decisive(
            frozenset(
                (author, payload, payload in self._sound)
                for author, heads in self._heads.items()
                for payload in heads
            )
        )

    def adopt(self, views: Sequence[View]) -> None:
        """Adopt the set that most replicas have closed with, if their views agree."""
        closed = {_counting(view) for view in views}
        if len(closed) == 1 and 2 * len(views) > len(self.replicas):
            self._adopted = closed.pop()

    @property
    def adopted(self) -> bool:
        """True if every contribution of the set that others closed with is here."""
        return self._adopted is not None and all(self.found(author) for author in self._adopted)

    def result(self, *, agreed: bool) -> Combined:
        """Return the sum in the order of the peer ids: the same additions at every replica, so the same
        bits."""
        candidates = [one for author in self.replicas if (one := self.found(author)) is not None]
        if self._adopted is not None:
            candidates = [one for one in candidates if one.signed.author in self._adopted]
        weighed = _within(candidates, MAX_WEIGHT_RATIO, lambda one: float(one.sum.tokens))
        chosen = _within(weighed, self._max_norm_ratio, lambda one: one.norm / max(one.sum.tokens, 1))
        names = tuple(one.signed.author for one in chosen)
        outliers = {one.signed.author: ContributionFault.WEIGHT for one in candidates}
        outliers |= {one.signed.author: ContributionFault.NORM for one in weighed}
        rejected = {author: self._fault(author, outliers) for author in self.replicas if author not in names}
        return Combined(sum_in_order([one.sum for one in chosen]), names, rejected, agreed)

    def release(self) -> None:
        """Drop the bytes. The heads stay known."""
        self._sound.clear()

    def _decisive(self, view: View) -> View:
        """Return the view without what decides nothing: the bytes of replicas that equivocate, and claims
        that no peer made good."""
        counting = _counting(view)
        return frozenset(
            (author, payload, author in counting and self._is_founded(payload)) for author, payload, _ in view
        )

    def _is_founded(self, payload: bytes) -> bool:
        return payload in self._sound or bool(self._holders.get(payload))

    def _fault(self, author: str, outliers: Mapping[str, ContributionFault]) -> ContributionFault:
        if len(self._heads.get(author, {})) > 1:
            return ContributionFault.EQUIVOCATION
        if author in outliers:
            return outliers[author]
        if self.found(author) is not None:
            return ContributionFault.LATE
        return self._faults.get(author, ContributionFault.SILENT)


def sum_in_order(sums: Sequence[GradientSum]) -> GradientSum:
    """Sum as `sum_of_replicas` does, but in float32 and in place in new tensors: `sums` is not written to."""
    total: dict[str, Tensor] = {}
    for one in sums:
        for name, tensor in one.tensors.items():
            if name in total:
                total[name].add_(tensor)
            else:
                total[name] = tensor.clone()
    return GradientSum(total, sum(one.tokens for one in sums), sum(one.visits for one in sums))


def _counting(view: View) -> frozenset[str]:
    """Return the authors of exactly one head, with sound bytes behind it."""
    heads = Counter(author for author, _, _ in view)
    return frozenset(author for author, _, sound in view if sound and heads[author] == 1)


def _within(
    candidates: Sequence[Contribution], max_ratio: float, size: Callable[[Contribution], float]
) -> list[Contribution]:
    """Return the candidates of at most this multiple of the lower median size. Sizes of zero do not enter the
    median."""
    sizes = sorted(found for one in candidates if (found := size(one)) > 0)
    if not sizes:
        return list(candidates)
    reference = sizes[(len(sizes) - 1) // 2]
    return [one for one in candidates if size(one) <= max_ratio * reference]
