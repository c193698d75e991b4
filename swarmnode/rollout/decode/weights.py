"""The weights of a dense decoder of a known family, arranged for the fewest operations per token.

family.py (which tensors, and what is done with them) --v
transformers model -> [weights] -> layers of one policy -> policy_mix.py -> decoder.py
PolicyUpdate ---------^   merged from the base each time (adapter.py), so that no rounding adds up

Differences from `transformers`: gate and up are one matrix; q, k and v are one matrix, ordered by key head
(its queries, its key, its value), so that no head has to be copied before it is multiplied; and within q and
k the partners of a rotary pair are adjacent, so that a rotation is one multiplication of complex numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmnode.errors import ModelError
from swarmnode.families.family import FAMILIES, Family, longest_sequence_of, unknown_family
from swarmnode.rollout.decode.adapters.adapter import PEFT_PREFIX, LoraPair, lora_pairs, merged_weight
from swarmnode.rollout.decode.matrix import Matrix, RmsNorm, matrix
from swarmnode.rollout.engine import PolicyUpdate


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
    score_scale: float | None = None
    """The model's own `scale`. None: head_dim^(-1/2)."""
    score_cap: float | None = None
    """The c of c tanh(score / c). None: scores are not capped."""

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on queries times keys."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The window and rotations of one kind of layer. Most families have one kind, Gemma 3 has two."""

    window: int | None
    """Number of visible tokens, including the newest. None: all. The cache holds the other tokens all the
    same."""
    inv_freq: Tensor
    """Angle per position of each pair of dimensions, [head_dim / 2] float32."""
    rotary_scaling: float
    """Factor of cosines and sines."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. A policy changes only its matrices."""

    attention_norm: Tensor
    qkv: Matrix
    """Projections of attention, by key head: its queries, its key, its value."""
    qk_norm: Tensor | None
    """Scale of a norm over each query and over the key, [queries of a key head + 1, head_dim]. In float32 on
    a CPU."""
    out: Matrix
    out_norm: Tensor | None
    """Scale of a norm over the output of attention."""
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    down_norm: Tensor | None
    """Scale of a norm over the output of the MLP."""


Layers = list[Layer]
"""The layers of a policy, in the decoder's form."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Returns the reason why `FusedWeights` cannot hold this model, or None if it can."""
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return unknown_family(config.model_type)
    if (reason := family.why_not(config)) is not None:
        return reason
    if family.score_cap_of(config) is not None and config._attn_implementation != "eager":
        # If training computed other log-probabilities than were sampled from, it would learn from noise.
        return f"its attention {config._attn_implementation} leaves out the cap of its scores (eager has it)"
    return _why_not_these(model, family)


def _why_not_these(model: PreTrainedModel, family: Family) -> str | None:
    """Returns the reason why these parameters cannot be held, or None."""
    weights = _base_parameters(model)
    if "lm_head.weight" not in weights:
        return "it has no language-model head"
    if not all(weight.is_floating_point() for weight in weights.values()):
        return "its weights are quantized"
    if len({(weight.device, weight.dtype) for weight in weights.values()}) != 1:
        return "its weights lie on several devices or have several types"
    layers = model.config.num_hidden_layers
    needed, biases = family.parameters(layers), _biases(family, layers, set(weights))
    if missing := sorted(needed - set(weights)):
        return f"it lacks {missing[0]}"
    if strange := sorted(set(weights) - needed - biases):
        return f"its {strange[0]} is not supported in {family.model_type}"
    if any(2 * len(kind.inv_freq) != _head_dim(model) for kind in _kinds(model, family)[0]):
        return "only a part of each head is rotated"
    return None


def _biases(family: Family, layers: int, found: set[str]) -> set[str]:
    """Returns the names of added biases: either all modules of a matrix have one, or none has."""
    matrices = (modules for layer in range(layers) for modules in family.projections(layer))
    wanted = ({f"{module}.bias" for module in modules} for modules in matrices)
    return {name for names in wanted if names <= found for name in names}


def longest_sequence(model: PreTrainedModel) -> int:
    """Returns the bound on a model's sequences. Raises ModelError if it states none."""
    if (longest := longest_sequence_of(model.config)) is None:
        raise ModelError("this model states no maximum length", hint="set max_length")
    return longest


class FusedWeights:
    """The weights common to all policies over one base model, and the merging of a policy. Leaves the model
    unchanged."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        if (reason := unsupported_reason(model)) is not None:
            raise ModelError(f"the embedded engine cannot run this model: {reason}", hint="use make_engine")
        self._family = family = FAMILIES[model.config.model_type]
        self.shape = _shape(model, family)
        self._base = _base_parameters(model)
        self._device = device
        self.embedding = self._base["model.embed_tokens.weight"].to(device)
        self.norm = RmsNorm(self.shape.norm_eps, device)
        self.final_norm = self._scale("model.norm.weight")
        self.head = matrix(self._base["lm_head.weight"].to(device), None)
        self.activation: str = getattr(model.config, family.activation)
        """One of `ACTIVATIONS`."""
        self.logit_cap = family.logit_cap_of(model.config)
        self.embedding_scale = _rounded(family.embedding_scale(model.config), self.embedding.dtype)
        kinds, self.kind_of_layer = _kinds(model, family)
        self.kinds = [replace(kind, inv_freq=kind.inv_freq.to(device)) for kind in kinds]
        """Indexed by `kind_of_layer`."""

    def pairs(self, update: PolicyUpdate) -> dict[str, LoraPair]:
        """Returns the LoRA of a policy by module. Raises EngineError if it does not fit this model."""
        return lora_pairs(update, self._lora_shapes())

    @torch.inference_mode()
    def merged(self, pairs: Mapping[str, LoraPair], former: Layers | None = None) -> Layers:
        """Returns the base with a LoRA merged. `former`: layers that are no longer needed; they are replaced
        one by one, so that at most one of them exists twice."""
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
        prefix, norms = f"model.layers.{index}.", self._family.norms
        qkv, out, gate_up, down = self._family.projections(index)
        return Layer(
            attention_norm=self._scale(f"{prefix}{norms.before_attention}.weight"),
            qkv=self._matrix(qkv, pairs, order=qkv_order(self.shape)),
            qk_norm=self._qk_norm(prefix) if self._family.head_norms else None,
            out=self._matrix(out, pairs),
            out_norm=self._scale_after(prefix, norms.after_attention),
            mlp_norm=self._scale(f"{prefix}{norms.before_mlp}.weight"),
            gate_up=self._matrix(gate_up, pairs),
            down=self._matrix(down, pairs),
            down_norm=self._scale_after(prefix, norms.after_mlp),
        )

    def _matrix(
        self, modules: Sequence[str], pairs: Mapping[str, LoraPair], order: Tensor | None = None
    ) -> Matrix:
        """Returns the merged weights of stacked modules, and their biases."""
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

    def _qk_norm(self, prefix: str) -> Tensor:
        order = _rotary_neighbours(self.shape.head_dim)
        queries = self._base[f"{prefix}self_attn.q_norm.weight"][order].expand(self.shape.group, -1)
        key = self._base[f"{prefix}self_attn.k_norm.weight"][order]
        return self._with_offset(torch.cat([queries, key[None]]))

    def _scale_after(self, prefix: str, norm: str | None) -> Tensor | None:
        return None if norm is None else self._scale(f"{prefix}{norm}.weight")

    def _scale(self, name: str) -> Tensor:
        return self._with_offset(self._base[name])

    def _with_offset(self, stored: Tensor) -> Tensor:
        """Returns the scale of a norm. With an offset it is in float32: in bfloat16, 1 + w would lose most of
        w."""
        stored = self._placed(stored)
        offset = self._family.norm_offset
        return self.norm.placed(stored.float() + offset if offset else stored)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).contiguous()


def qkv_order(shape: Shape) -> Tensor:
    """Returns, for each row of the fused matrix, its row in q, k and v stacked."""
    rotated = torch.arange((shape.heads + shape.kv_heads) * shape.head_dim).view(-1, shape.head_dim)
    rotated = rotated[:, _rotary_neighbours(shape.head_dim)]
    queries = rotated[: shape.heads].view(shape.kv_heads, -1)
    values = torch.arange(shape.kv_heads * shape.head_dim).view(shape.kv_heads, -1) + rotated.numel()
    return torch.cat([queries, rotated[shape.heads :], values], dim=1).flatten()


def _rotary_neighbours(head_dim: int) -> Tensor:
    """Returns 0, d/2, 1, d/2 + 1, ...: `transformers` rotates dimension i together with i + d/2."""
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def _shape(model: Any, family: Family) -> Shape:
    config = model.config
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(model),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=model.get_input_embeddings().weight.shape[0],
        norm_eps=config.rms_norm_eps,
        score_scale=family.score_scale(config),
        score_cap=family.score_cap_of(config),
    )


def _head_dim(model: Any) -> int:
    return model.model.layers[0].self_attn.head_dim


def _kinds(model: Any, family: Family) -> tuple[list[LayerKind], list[int]]:
    """Returns the kinds of layers, and the index of each layer's kind."""
    config, rotary = model.config, model.model.rotary_emb
    layers = range(config.num_hidden_layers)
    names = [(family.window_of(config, layer), family.rope_prefix(config, layer)) for layer in layers]
    distinct = list(dict.fromkeys(names))
    kinds = [
        LayerKind(
            window,
            getattr(rotary, f"{prefix}inv_freq").detach().float(),
            float(getattr(rotary, f"{prefix}attention_scaling")),
        )
        for window, prefix in distinct
    ]
    return kinds, [distinct.index(name) for name in names]


def _rounded(number: float | None, dtype: torch.dtype) -> float | None:
    """Returns the nearest number of this type."""
    return None if number is None else float(torch.tensor(number, dtype=dtype))


def _base_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns parameters by the names they had before PEFT put LoRA layers into the model."""
    return {
        name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ".lora_" not in name
    }
