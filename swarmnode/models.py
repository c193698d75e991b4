"""Which model fits this machine: the arithmetic behind `--model auto`, printed so that it can be argued with.

hardware, configs/models.toml -> [models] -> cli join, doctor
"""

import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnode.config import Config
from swarmnode.errors import ModelError
from swarmnode.hardware import GIB, Gpu, usable_gpu

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

LOGIT_BYTES = 16
"""Per token and vocabulary entry: logits in bf16 and fp32, softmax, and gradients of both."""


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


def plan_memory(
    card: ModelCard,
    *,
    slots: int,
    sequence_tokens: int,
    micro_batch_tokens: int,
    weight_bytes: int = WEIGHT_BYTES,
) -> MemoryPlan:
    """Bytes that generating with and training `card` takes at once; `weight_bytes` is that of one number."""
    return MemoryPlan(
        weights=card.parameters * weight_bytes * ENGINE_COPIES,
        adapter=card.parameters * ADAPTER_SHARE * ADAPTER_BYTES,
        kv_cache=2 * card.layers * card.kv_heads * card.head_dim * weight_bytes * slots * sequence_tokens,
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
        hint="free GPU memory, or lower rollout.slots, rollout.max_tokens or training.micro_batch_tokens",
    )


def find_model(spec: str) -> str:
    """A folder when `spec` looks like one or is one, else the hub name it must be. Raises ModelError.

    >>> find_model("owner/name")
    'owner/name'
    """
    if not spec.strip():
        raise ModelError("--model is empty", hint="use `tiny`, a folder, or a hub name like owner/name")
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


def resolve_model(config: Config, cards_file: Path, remembered: Path) -> tuple[str, str]:
    """The model that `policy.model` means on this machine, and the reason in one sentence.

    `auto` stays with what it chose at the first start (`remembered` holds it): how much memory happens to be
    free later must not change which policy a node trains.
    """
    if config.policy.model != "auto":
        return config.policy.model, "as set"
    if remembered.exists():
        return (
            remembered.read_text().strip(),
            f"chosen at the first start ({remembered}); --model takes another",
        )
    return choose_for_machine(config, load_cards(cards_file), usable_gpu(config.policy.device))


def choose_for_machine(config: Config, cards: tuple[ModelCard, ...], gpu: Gpu | None) -> tuple[str, str]:
    """tiny without a GPU, or when nothing fits the one there is; else the largest model that fits."""
    if gpu is None or gpu.memory_free_bytes is None:
        return "tiny", "no GPU was found: the demonstration policy"
    rollout, free_bytes = config.rollout, gpu.memory_free_bytes
    try:
        card, plan = choose_model(
            cards,
            free_bytes,
            slots=min(rollout.slots, rollout.groups * rollout.group_size),
            sequence_tokens=rollout.max_prompt_tokens + rollout.max_tokens,
            micro_batch_tokens=config.training.micro_batch_tokens,
        )
    except ModelError as error:
        return "tiny", f"{error.message}: the demonstration policy. {error.hint}"
    return card.name, f"{plan.describe()} of {free_bytes / GIB:.1f} GiB free on {gpu.name}"


def remember_model(remembered: Path, model: str) -> None:
    """Keep what `auto` chose. A full disk only means that it chooses again."""
    with suppress(OSError):
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(model + "\n")
