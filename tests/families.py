"""Small causal LMs of other families than our own loop's, built from transformers' configurations."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from swarmnode.families.family import Family

VOCABULARY = 258
"""Of the tiny policy, whose tokenizer they borrow."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 257,
}
ROUTED: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # With experts
    "qwen3_moe": {**ROUTED, "num_experts": 4},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "deepseek_v2": {
        **{key: value for key, value in ROUTED.items() if key != "head_dim"},
        **LATENT,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Without
    "gpt2": {
        **{"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
        **{"bos_token_id": 256, "eos_token_id": 257},
    },
    "gemma3_text": {**SIZES, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {**SIZES, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": SIZES,
    "mistral": SIZES,
    "smollm3": SIZES,
    "falcon": {key: SIZES[key] for key in list(SIZES) if key not in ("intermediate_size",)},
    "gpt_neox": SIZES,
}


DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {
        **{"num_key_value_heads": 2, "tie_word_embeddings": True},
        **{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 8, "pad_token_id": 0},
    # Scores that are capped low enough for it to matter. The scale of scores is not that of the heads.
    "gemma2": {
        **{"num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8},
        **{"layer_types": ["sliding_attention", "full_attention"]},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attn_implementation": "eager"},
    },
    "gemma3_text": {
        **{"num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8},
        **{"num_hidden_layers": 3, "final_logit_softcapping": 3.0},
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
        },
    },
    # As Llama 3.1 has it, with every part of it at work in sequences of a hundred tokens.
    "llama": {
        "num_key_value_heads": 1,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        },
    },
}
"""What small models of families with a record in `families/family.py` have beside the sizes: windows
that are soon left behind, and every option of the family at work."""


def dense(family: str, **sizes: Any) -> Any:
    """A small model of a family that the embedded engine runs, with transformers' own forward."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | DENSE[family])))


class ToyConfig(LlamaConfig):
    model_type = "toy"
    final_logit_softcapping: float = 3.0


class ToyEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class ToyForCausalLM(LlamaForCausalLM):
    """An architecture that is in no library: Llama with a scaled embedding and capped logits."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = ToyEmbedding(config.vocab_size, config.hidden_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        cap = self.config.final_logit_softcapping
        found.logits = cap * torch.tanh(found.logits / cap)
        return found


TOY = Family("toy", "Llama", scales_embedding=True, logit_cap="final_logit_softcapping")
"""All that the engine and training need to be told of it."""


def config_of(family: str) -> Any:
    """The configuration of a small model of this family."""
    return AutoConfig.for_model(family, **CONFIGS[family])


def outline(family: str) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family))


def save_family(family: str, folder: Path, tokenizer: Path) -> Path:
    """A random model of this family as a folder that transformers loads, with the tokenizer of another."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder
