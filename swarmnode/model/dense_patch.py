"""Runs the decoder layers of Llama and similar families on our arithmetic wherever it is equivalent.

policy.py -> lora_patch.py (which adapter has the tokens) -> [dense_patch] -> dense_layer.py, attention
families/family.py (which families have such layers) -------^
                                                                  |
                                                                  v  all else: transformers' own forward

Like `lora_patch`, this gives single modules another `forward`. Every call checks what differs between calls:
a cache, few tokens, or several adapters send it down transformers' path.
"""

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.families.family import FAMILIES, Family
from swarmnode.model.adapters.lora_patch import is_watched, sole_adapter
from swarmnode.model.dense_layer import Adapted, DenseLayer, Norm, into_attention, out_of_attention

logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TYPES = (torch.float32, torch.float64, torch.bfloat16)


def fuse_layers(model: nn.Module) -> int:
    """Runs the decoder layers of a causal LM on `dense_layer.py`, and returns the number of layers that can.

    Layers that are already patched, and those on a device other than a CPU, count and are left alone. If one
    layer is not exactly what this file knows, none is touched, and the log gives the reason.
    """
    layers = _layers(model)
    reason = next(filter(None, (_why_not(layer, family) for layer, family in layers)), None)
    if not layers or reason is not None:
        logger.info(
            "decoder layers keep transformers' forward: %s", reason or "their family is not known here"
        )
        return 0
    for layer, family in layers:
        if "forward" not in vars(layer):
            layer.forward = _DenseForward(layer, family, is_last=layer is layers[-1][0])
    return len(layers)


def read_arguments(model: Any, read_R: Tensor) -> dict[str, Any]:
    """Returns the arguments that make a decoder compute its last layer, after its attention, only for R of
    the flattened B*T tokens; none if its last layer cannot do that. Even then the output may hold all tokens,
    since a call can take transformers' path: its shape tells, [1, R, D] or [B, T, D].

    Of a prompt, only the last token predicts something that is learned: with short answers, most tokens skip
    the layer.
    """
    *_, last = getattr(model.base_model, "layers", None) or (None,)
    return {"read_R": read_R} if isinstance(getattr(last, "forward", None), _DenseForward) else {}


class _DenseForward:
    """Replaces the `forward` of one decoder layer; its class's stays available."""

    __slots__ = ("_attend_eagerly", "_family", "_is_last", "_layer", "_window")

    def __init__(self, layer: Any, family: Family, *, is_last: bool) -> None:
        self._layer = layer
        self._is_last = is_last
        modeling = import_module(type(layer).__module__)
        self._attend_eagerly = modeling.eager_attention_forward
        self._family = family
        attention = layer.self_attn
        # As transformers' layers of the family pass it: not at all if the family has no windows.
        self._window = {}
        if family.windows != "none":
            self._window = {"sliding_window": family.window_of(attention.config, attention.layer_idx)}

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        read_R: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Runs the layer as transformers calls it: [B, T, D] in and out, or [1, R, D] out of the last one."""
        dense = None
        if past_key_values is None and position_embeddings is not None:
            dense = self._dense(hidden_states)
        if dense is None or position_embeddings is None:
            return type(self._layer).forward(
                self._layer, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **others,
            )  # fmt: skip
        shape = hidden_states.shape[:2]
        hidden_MD = hidden_states.flatten(0, 1)
        cos_ME, sin_ME = (
            part.to(hidden_MD.dtype).expand(*shape, -1).flatten(0, 1) for part in position_embeddings
        )
        heads = into_attention(hidden_MD, cos_ME, sin_ME, dense)
        queries, keys, values = (part.unflatten(0, shape).transpose(1, 2) for part in heads)
        others |= {"position_ids": position_ids, "use_cache": use_cache}
        attended_BTHE = self._attend(queries, keys, values, attention_mask, others)
        attended_MX = attended_BTHE.reshape(len(hidden_MD), -1)
        if self._is_last and read_R is not None:
            attended_MX, hidden_MD = attended_MX.index_select(0, read_R), hidden_MD.index_select(0, read_R)
            shape = (1, len(read_R))
        return out_of_attention(attended_MX, hidden_MD, dense).unflatten(0, shape)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, others: dict[str, Any]
    ) -> Tensor:
        """Runs the attention implementation that the model is set to, called like its own layers call it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module = self._layer.self_attn
        name = module.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, self._attend_eagerly)
        found, _ = attend(
            module, queries, keys, values, mask, scaling=module.scaling, **self._window, **others
        )
        return found

    def _dense(self, hidden_BTD: Tensor) -> DenseLayer | None:
        """Returns this layer's current operands. None: only transformers' own forward is right."""
        layer = self._layer
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if self._family.head_norms else []
        dtype = hidden_BTD.dtype
        tokens = hidden_BTD.shape[0] * hidden_BTD.shape[1]
        if (
            hidden_BTD.device.type != "cpu"
            or dtype not in TYPES
            # With fewer tokens, arranging the weights costs more than it saves.
            or tokens < hidden_BTD.shape[2]
            or any(norm.weight.dtype is not dtype for norm in norms)
        ):
            return None
        modules = [getattr(attention if name in PROJECTIONS[:4] else mlp, name) for name in PROJECTIONS]
        adapted: list[Adapted] = []
        for module in modules:
            adapter = sole_adapter(module, tokens)
            if adapter is None or module.base_layer.weight.dtype is not dtype:
                return None
            adapted.append(Adapted(module.base_layer.weight, module.base_layer.bias, adapter))
        scales = [Norm(norm.weight, norm.variance_epsilon) for norm in norms]
        return DenseLayer(
            head_dim=attention.head_dim,
            before=scales[0],
            qkv=(adapted[0], adapted[1], adapted[2]),
            head_norms=(scales[2], scales[3]) if len(scales) > 2 else (None, None),
            out=(adapted[3],),
            after=scales[1],
            gate_up=(adapted[4], adapted[5]),
            down=(adapted[6],),
        )


def _layers(model: nn.Module) -> list[tuple[Any, Family]]:
    """Returns the decoder layers of transformers that equal Llama's except for options of a family record,
    each with its record."""
    known = {
        (family.model_type, f"{family.classes}DecoderLayer"): family
        for family in FAMILIES.values()
        if family.has_llama_layers
    }
    names = {name for _, name in known}
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in names]
    found = [
        (layer, known.get((layer.self_attn.config.model_type, type(layer).__name__)))
        for layer in layers
        if type(layer).__module__.startswith("transformers.models.")
    ]
    return [(layer, family) for layer, family in found if family is not None]


def _why_not(layer: Any, family: Family) -> str | None:
    """Returns the reason, found in the layer, to keep transformers' forward, or None."""
    modeling = import_module(type(layer).__module__)
    expected = {"self_attn": "Attention", "mlp": "MLP"} | dict.fromkeys(family.norms.names, "RMSNorm")
    if family.head_norms:
        expected |= {"self_attn.q_norm": "RMSNorm", "self_attn.k_norm": "RMSNorm"}
    for name, kind in expected.items():
        module = layer.get_submodule(name)
        if type(module) is not getattr(modeling, family.classes + kind):
            return f"its {name} is a {type(module).__name__}"
        if "forward" in vars(module):
            return f"another library has replaced the forward of its {name}"
    activation = getattr(layer.self_attn.config, family.activation)
    if activation != "silu":
        return f"its activation is {activation}, not silu"
    if any(is_watched(part) for part in layer.modules() if part is not layer):
        return "a hook waits for calls of its parts"
    if "forward" in vars(layer) and not isinstance(layer.forward, _DenseForward):
        return "another forward stands before its layers already"
    return None
