"""Which stage states there are among the members, and which of them together make another stage.

states.py (what each member says it holds) -> [covering] -> what to fetch, from whom

Pure. Layers are named globally, so states of any partition cover the layers of any other; those of one
iteration only, since layers of different iterations make a model that nobody trained.

Anyone may say that it holds anything. So what counts first is who may be expected to hold it: the members of
that stage under the plans that were run, and the keepers of their copies (`LayerAssignments`). Their word is
taken before any other's, then that of the larger number; how far a state reaches decides only among equals.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from swarmnode.pipeline.stages.stage_model import StagePart
from swarmnode.pipeline.stages.stage_state import StageState
from swarmnode.pipeline.wire.messages import Count, Digest

MAX_LAYERS = 4096
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]

_LAYER = re.compile(r"\.layers\.(\d{1,4})\.")


class Holding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """One stage's state after so many steps."""

    first_layer: Layer
    end_layer: Layer
    """One past the last."""
    has_ends: bool
    """Whether embedding, final norm and head are in it."""
    iteration: Count
    """Optimizer steps inside."""
    size_bytes: Count
    digest: Digest
    """SHA-256 of the bytes (stage_state.py)."""

    def __post_init__(self) -> None:
        if self.end_layer < self.first_layer:
            raise ValueError(f"no layers are [{self.first_layer}, {self.end_layer})")


@dataclass(frozen=True, slots=True)
class HeldState:
    """A holding with its bytes."""

    holding: Holding
    state: StageState

    @classmethod
    def of(cls, part: StagePart, iteration: int, state: StageState) -> "HeldState":
        holding = Holding(
            part.first_layer, part.end_layer, part.has_ends, iteration, len(state.data), state.digest
        )
        return cls(holding, state)


class HolderCredibility(IntEnum):
    """What speaks for a member that says it holds a state."""

    NONE = 0
    FITS = 1
    """The layers are those of a stage."""
    KEEPER = 2
    """It was to keep a copy of such a stage."""
    ASSIGNED = 3
    """It is a member of that stage."""


@dataclass(frozen=True, slots=True)
class LayerAssignments:
    """Who holds which layers under a plan, and who keeps whose copy."""

    ranges: Mapping[str, tuple[int, int]]
    """The first layer of each peer id, and one past its last."""
    keepers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Who keeps a copy, by the peer id of its owner."""

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
    """A holding, and who has it."""

    holding: Holding
    holders: tuple[str, ...]
    """Its holders, in the order in which they are to be asked."""
    credibility: HolderCredibility = HolderCredibility.NONE
    """The best of its holders."""
    backers: int = 1
    """How many holders have that credibility."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """The tensors of a part of the model, by global name."""

    tensors: dict[str, Tensor]
    iteration: int
    """Iteration of the oldest tensors, where they are mixed."""


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, by its global name, Adam's moments too; None for the ends.

    >>> layer_of("exp_avg/base_model.model.model.layers.7.mlp.up_proj.lora_A.weight")
    7
    """
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def of_part(tensors: Mapping[str, Tensor], part: StagePart) -> dict[str, Tensor]:
    """Those that belong to a part of the model."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (
            part.has_ends if (layer := layer_of(name)) is None else part.first_layer <= layer < part.end_layer
        )
    }


def offers(
    told: Mapping[str, Collection[Holding]], assignments: Sequence[LayerAssignments] = ()
) -> list[Offer]:
    """What members say they hold, by peer id, as offers. `assignments`: of the plans that were run.

    Of two digests of the same layers and iteration that of the better credibility counts, of equals the one
    with more holders of that credibility, then that of the smallest peer id: replicas compare their digests
    after every step, so what differs is the exception.
    """
    holders: dict[Holding, list[tuple[HolderCredibility, str]]] = {}
    for peer_id in sorted(told):
        for holding in set(told[peer_id]):
            credibility = max(
                (each.credibility(peer_id, holding) for each in assignments), default=HolderCredibility.NONE
            )
            holders.setdefault(holding, []).append((credibility, peer_id))
    best: dict[tuple[int, int, bool, int], Offer] = {}
    found = [_offer(holding, those) for holding, those in holders.items()]
    for offer in sorted(found, key=lambda o: (-o.credibility, -o.backers, o.holders, o.holding)):
        holding = offer.holding
        what = (holding.first_layer, holding.end_layer, holding.has_ends, holding.iteration)
        best.setdefault(what, offer)
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
    """Offers of one iteration that together hold all of the part; None: none do.

    The newest iteration that those hold who may be expected to; only where they hold none the newest that
    anyone says. `needs_ends`: the ends are trained, and the part has them. `at_most`: a holder may say any
    number. `mixed`: the newest of each layer instead: where the only member of some has died, they are some
    steps behind, and training mends that sooner than if the others went back to where those are.
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
    """Offers that cover the part from the left, always the newest; of equals with what is most to be
    believed, then with what reaches farthest."""
    chosen: list[Offer] = []
    at = part.first_layer
    while at < part.end_layer:
        reaching = [o for o in offered if o.holding.first_layer <= at < o.holding.end_layer]
        if not reaching:
            return None
        best = max(
            reaching,
            key=lambda o: (
                o.holding.iteration,
                o.credibility,
                o.backers,
                o.holding.end_layer,
                -o.holding.size_bytes,
            ),
        )
        chosen.append(best)
        at = best.holding.end_layer
    if needs_ends and not any(offer.holding.has_ends for offer in chosen):
        with_ends = [offer for offer in offered if offer.holding.has_ends]
        if not with_ends:
            return None
        chosen.append(
            min(
                with_ends,
                key=lambda o: (-o.holding.iteration, -o.credibility, -o.backers, o.holding.size_bytes),
            )
        )
    return chosen
