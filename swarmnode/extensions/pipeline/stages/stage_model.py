"""The layers of a causal LM that one member holds; on the data stage also the two ends of the model.

whole_model.py, loading.py -> [StageModel] -> stage_worker.py

The decoder is the one of the model's family, and so are its masks, rotary angles and windows. Layers that
other members hold are replaced by modules that pass hidden states through. Layers keep their numbers from the
whole model, so everything saved here is named `model.layers.7...` and can be loaded under another partition.

trial_cut.py tests which families can be cut like this.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from swarmnode.errors import ModelError
from swarmnode.model.attention import PACKED_ATTENTION, REPLACED, PackedLayout
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig

PEFT_PREFIX = "base_model.model."
"""Prefix of a module's own name in PEFT's files."""

ReadTensors = Callable[[Sequence[str]], dict[str, Tensor]]
"""Returns the named tensors of a model, and no other tensors."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The layers of a model that a stage holds, and the model's ends on the data stage."""

    first_layer: int
    end_layer: int
    """One past the last layer."""
    has_ends: bool = False
    """True for the data stage, which holds token embedding, final norm and head."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer <= self.end_layer:
            raise ModelError(f"a stage cannot hold layers [{self.first_layer}, {self.end_layer})")


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings that all members of a pipeline agree on, and the device of this member."""

    trainable: Literal["lora", "full"] = "lora"
    adapter: PolicyConfig = field(default_factory=PolicyConfig)
    """Rank and alpha of the adapters."""
    seed: int = 0
    """Seed of the adapters' first values."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class KeyValues(Protocol):
    """Keys and values of preceding tokens, as attention layers use them (stage_caches.py)."""

    def update(
        self, keys_BGTE: Tensor, values_BGTE: Tensor, layer_idx: int, *others: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a layer's new tokens. Layers are numbered as in the whole model.
        Returns all keys and values, [B, G, K, E], that these tokens may see."""
        ...

    def mask(self, window: int | None) -> Tensor:
        """Return a mask, [B, 1, T, K], of the K keys that each new token sees. `window` includes the token
        itself."""
        ...


class StageModel:
    """One stage: hidden states in, hidden states out. Made by `build_stage`."""

    def __init__(self, part: StagePart, causal_lm: Any, settings: StageSettings, packs: bool) -> None:
        """`causal_lm`: with its weights, but without the layers held by other members. `packs`: packed rows
        are possible."""
        self.part = part
        self.settings = settings
        self.packs = packs
        self.hidden_size: int = causal_lm.config.hidden_size
        self.vocabulary: int = causal_lm.config.vocab_size
        self.key_shape = key_shape(causal_lm.config)
        """Number of heads with their own keys and values, and their width."""
        if self.packs:
            causal_lm.set_attn_implementation(PACKED_ATTENTION)
        self._decoder = causal_lm.base_model
        self._embedding = causal_lm.get_input_embeddings()
        self._norm = self._decoder.norm
        self.head: nn.Module = causal_lm.get_output_embeddings()
        """Computes logits from hidden states after the final norm. Used only on the data stage."""
        causal_lm.eval().requires_grad_(settings.trainable == "full")
        own_parameters = dict(causal_lm.named_parameters())
        # The norm belongs after the last stage of a path, and only the path knows which stage that is.
        self._decoder.norm = _Elsewhere()
        if settings.trainable == "full":
            self._trainable = own_parameters
        elif part.first_layer == part.end_layer:
            self._trainable: dict[str, nn.Parameter] = {}
        else:
            self._trainable = _with_adapter(causal_lm, settings).trainable()

    @property
    def device(self) -> torch.device:
        return self.settings.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by global name: PEFT's names for adapters, or the model's own names
        with full training."""
        return dict(self._trainable)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the hidden states [B, T, D] before the first layer."""
        if not self.part.has_ends:
            raise ModelError("only the data stage holds the token embedding")
        return self._embedding(ids_BT)

    def forward(self, hidden_BTD: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return the output of our own layers, [B, T, D].

        With a layout, B is 1 and packed sequences do not see each other. Without one, positions in each row
        start at 0, and rows may be padded on the right.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        if layout is not None:
            arguments = layout.arguments(hidden_BTD)
            del arguments["input_ids"]
        return self._decoder(inputs_embeds=hidden_BTD, **arguments).last_hidden_state

    def forward_cached(self, hidden_BTD: Tensor, positions_BT: Tensor, cache: KeyValues) -> Tensor:
        """Return the output of our own layers, [B, T, D], for tokens whose preceding tokens are in a cache.

        Raises ModelError if the family's attention does not accept our mask.
        """
        config = self._decoder.config
        if config._attn_implementation not in (PACKED_ATTENTION, REPLACED):
            raise ModelError(
                f"attention by {config._attn_implementation} takes no mask of which keys are kept"
            )
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        mask: Any
        if kinds is None:
            mask = cache.mask(window)
        else:
            mask = {kind: cache.mask(window if kind == "sliding_attention" else None) for kind in set(kinds)}
        return self._decoder(
            inputs_embeds=hidden_BTD,
            position_ids=positions_BT,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=False,
        ).last_hidden_state

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        """Return the final norm of hidden states that have passed the last stage of their path, as input of
        the head."""
        if not self.part.has_ends:
            raise ModelError("only the data stage holds the final norm and the head")
        return self._norm(hidden_ND)


class _Elsewhere(nn.Module):
    """An identity module that replaces a module held by another stage."""

    def forward(self, hidden_BTD: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_BTD


def build_stage(
    config: Any, part: StagePart, read: ReadTensors, settings: StageSettings, packs: bool
) -> StageModel:
    """Return a stage of the model with this configuration. `read` is called once, for the tensors of this
    stage only.

    `packs`: the result of `try_cut`. Raises ModelError if the weights do not fit the configuration.
    """
    layers = int(config.get_text_config().num_hidden_layers)
    if part.end_layer > layers:
        raise ModelError(f"the model has {layers} layers, the stage wants up to {part.end_layer}")
    causal_lm = _meta_model(config, part, settings.dtype)
    _fill(causal_lm, read, settings)
    return StageModel(part, causal_lm, settings, packs)


def key_shape(config: Any) -> tuple[int, int]:
    """Return the number of a layer's heads with their own keys and values, and the width of each."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, width


def adapter_start(seed: int, module: str, shape: Sequence[int]) -> Tensor:
    """Return the initial values of a module's A matrix [rank, inputs], given the module's global name:
    float32, on the CPU.

    They have PEFT's distribution (Kaiming uniform with a = sqrt 5), but are drawn for each module separately,
    so every holder of a layer, under any partition, starts with the same adapter.
    """
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def _with_adapter(causal_lm: Any, settings: StageSettings) -> Policy:
    base = LoadedModel("a stage", causal_lm, tokenizer=None, fingerprint="")
    policy = Policy(base, settings.adapter, settings.seed)
    for name, parameter in policy.trainable().items():
        if ".lora_A." in name:
            module = name.removeprefix(PEFT_PREFIX).split(".lora_A.")[0]
            start = adapter_start(settings.seed, module, parameter.shape)
            parameter.data.copy_(start)
    policy.fuse()
    return policy


def _meta_model(config: Any, part: StagePart, dtype: torch.dtype) -> Any:
    """Return the causal LM without memory for its weights, and without the modules that other stages hold."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal_lm: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    decoder = causal_lm.base_model
    for number in range(len(decoder.layers)):
        if not part.first_layer <= number < part.end_layer:
            decoder.layers[number] = _Elsewhere()
    if not part.has_ends:
        decoder.norm = _Elsewhere()
        causal_lm.set_input_embeddings(_Elsewhere())
        causal_lm.set_output_embeddings(_Elsewhere())
    return causal_lm


def _fill(causal_lm: Any, read: ReadTensors, settings: StageSettings) -> None:
    wanted = {name: parameter.shape for name, parameter in causal_lm.named_parameters()}
    tensors = read(list(wanted))
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].shape != shape:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            raise ModelError(f"{name} should be {list(shape)}, its file has {found}")
        tensors[name] = tensors[name].to(settings.device, settings.dtype)
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    # Tied weights are one parameter under one name. Assigning separates the two modules, so tie them again.
    tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    causal_lm.load_state_dict(tensors, strict=False, assign=True)
    if tied:
        head.weight = embedding.weight
    # The rotary angles are computed, not stored, and the meta device did not compute them.
    rotary = causal_lm.base_model.rotary_emb
    causal_lm.base_model.rotary_emb = type(rotary)(config=causal_lm.config).to(settings.device)
    every = [*causal_lm.named_parameters(), *causal_lm.named_buffers()]
    empty = [name for name, tensor in every if tensor.is_meta]
    if empty:
        raise ModelError(f"nothing is stored for {empty[0]}")
