"""The weights of a dense Llama, Qwen2 or Qwen3 model, arranged for the fewest operations per token.

transformers model -> [weights] -> layers of one policy -> mixing.py -> decoder.py
PolicyUpdate ---------^   merged from the base each time (merging.py), so that no rounding adds up

What differs from `transformers`: gate and up are one matrix; q, k and v are one matrix, ordered by key head
(its queries, its key, its value), so that no head has to be copied to be multiplied; and within q and k the
partners of a rotary pair are neighbours, so that a rotation is one multiplication of complex numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import ModelError
from swarmnode.rollout.decode.adapter import PEFT_PREFIX, LoraPair, lora_pairs
from swarmnode.rollout.decode.matrix import Matrix, matrix
from swarmnode.rollout.decode.merging import merged_weight
from swarmnode.rollout.decode.norm import RmsNorm
from swarmnode.rollout.engine import PolicyUpdate
from swarmnode.rollout.families import SUPPORTED_FAMILIES

FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings whose frequencies do not depend on how long a sequence has become."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    norm_eps: float

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. A policy changes its matrices and nothing else."""

    attention_norm: Tensor
    qkv: Matrix
    """Per key head: its queries, its key, its value."""
    qk_norm: Tensor | None
    """[queries of a key head + 1, head_dim]: the scale of Qwen3's norm over each query and over the key. On a
    CPU in float32."""
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


Layers = list[Layer]
"""A policy, as the decoder runs it."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why `FusedWeights` cannot hold this model, or None when it can."""
    config = model.config
    if config.model_type not in SUPPORTED_FAMILIES:
        return f"{config.model_type} is not one of {', '.join(SUPPORTED_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if "sliding_attention" in (config.to_dict().get("layer_types") or ()):
        return "it attends through a sliding window"
    rope = config.rope_parameters["rope_type"]
    if rope not in FIXED_ROPES:
        return f"its rotary scaling {rope} changes with the length of a sequence"
    weights = _base_parameters(model)
    if "lm_head.weight" not in weights:
        return "it has no language-model head"
    if not all(weight.is_floating_point() for weight in weights.values()):
        return "its weights are quantized"
    if len({(weight.device, weight.dtype) for weight in weights.values()}) != 1:
        return "its weights lie on several devices or have several types"
    return None


def longest_sequence(model: PreTrainedModel) -> int:
    """The length a model was made for."""
    try:
        return model.config.get_text_config().max_position_embeddings
    except AttributeError:
        raise ModelError("this model states no maximum length", hint="set max_length") from None


class FusedWeights:
    """What all policies over one base model share, and how to merge one of them. The model is left alone."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        if (reason := unsupported_reason(model)) is not None:
            raise ModelError(f"the embedded engine cannot run this model: {reason}", hint="use make_engine")
        self.shape = _shape(model)
        self._base = _base_parameters(model)
        self._device = device
        self.embedding = self._base["model.embed_tokens.weight"].to(device)
        self.norm = RmsNorm(self.shape.norm_eps, device)
        self.final_norm = self._scale("model.norm.weight")
        self.head = matrix(self._base["lm_head.weight"].to(device), None)
        rotary = model.model.rotary_emb
        self.inv_freq = rotary.inv_freq.detach().to(device=device, dtype=torch.float32)
        self.rotary_scaling = float(rotary.attention_scaling)

    def pairs(self, update: PolicyUpdate) -> dict[str, LoraPair]:
        """The LoRA of a policy by module. Raises EngineError for one that is not for this model."""
        return lora_pairs(update, self._lora_shapes())

    @torch.inference_mode()
    def merged(self, pairs: Mapping[str, LoraPair], former: Layers | None = None) -> Layers:
        """The base with a LoRA. `former` are layers that nobody needs any more: they are replaced one by one,
        so that there is never more than one of them twice."""
        layers = [] if former is None else former
        for index in range(self.shape.layers):
            layers[index : index + 1] = [self._layer(index, pairs)]
        return layers

    def _lora_shapes(self) -> dict[str, tuple[int, int]]:
        modules = (name.removesuffix(".weight") for name, weight in self._base.items() if weight.ndim == 2)
        return {
            name: (self._base[name + ".weight"].shape[0], self._base[name + ".weight"].shape[1])
            for name in modules
            if name.endswith("_proj")
        }

    def _layer(self, index: int, pairs: Mapping[str, LoraPair]) -> Layer:
        prefix = f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        gate_up = [f"{prefix}mlp.{name}" for name in ("gate_proj", "up_proj")]
        out, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"
        return Layer(
            attention_norm=self._scale(f"{prefix}input_layernorm.weight"),
            qkv=self._matrix(qkv, pairs, order=qkv_order(self.shape)),
            qk_norm=self._qk_norm(prefix),
            out=self._matrix([out], pairs),
            mlp_norm=self._scale(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._matrix(gate_up, pairs),
            down=self._matrix([down], pairs),
        )

    def _matrix(
        self, modules: Sequence[str], pairs: Mapping[str, LoraPair], order: Tensor | None = None
    ) -> Matrix:
        """The merged weights of modules on top of each other, and their biases."""
        stacked = torch.cat([self._merged(module, pairs) for module in modules])
        weight = self._placed(stacked if order is None else stacked[order])
        return matrix(weight, self._bias(modules, order))

    def _merged(self, module: str, pairs: Mapping[str, LoraPair]) -> Tensor:
        weight = self._base[module + ".weight"]
        if module not in pairs:
            return weight
        return merged_weight(weight, pairs[module])

    def _bias(self, modules: Sequence[str], order: Tensor | None) -> Tensor | None:
        if modules[0] + ".bias" not in self._base:
            return None
        stacked = torch.cat([self._base[module + ".bias"] for module in modules])
        return self._placed(stacked if order is None else stacked[order])

    def _qk_norm(self, prefix: str) -> Tensor | None:
        if f"{prefix}self_attn.q_norm.weight" not in self._base:
            return None
        order = _rotary_neighbours(self.shape.head_dim)
        queries = self._base[f"{prefix}self_attn.q_norm.weight"][order].expand(self.shape.group, -1)
        key = self._base[f"{prefix}self_attn.k_norm.weight"][order]
        return self.norm.placed(self._placed(torch.cat([queries, key[None]])))

    def _scale(self, name: str) -> Tensor:
        return self.norm.placed(self._placed(self._base[name]))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).contiguous()


def qkv_order(shape: Shape) -> Tensor:
    """Which row of q, k and v on top of each other each row of the fused matrix is."""
    rotated = torch.arange((shape.heads + shape.kv_heads) * shape.head_dim).view(-1, shape.head_dim)
    rotated = rotated[:, _rotary_neighbours(shape.head_dim)]
    queries = rotated[: shape.heads].view(shape.kv_heads, -1)
    values = torch.arange(shape.kv_heads * shape.head_dim).view(shape.kv_heads, -1) + rotated.numel()
    return torch.cat([queries, rotated[shape.heads :], values], dim=1).flatten()


def _rotary_neighbours(head_dim: int) -> Tensor:
    """0, d/2, 1, d/2 + 1, ...: `transformers` rotates dimension i together with i + d/2."""
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def _shape(model: Any) -> Shape:
    config = model.config
    attention = model.model.layers[0].self_attn
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=model.get_input_embeddings().weight.shape[0],
        norm_eps=config.rms_norm_eps,
    )


def _base_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters by the names they had before PEFT put LoRA layers into the model, if it did."""
    return {
        name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ".lora_" not in name
    }
