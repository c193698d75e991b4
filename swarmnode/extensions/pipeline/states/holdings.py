"""Stage states that the members hold, and the choice of those that together contain another stage.

state_service.py (what each member says it holds) -> [covering] -> what to fetch, from whom

Pure. Layers are named globally, so states of any partition can cover the layers of any other one. They must
be of one iteration, since layers of different iterations form a model that was never trained.

Any member may claim to hold anything. So the first criterion is which members may be expected to hold a
state: the members of its stage under the plans that were run, and the keepers of their copies
(`LayerHolders`). They are believed before all others, then the larger number of holders. How many layers a
state has decides only ties.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from swarmnode.extensions.pipeline.stages.packed_state import digest_of, pack_state
from swarmnode.extensions.pipeline.stages.stage_model import StagePart
from swarmnode.extensions.pipeline.wire.hop_messages import Count, Digest

MAX_LAYERS = 4096
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]

_LAYER = re.compile(r"\.layers\.(\d{1,4})\.")


class Holding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """Description of one stage's state after a number of steps."""

    first_layer: Layer
    end_layer: Layer
    """The layer after the last one."""
    has_ends: bool
    """True if the state includes embedding, final norm and head."""
    iteration: Count
    """Optimizer steps in the state."""
    size_bytes: Count
    digest: Digest
    """SHA-256 of the bytes (packed_state.py)."""

    def __post_init__(self) -> None:
        if self.end_layer < self.first_layer:
            raise ValueError(f"no layers are [{self.first_layer}, {self.end_layer})")


@dataclass(frozen=True, slots=True)
class HeldState:
    """A holding with its bytes."""

    holding: Holding
    data: bytes

    @classmethod
    def of(cls, part: StagePart, iteration: int, tensors: Mapping[str, Tensor]) -> "HeldState":
        data = pack_state(tensors)
        holding = Holding(
            part.first_layer, part.end_layer, part.has_ends, iteration, len(data), digest_of(data)
        )
        return cls(holding, data)


class HolderCredibility(IntEnum):
    """Evidence that a member which claims a state may be expected to hold it."""

    NONE = 0
    FITS = 1
    """The layers are those of one stage."""
    KEEPER = 2
    """The member was chosen to keep a copy of such a stage."""
    ASSIGNED = 3
    """The member is assigned to that stage."""


@dataclass(frozen=True, slots=True)
class LayerHolders:
    """The layers of each member under a plan, and the keeper of each member's copy. Empty without a plan."""

    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """By peer id, the member's first layer and the layer after its last one."""
    keepers: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the peer id of a stage's member, the peer id of the member that keeps its copy."""

    def credibility(self, peer_id: str, holding: Holding) -> HolderCredibility:
        layers = holding.first_layer, holding.end_layer
        if self.ranges.get(peer_id) == layers:
            return HolderCredibility.ASSIGNED
        stage = [peer for peer, held in self.ranges.items() if held == layers]
        if any(self.keepers.get(peer) == peer_id for peer in stage):
            return HolderCredibility.KEEPER
        return HolderCredibility.FITS if stage else HolderCredibility.NONE


@dataclass(frozen=True, slots=True)
class Offer:
    """A holding, and the members that have it."""

    holding: Holding
    holders: tuple[str, ...]
    """Peer ids of the holders, in the order in which to ask them."""
    credibility: HolderCredibility = HolderCredibility.NONE
    """The highest credibility of its holders."""
    backers: int = 1
    """Number of holders with that credibility."""
    is_disputed: bool = False
    """True if as many holders, equally credible, report another digest for this state."""

    @property
    def rank(self) -> tuple[int, HolderCredibility, int]:
        """Rank among offers of the same layers. The highest is taken."""
        return self.holding.iteration, self.credibility, self.backers


@dataclass(frozen=True, slots=True)
class Assembled:
    """The tensors of a part of the model, by global name."""

    tensors: dict[str, Tensor]
    iteration: int
    """Iteration of the oldest tensors, if they are mixed."""
    is_disputed: bool = False
    """True if no evidence favours these tensors over others that were offered."""


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to, given its global name (also for Adam's moments), or None for
    the ends.

    >>> layer_of("exp_avg/base_model.model.model.layers.7.mlp.up_proj.lora_A.weight")
    7
    """
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def of_part(tensors: Mapping[str, Tensor], part: StagePart) -> dict[str, Tensor]:
    """Return the tensors that belong to a part of the model."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (
            part.has_ends if (layer := layer_of(name)) is None else part.first_layer <= layer < part.end_layer
        )
    }


def offers(
    told: Mapping[str, Collection[Holding]], layer_holders: Sequence[LayerHolders] = ()
) -> list[Offer]:
    """Return the holdings reported by each peer id, as offers. `layer_holders`: of the plans that were run.

    If two digests are reported for the same layers and iteration, the one with the higher credibility counts,
    then the one with more holders of that credibility, then the one with the smallest peer id. Replicas
    compare digests after every step, so differing digests are the exception.
    """
    holders: dict[Holding, list[tuple[HolderCredibility, str]]] = {}
    for peer_id in sorted(told):
        for holding in set(told[peer_id]):
            credibility = max(
                (each.credibility(peer_id, holding) for each in layer_holders), default=HolderCredibility.NONE
            )
            holders.setdefault(holding, []).append((credibility, peer_id))
    best: dict[tuple[int, int, bool, int], Offer] = {}
    found = [_offer(holding, those) for holding, those in holders.items()]
    for offer in sorted(found, key=lambda o: (-o.credibility, -o.backers, o.holders, o.holding)):
        holding = offer.holding
        what = (holding.first_layer, holding.end_layer, holding.has_ends, holding.iteration)
        first = best.setdefault(what, offer)
        if first is not offer and first.rank == offer.rank:
            best[what] = replace(first, is_disputed=True)
    return sorted(best.values(), key=lambda offer: offer.holding)


def _offer(holding: Holding, holders: Sequence[tuple[HolderCredibility, str]]) -> Offer:
    best = max(credibility for credibility, _ in holders)
    asked = sorted(holders, key=lambda each: (-each[0], each[1]))
    backers = sum(credibility == best for credibility, _ in holders)
    return Offer(holding, tuple(peer for _, peer in asked), best, backers)


def covering(
    offered: Sequence[Offer],
    part: StagePart,
    *,
    needs_ends: bool,
    at_least: int,
    at_most: int,
    mixed: bool = False,
) -> list[Offer] | None:
    """Return offers of one iteration that together hold the whole part, or None.

    Prefers the newest iteration of members that may be expected to hold it; only if there is none, the newest
    that any member reports. `needs_ends`: the ends are trained, and the part has them. `at_most`: needed
    because a holder may report any number. `mixed`: take the newest state of each layer instead. If the only
    member of some layers has died, those layers are a few steps behind; training repairs that sooner than if
    all others went back as far.
    """
    within = [offer for offer in offered if at_least <= offer.holding.iteration <= at_most]
    for credibility in (HolderCredibility.KEEPER, HolderCredibility.FITS, HolderCredibility.NONE):
        trusted = [offer for offer in within if offer.credibility >= credibility]
        iterations = sorted({offer.holding.iteration for offer in trusted}, reverse=True)
        of_one = ([o for o in trusted if o.holding.iteration == each] for each in iterations)
        for chosen in [trusted] if mixed else of_one:
            if (found := _cover(chosen, part, needs_ends)) is not None:
                return found
    return None


def _cover(offered: Sequence[Offer], part: StagePart, needs_ends: bool) -> list[Offer] | None:
    """Return offers that cover the part from left to right, always the newest. Among equals, choose the most
    credible one, then the one that reaches farthest."""
    chosen: list[Offer] = []
    at = part.first_layer
    while at < part.end_layer:
        reaching = [o for o in offered if o.holding.first_layer <= at < o.holding.end_layer]
        if not reaching:
            return None
        best = max(reaching, key=lambda o: (o.rank, o.holding.end_layer, -o.holding.size_bytes))
        chosen.append(best)
        at = best.holding.end_layer
    if needs_ends and not any(offer.holding.has_ends for offer in chosen):
        with_ends = [offer for offer in offered if offer.holding.has_ends]
        if not with_ends:
            return None
        chosen.append(max(with_ends, key=lambda o: (o.rank, -o.holding.size_bytes)))
    return chosen
