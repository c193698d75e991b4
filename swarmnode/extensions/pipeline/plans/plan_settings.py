"""Settings that all members of a pipeline agree on before they plan together, and the costs of layers.

Config, model_costs.py -> [PlanSettings] -> planning.py; [plan_terms] -> announcements
"""

import hashlib
from dataclasses import dataclass

import msgspec

MAX_SHOWN_CHARS = 64
"""Longest text of one setting in `plan_terms`."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for the member that holds it."""

    held_bytes: int
    """Bytes of the weights and of training them: adapter, gradients, optimizer state."""
    forward_s: float
    """Seconds of one token on the reference device, whose speed is 1."""
    activation_bytes: int
    """Bytes of one token that are kept between forward and backward."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model's layers."""

    layer: LayerCost
    """Costs of one layer. In everything that planning considers, all layers are alike."""
    layers: int
    ends: LayerCost
    """Costs of embedding, final norm, head and loss together. They are always in stage 0."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """All settings that determine a plan, apart from the members. They must be equal on all members, or no
    plan is agreed on."""

    model: ModelCosts
    micro_batch_tokens: int
    token_bytes: int
    """Bytes of one token between stages, after compression."""
    skip: float = 0.0
    """Share of stages that a micro-batch skips."""
    slots: int = 3
    """Micro-batches that a member must be able to hold between their forward and backward passes."""
    waves: int = 1
    """Micro-batches of each agent in one iteration."""
    stages: int | None = None
    """Number of stages. None: the number that processes the most micro-batches. With fewer members than
    stages, there are fewer stages."""
    search_tasks: int = 200_000
    """Tasks that the search simulates, about a second of CPU. Equal on all members, so that they agree."""

    others: tuple[tuple[str, str], ...] = ()
    """Names and values of settings that do not affect a plan but must be equal on all members."""


def plan_terms(settings: PlanSettings, model_name: str) -> dict[str, str]:
    """Return the settings as short texts for announcements: a member that differs is told in which ones."""
    every: dict[str, object] = msgspec.to_builtins(settings)
    del every["others"]
    shown = {name: str(value) for name, value in (*every.items(), *settings.others)}
    costs = msgspec.json.encode(settings.model, order="deterministic")
    shown |= {"model": model_name, "layer_costs": hashlib.sha256(costs).hexdigest()[:16]}
    return {name: text[:MAX_SHOWN_CHARS] for name, text in sorted(shown.items())}
