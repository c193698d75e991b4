"""The differences between families of dense decoders: one record each, used by engine and training alike."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swarmnode.errors import EngineError

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Gates of an MLP that decoder.py implements, by transformers' names: x sigmoid(x) (SwiGLU) and the tanh
approximation of GELU (GeGLU; both arXiv 2002.05202)."""

FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that stretch the frequencies once, whatever the length of a sequence, as transformers'
`modeling_rope_utils` computes them: linear (arXiv 2306.15595), that of Llama 3.1 (arXiv 2407.21783), YaRN
(arXiv 2309.00071)."""

GROWING_ROPES = ("dynamic", "longrope")
"""Rotary scalings whose frequencies change as a sequence grows: cached keys would have to be rotated again
(dynamic NTK; LongRoPE, arXiv 2402.13753)."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Entries of `config.layer_types`."""

USE_AUTO = "use --engine auto: it takes what can run this model"


@dataclass(frozen=True, slots=True)
class NormNames:
    """The root-mean-square norms of a decoder layer (arXiv 1910.07467), by their names in transformers."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """The norm over the attention output before it is added to the hidden state; Gemma 2 and 3 have it (arXiv
    2408.00118)."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    """The norm over the MLP output before it is added to the hidden state; Gemma 2 and 3 have it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the norms that a layer has."""
        all_four = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in all_four if name is not None)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, as differences from Llama (arXiv 2302.13971), the record without options."""

    model_type: str
    """Name in transformers' configurations."""
    classes: str
    """Prefix of transformers' class names: "Qwen2" for `Qwen2DecoderLayer`."""
    norms: NormNames = NormNames()
    """Norms of a layer, by name."""
    norm_offset: float = 0.0
    """Added to the scale of every norm: 1 if a checkpoint stores scale - 1, as in `Gemma3RMSNorm`."""
    head_norms: bool = False
    """True if each query and each key is normed before it is rotated, by `q_norm` and `k_norm` over the size
    of a head: `Qwen3Attention`, `Gemma3Attention` (arXiv 2302.05442)."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Modules that, stacked, are the projections of queries, keys and values. `Phi3Attention` has them as
    one."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Modules that, stacked, are gate and up of the MLP. `Phi3MLP` has them as one."""
    activation: str = "hidden_act"
    """The field of the configuration that names the activation of the gate."""
    scales_embedding: bool = False
    """True if the embedding is multiplied by sqrt(hidden size), rounded to the type of the weights, as in
    `Gemma3TextScaledWordEmbedding`."""
    query_scalar: str | None = None
    """The field s of the configuration such that scores are queries times keys times s^(-1/2); None: s is the
    size of a head. Gemma 2 and 3 have `query_pre_attn_scalar`."""
    score_cap: str | None = None
    """The field c of the configuration such that a score x becomes c tanh(x / c) before the softmax:
    `Gemma2Attention` (arXiv 2408.00118, section 2)."""
    logit_cap: str | None = None
    """The field c of the configuration that caps the final logits in the same way: `Gemma2ForCausalLM`."""
    windows: Literal["none", "everywhere", "by_layer_type"] = "none"
    """Layers that see only the last `sliding_window` tokens, including the newest (arXiv 2310.06825). none:
    no layer; everywhere: all, if the field is set (`MistralModel`); by_layer_type: those marked in
    `layer_types` (`Gemma3TextModel`)."""
    rope_by_layer_type: bool = False
    """True if sliding and full layers have rotary frequencies of their own, in `rope_parameters` by layer
    type: `Gemma3RotaryEmbedding` (arXiv 2503.19786)."""
    must_be_off: tuple[str, ...] = ()
    """Fields of the configuration that change the arithmetic in a way that this record does not describe."""

    def why_not(self, config: Any) -> str | None:
        """Returns the reason why the embedded engine cannot run this configuration, or None if it can."""
        if (activation := getattr(config, self.activation)) not in ACTIVATIONS:
            return f"its activation is {activation}, not {' or '.join(ACTIVATIONS)}"
        if strange := sorted(set(_layer_types(config)) - {FULL, SLIDING}):
            return f"it has layers of type {', '.join(strange)}"
        if self.windows == "none" and SLIDING in _layer_types(config):
            return f"it uses a sliding window, which is not supported for {self.model_type}"
        for field in self.must_be_off:
            if getattr(config, field, None):
                return f"its {field} is {getattr(config, field)}, which is not supported"
        return next(filter(None, map(_why_not_rope, self._ropes(config))), None)

    def window_of(self, config: Any, layer: int) -> int | None:
        """Returns the number of tokens that a layer sees, including the newest. None: all."""
        if self.windows == "none":
            return None
        if self.windows == "by_layer_type" and _layer_types(config)[layer] != SLIDING:
            return None
        return config.sliding_window

    def rope_prefix(self, config: Any, layer: int) -> str:
        """Returns the prefix of a layer's `inv_freq` and `attention_scaling` in transformers' rotary
        module."""
        return f"{_layer_types(config)[layer]}_" if self.rope_by_layer_type else ""

    def score_scale(self, config: Any) -> float | None:
        """Returns the factor on queries times keys. None: head_dim^(-1/2)."""
        return None if self.query_scalar is None else getattr(config, self.query_scalar) ** -0.5

    def score_cap_of(self, config: Any) -> float | None:
        """Returns the cap of the scores. None: there is none."""
        return None if self.score_cap is None else getattr(config, self.score_cap)

    def logit_cap_of(self, config: Any) -> float | None:
        """Returns the cap of the final logits. None: there is none."""
        return None if self.logit_cap is None else getattr(config, self.logit_cap)

    def embedding_scale(self, config: Any) -> float | None:
        """Returns the factor on the embedding, not yet rounded to the weights' type. None: there is none."""
        return config.hidden_size**0.5 if self.scales_embedding else None

    def projections(self, layer: int) -> Iterator[tuple[str, ...]]:
        """Yields the modules of a layer that are read as one matrix each."""
        prefix = f"model.layers.{layer}."
        yield tuple(f"{prefix}self_attn.{name}" for name in self.qkv)
        yield (f"{prefix}self_attn.o_proj",)
        yield tuple(f"{prefix}mlp.{name}" for name in self.gate_up)
        yield (f"{prefix}mlp.down_proj",)

    def parameters(self, layers: int) -> set[str]:
        """Returns the names of all parameters that such a model must have. Its projections may also have
        biases."""
        names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        head_norms = ("self_attn.q_norm", "self_attn.k_norm") if self.head_norms else ()
        for layer in range(layers):
            names |= {f"model.layers.{layer}.{norm}.weight" for norm in (*self.norms.names, *head_norms)}
            names |= {f"{name}.weight" for modules in self.projections(layer) for name in modules}
        return names

    @property
    def has_llama_layers(self) -> bool:
        """True if the decoder layers equal Llama's except for head norms and windows: training's own
        arithmetic (model/dense_layer.py) is written for these."""
        same = Family(self.model_type, self.classes)
        in_a_layer = ("norms", "norm_offset", "qkv", "gate_up", "query_scalar", "score_cap")
        options = (*in_a_layer, "rope_by_layer_type", "must_be_off")
        return all(getattr(self, option) == getattr(same, option) for option in options)

    def _ropes(self, config: Any) -> list[Any]:
        ropes = config.rope_parameters
        if not self.rope_by_layer_type:
            return [ropes]
        return [ropes[kind] for kind in sorted(set(_layer_types(config)))]


def longest_sequence_of(config: Any) -> int | None:
    """Returns the longest sequence that a model of any family runs with. None: it has no such bound (ALiBi).

    This is the length that the model was made for. With LongRoPE it is the length up to which frequencies
    stay the same: in a batch with one longer sequence, transformers rotates all others by other frequencies,
    too, so neither sampled nor trained log-probabilities would be those of a sequence alone.
    """
    text = config.get_text_config()
    made_for = getattr(text, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(own for own in rope.values() if isinstance(own, dict))]
    unchanged = [
        own["original_max_position_embeddings"] for own in ropes if own.get("rope_type") == "longrope"
    ]
    return min([made_for, *unchanged]) if made_for is not None else None


def _layer_types(config: Any) -> tuple[str, ...]:
    return tuple(getattr(config, "layer_types", None) or ())


def _why_not_rope(rope: Any) -> str | None:
    kind = rope["rope_type"]
    if kind in GROWING_ROPES:
        return f"its rotary scaling {kind} depends on the sequence length"
    return None if kind in FIXED_ROPES else f"its rotary scaling {kind} is not supported"


GEMMA_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

FAMILIES = {
    family.model_type: family
    for family in (
        # Llama 1 to 3.3, and the many that share its code: arXiv 2302.13971, 2407.21783.
        Family("llama", "Llama"),
        # arXiv 2407.10671
        Family("qwen2", "Qwen2", windows="by_layer_type"),
        # arXiv 2505.09388
        Family("qwen3", "Qwen3", head_norms=True, windows="by_layer_type"),
        # arXiv 2310.06825
        Family("mistral", "Mistral", windows="everywhere"),
        # arXiv 2404.14219
        Family("phi3", "Phi3", qkv=("qkv_proj",), gate_up=("gate_up_proj",), windows="everywhere"),
        # arXiv 2408.00118
        Family(
            "gemma2",
            "Gemma2",
            norms=GEMMA_NORMS,
            norm_offset=1.0,
            activation="hidden_activation",
            scales_embedding=True,
            query_scalar="query_pre_attn_scalar",
            score_cap="attn_logit_softcapping",
            logit_cap="final_logit_softcapping",
            windows="by_layer_type",
            must_be_off=("use_bidirectional_attention",),
        ),
        # arXiv 2503.19786. `Gemma3Attention` ignores a cap of the scores that a configuration may name.
        Family(
            "gemma3_text",
            "Gemma3",
            norms=GEMMA_NORMS,
            norm_offset=1.0,
            head_norms=True,
            activation="hidden_activation",
            scales_embedding=True,
            query_scalar="query_pre_attn_scalar",
            logit_cap="final_logit_softcapping",
            windows="by_layer_type",
            rope_by_layer_type=True,
            must_be_off=("use_bidirectional_attention", "attn_logit_softcapping"),
        ),
    )
}
"""The families that the embedded engine runs, by `model_type`."""


def refuse_at_sight(engine: str, config: Mapping[str, Any] | None, quantization: str) -> None:
    """Raises EngineError for the embedded engine if config.json describes a model that it cannot run (None:
    it is not on this disk). A model accepted here may still be refused once the whole configuration is read.

    >>> refuse_at_sight("auto", {"model_type": "gpt2"}, "none")
    """
    if engine != "embedded" or config is None:
        return
    family = config.get("model_type")
    reason = None
    if family not in FAMILIES:
        reason = unknown_family(family)
    elif quantization != "none" or config.get("quantization_config") is not None:
        reason = "its weights are quantized"
    if reason is not None:
        raise EngineError(f"the embedded engine cannot run this model: {reason}", hint=USE_AUTO)


def unknown_family(family: object) -> str:
    """Returns the reason to refuse an unknown `model_type`."""
    return f"{family} is not one of {', '.join(FAMILIES)}"
