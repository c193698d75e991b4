"""Members that exist on paper only: what they announce, for tests of planning and membership."""

from collections.abc import Iterable, Sequence

from swarmnode.extensions.pipeline.plans.member_costs import (
    CostAnnouncement,
    LinkCosts,
    MemberCosts,
    StageTiming,
)
from swarmnode.extensions.pipeline.plans.plan_settings import LayerCost, ModelCosts, PlanSettings

MB = 10**6


def model(layers: int = 6) -> ModelCosts:
    layer = LayerCost(held_bytes=100 * MB, forward_s=1e-5, activation_bytes=1000)
    return ModelCosts(layer, layers, LayerCost(held_bytes=50 * MB, forward_s=2e-6, activation_bytes=1000))


def settings(layers: int = 6, **changes: object) -> PlanSettings:
    """Of a pipeline that is planned within a tenth of a second."""
    given: dict[str, object] = {"search_tasks": 3000, "slots": 4, **changes}
    return PlanSettings(model(layers), micro_batch_tokens=1000, token_bytes=2000, **given)  # type: ignore[arg-type]


def costs(
    peer: str, *, free: int = 400 * MB, speed: float = 1.0, data: bool = True, at_s: float = 1e6
) -> MemberCosts:
    timings = (StageTiming(1, 1e-5 / speed, 2e-5 / speed), StageTiming(4, 4e-5 / speed, 8e-5 / speed))
    return MemberCosts(
        peer_id=peer, free_bytes=free, memory_slots=4, holds_data=data, timings=timings, measured_at_s=at_s
    )


def links(peer: str, others: Iterable[str]) -> dict[str, LinkCosts]:
    """Each pair has its own latency, the same from both ends."""
    return {
        other: LinkCosts(0.01 * (1 + sum(map(ord, peer + other)) % 7), 1e8)
        for other in others
        if other != peer
    }


def announced(members: Sequence[MemberCosts]) -> tuple[CostAnnouncement, ...]:
    names = [each.peer_id for each in members]
    return tuple(CostAnnouncement(each, links(each.peer_id, names), {}) for each in members)
