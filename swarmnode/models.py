"""Chooses a model that fits this machine, and collects facts about a model before it is loaded: shapes, never
guesses."""

import json
import math
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarmnode.engine_record import EngineRecord, by_preference, record_of
from swarmnode.errors import ModelError
from swarmnode.machine.hardware import GIB, Gpu, cpu_has_bf16, find_card
from swarmnode.machine.memory_plan import MemoryPlan, ModelCard, Workload, plan_memory, size_text
from swarmnode.machine.storage import make_folder
from swarmnode.settings.config import Config

PLANNED_TOKENS = 4096
"""Micro-batch tokens with which a model is chosen; free memory later decides the real number
(model/budget.py)."""
LARGEST_HEADER_BYTES = 100_000_000
"""Most bytes of a header, the same bound as in safetensors itself."""
BF16_CAPABILITY = 8.0
"""Compute capability from which NVIDIA cards multiply in bfloat16 (Ampere). On older cards torch emulates it,
far slower than float32."""
BF16_FROM_HIDDEN = 256
"""Width from which bfloat16 pays on a CPU: in narrower models a layer's products are not the main cost."""
LOWER = "lower rollout.slots, rollout.max_tokens or training.micro_batch_tokens, or choose a smaller --model"

TINY = ModelCard(
    "tiny",
    parameters=111_168,
    layers=2,
    hidden=64,
    intermediate=160,
    heads=2,
    kv_heads=2,
    head_dim=32,
    vocabulary=258,
    tied=True,
    qk_norm=True,
)
"""Card of the model that extensions/demonstration/tiny.py builds."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a model: its card, or the reason why there is none."""

    card: ModelCard | None
    source: str


def load_cards(path: Path) -> tuple[ModelCard, ...]:
    """Returns the cards of configs/models.toml, in its order."""
    return tuple(ModelCard(**card) for card in tomllib.loads(path.read_text())["models"])


def find_facts(spec: str, cards: tuple[ModelCard, ...]) -> Facts:
    """Returns the facts about a model without loading or downloading anything."""
    known = next((card for card in (TINY, *cards) if card.name == spec), None)
    if known is not None:
        return Facts(known, "its card")
    folder = folder_of(spec)
    if folder is None:
        return Facts(None, f"{spec} is not on this disk yet, so its size is unknown")
    return read_facts(folder, spec)


def read_facts(folder: Path, name: str) -> Facts:
    """Returns the facts about a model from config.json and the headers of its weights; the weights themselves
    are not read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        shapes = _tensor_shapes(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Facts(None, f"cannot read the size of {name} from its files: {error}")
    return card_of(name, config.get("text_config", config), sum(map(math.prod, shapes.values())), shapes)


def read_config(spec: str) -> dict[str, Any] | None:
    """Returns config.json of a model on this disk, or None if it is missing or cannot be read."""
    folder = folder_of(spec)
    try:
        config = None if folder is None else json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None  # pyright: ignore[reportUnknownVariableType]


def card_of(name: str, config: Mapping[str, Any], parameters: int, tensors: Collection[str]) -> Facts:
    """Returns the card of a dense decoder from its configuration and the names of its tensors. The number of
    parameters must match the shapes: this reveals experts or gates that a configuration does not mention.

    >>> card_of("m", {}, 0, ()).source
    'the configuration of m has no num_attention_heads'
    """
    found = {key: config.get(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")}
    found |= {key: config.get(key) for key in ("intermediate_size", "vocab_size")}
    missing = [key for key, value in found.items() if not (isinstance(value, int) and value > 0)]
    if missing:
        return Facts(None, f"the configuration of {name} has no {missing[0]}")
    heads, hidden, layers, intermediate, vocabulary = (int(value) for value in found.values() if value)
    card = ModelCard(
        name,
        parameters,
        layers,
        hidden,
        intermediate,
        heads,
        # Models without grouped-query attention do not name these two.
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=vocabulary,
        tied=not any(tensor.endswith("lm_head.weight") for tensor in tensors),
        qk_norm=any(tensor.endswith("q_norm.weight") for tensor in tensors),
    )
    if not card.is_consistent:
        return Facts(
            None, f"{name} is not a dense decoder with a gated MLP in 16 or 32 bits: its shapes do not match"
        )
    return Facts(card, "its files")


def folder_of(spec: str) -> Path | None:
    """Returns the folder of a model on this disk: the given one, or that in the hub's cache."""
    if Path(spec).expanduser().is_dir():
        return Path(spec).expanduser()
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(spec, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Returns the shapes of all weights by name, from the headers of the files that transformers would
    load."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    shapes: dict[str, list[int]] = {}
    for name in names:
        header = _header(folder / name)
        shapes |= {key: entry["shape"] for key, entry in header.items() if key != "__metadata__"}
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """Returns the JSON at the start of a safetensors file, whose length is in the first eight bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        return json.loads(file.read(size))


def workload(config: Config, gpu: Gpu | None, *, hidden: int = 0) -> Workload:
    """Returns the work that the settings ask for, with a model on this card (None: on the CPU). `hidden`: its
    width, 0 if unknown."""
    rollout, nf4 = config.rollout, config.policy.quantization == "nf4"
    return Workload(
        rank=config.policy.lora_rank,
        slots=min(rollout.slots, rollout.groups * rollout.group_size) * config.node.policies,
        sequence_tokens=rollout.max_prompt_tokens + rollout.max_tokens,
        micro_batch_tokens=config.training.micro_batch_tokens or PLANNED_TOKENS,
        number_bytes=number_bytes(config.policy.dtype, gpu, 0 if nf4 else hidden),
        nf4=nf4,
        policies=config.node.policies,
        engine=expected_engine(config, gpu is not None),
        gpu=gpu is not None,
        checkpointing=config.training.gradient_checkpointing == "on",
    )


def expected_engine(config: Config, gpu: bool) -> EngineRecord:
    """Returns the engine that rollout/engine_choice.py will choose for a model that all of them can run."""
    device, packed = "cuda" if gpu else "cpu", config.policy.quantization != "none"
    if config.rollout.engine != "auto":
        return record_of(config.rollout.engine)
    usable = (one for one in by_preference(device) if one.missing(device) is None)
    return next(one for one in usable if one.takes_quantized or not packed)


def number_bytes(dtype: str, gpu: Gpu | None, hidden: int = 0) -> int:
    """Returns the bytes of a weight under `policy.dtype`. auto: 2 on a card that multiplies in bfloat16, and
    on a CPU where bfloat16 pays for a model of this width.

    >>> number_bytes("auto", None), number_bytes("auto", Gpu("T4", None, None, capability=7.5))
    (4, 4)
    """
    if dtype != "auto":
        return 4 if dtype == "float32" else 2
    if gpu is None:
        return 2 if bf16_pays_on_cpu(hidden) else 4
    return 2 if (gpu.capability or BF16_CAPABILITY) >= BF16_CAPABILITY else 4


def bf16_pays_on_cpu(hidden: int) -> bool:
    """Returns True if a model of this width generates and trains faster in bfloat16 on this CPU."""
    return hidden >= BF16_FROM_HIDDEN and cpu_has_bf16()


def choose_model(
    cards: tuple[ModelCard, ...], free_bytes: int, work: Workload
) -> tuple[ModelCard, MemoryPlan]:
    """Returns the first card that fits. Raises ModelError with the smallest one's arithmetic if none does."""
    plan = None
    for card in cards:
        plan = plan_memory(card, work)
        if plan.total <= free_bytes:
            return card, plan
    need = f"{cards[-1].name} needs {plan.describe()}" if plan else "there are no model cards"
    raise ModelError(
        f"no model fits: {need}, the GPU has {size_text(free_bytes)} free",
        hint="free GPU memory, or lower rollout.slots, rollout.max_tokens or training.micro_batch_tokens",
    )


def find_model(spec: str) -> str:
    """Returns the absolute path if `spec` is a folder, as runs record it, else the hub name. Raises
    ModelError.

    >>> find_model("owner/name")
    'owner/name'
    """
    if not spec.strip():
        raise ModelError("--model is empty", hint="use `tiny`, a folder, or a hub name like owner/name")
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            hint = "point --model at a saved transformers model"
            if (path / "adapter_config.json").exists():
                hint = "it is an adapter: pass its base, or save both as one model with merge_and_unload()"
            raise ModelError(f"{path} has no config.json", hint=hint)
        return str(path.absolute())
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise ModelError(
            f"--model {spec}: no such folder",
            hint="check the path, or use `tiny` or a hub name like owner/name",
        )
    return spec


def resolve_model(config: Config, cards_file: Path, remembered: Path) -> tuple[str, str]:
    """Returns the model that `policy.model` means on this machine, and the reason in one sentence.

    `auto` keeps what it chose at the first start (stored in `remembered`): the amount of memory that happens
    to be free later must not change which policy a node trains.
    """
    if config.policy.model != "auto":
        return config.policy.model, "as set"
    if remembered.exists():
        return (
            remembered.read_text().strip(),
            f"chosen at the first start ({remembered}); --model takes another",
        )
    card = find_card(config.policy.device)
    return choose_for_machine(config, load_cards(cards_file), card.gpu, card.problem)


def within_limit(config: Config, free_bytes: float, taken_bytes: float = 0.0) -> float:
    """Returns the free bytes that we may use within limits.memory_gb, beside `taken_bytes` already in use."""
    most = config.limits.memory_gb
    return free_bytes if most is None else max(0.0, min(free_bytes, most * GIB - taken_bytes))


def choose_for_machine(
    config: Config, cards: tuple[ModelCard, ...], gpu: Gpu | None, problem: str = ""
) -> tuple[str, str]:
    """Returns the largest model that fits, or tiny if there is no GPU that torch can use or nothing fits.
    `problem`: the reason why an existing GPU is not used."""
    if gpu is None or gpu.memory_free_bytes is None:
        return "tiny", f"{problem or 'no GPU was found'}; using the demonstration policy"
    free_bytes = int(within_limit(config, gpu.memory_free_bytes))
    try:
        card, plan = choose_model(cards, free_bytes, workload(config, gpu))
    except ModelError as error:
        return "tiny", f"{error.message}; using the demonstration policy. {error.hint}"
    return card.name, f"{plan.describe()} of {size_text(free_bytes)} free on {gpu.name}"


def remember_model(remembered: Path, model: str) -> None:
    """Stores the choice of `auto`. On a full disk, it will choose again at the next start."""
    with suppress(OSError):
        make_folder(remembered.parent)
        remembered.write_text(model + "\n")
