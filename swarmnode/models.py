"""Which model fits this machine: the arithmetic behind `--model auto`, printed so that it can be argued with.

hardware, configs/models.toml -> [models] -> cli join, doctor
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from swarmnode.config import Config
from swarmnode.errors import ModelError
from swarmnode.hardware import GIB, nvidia_gpus

WEIGHT_BYTES = 2
"""bfloat16."""
ENGINE_COPIES = 2
"""The embedded engine keeps merged weights of its own beside the trainer's."""
ADAPTER_SHARE = 0.012
"""Trainable share of a rank-16 adapter on all linear layers (0.9-1.2 % for these models)."""
ADAPTER_BYTES = 16
"""fp32 weight, gradient and two Adam moments."""
ACTIVATION_FACTOR = 34
"""Bytes per token, layer and hidden unit kept for the backward pass (Korthikanti et al. 2022, eq. 2)."""

LOGIT_BYTES = 10
"""Per token and vocabulary entry: bf16 logits, their fp32 copy and its gradient."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of one model that memory depends on."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose for training one model with these settings."""

    weights: float
    adapter: float
    kv_cache: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.adapter + self.kv_cache + self.activations

    def describe(self) -> str:
        """One line of arithmetic in GiB."""
        return (
            f"{self.total / GIB:.1f} GiB = weights {self.weights / GIB:.1f}"
            f" + adapter {self.adapter / GIB:.1f} + KV cache {self.kv_cache / GIB:.1f}"
            f" + activations {self.activations / GIB:.1f}"
        )


def load_cards(path: Path) -> tuple[ModelCard, ...]:
    """Cards of configs/models.toml, in its order."""
    return tuple(ModelCard(**card) for card in tomllib.loads(path.read_text())["models"])


def plan_memory(card: ModelCard, *, slots: int, sequence_tokens: int, micro_batch_tokens: int) -> MemoryPlan:
    """Bytes that training `card` takes on one GPU."""
    return MemoryPlan(
        weights=card.parameters * WEIGHT_BYTES * ENGINE_COPIES,
        adapter=card.parameters * ADAPTER_SHARE * ADAPTER_BYTES,
        kv_cache=2 * card.layers * card.kv_heads * card.head_dim * WEIGHT_BYTES * slots * sequence_tokens,
        activations=micro_batch_tokens
        * (ACTIVATION_FACTOR * card.layers * card.hidden + LOGIT_BYTES * card.vocabulary),
    )


def choose_model(
    cards: tuple[ModelCard, ...],
    free_bytes: int,
    *,
    slots: int,
    sequence_tokens: int,
    micro_batch_tokens: int,
) -> tuple[ModelCard, MemoryPlan]:
    """The first card that fits. Raises ModelError with the smallest one's arithmetic when none does."""
    plan = None
    for card in cards:
        plan = plan_memory(
            card, slots=slots, sequence_tokens=sequence_tokens, micro_batch_tokens=micro_batch_tokens
        )
        if plan.total <= free_bytes:
            return card, plan
    need = f"{cards[-1].name} needs {plan.describe()}" if plan else "there are no model cards"
    raise ModelError(
        f"no model fits: {need}, the GPU has {free_bytes / GIB:.1f} GiB free",
        hint="free GPU memory, lower --set rollout.slots=... or rollout.max_tokens=..., or use --model tiny",
    )


def find_model(spec: str) -> str:
    """A folder when `spec` looks like one or is one, else the hub name it must be. Raises ModelError.

    >>> find_model("owner/name")
    'owner/name'
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json", hint="point --model at a saved transformers model")
        return str(path)
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise ModelError(
            f"--model {spec}: no such folder",
            hint="check the path, or use `tiny` or a hub name like owner/name",
        )
    return spec


def resolve_model(config: Config, cards_file: Path) -> tuple[str, str]:
    """The model that `policy.model` means on this machine, and the reason in one sentence."""
    if config.policy.model != "auto":
        return config.policy.model, "as set"
    gpus = [gpu for gpu in nvidia_gpus() if gpu.memory_free_bytes is not None]
    if not gpus:
        return "tiny", "no GPU was found: the demonstration policy"
    free_bytes = max(gpu.memory_free_bytes or 0 for gpu in gpus)
    rollout = config.rollout
    card, plan = choose_model(
        load_cards(cards_file),
        free_bytes,
        slots=min(rollout.slots, rollout.groups * rollout.group_size),
        sequence_tokens=rollout.max_prompt_tokens + rollout.max_tokens,
        micro_batch_tokens=config.training.micro_batch_tokens,
    )
    return card.name, f"{plan.describe()} of {free_bytes / GIB:.1f} GiB free"
