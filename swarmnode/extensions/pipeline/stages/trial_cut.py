"""Tests if a family of models can be cut into stages, by cutting a small random model of the same kind.

whole_model.py (configuration) -> [try_cut] -> stage_model.py, or ModelError

There is no list of families: the small model is cut, and its logits are compared.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.stages.stage_model import (
    StageModel,
    StagePart,
    StageSettings,
    build_stage,
)
from swarmnode.model.attention import PackedLayout, packed_layout
from swarmnode.model.base_model import attention_arguments
from swarmnode.model.packable import prepare_for_packing

CAN_BE_CUT = "Llama, Mistral, Phi-3, Qwen2 and Qwen3"
"""Models that are cut in the tests, for hints."""
PROBE_LAYERS = 4
PROBE_WIDTH = 32
PROBE_LENGTHS = (7, 4)
SAME_LOGITS = 1e-4
"""Relative difference up to which the logits of the stages and of the whole model count as equal
(float32)."""


def try_cut(config: Any) -> bool:
    """Cut a small random model of this configuration and compare. Returns True if packed rows are possible;
    for this process only, because it also registers packed attention with transformers. Raises ModelError if
    the stages differ.

    The small model keeps everything that affects how layers are connected: family, kinds of layers, windows
    (made shorter), rotary settings, biases, caps. The global random state is unchanged. Takes about 0.2 s on
    a CPU.
    """
    if attention_arguments(config):
        raise ModelError(
            f"a {config.model_type} model cannot be cut into stages: it caps the scores of attention, which a"
            " stage does not",
            hint=f"{CAN_BE_CUT} can",
        )
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            small = _random_model(_small(config))
            packs = prepare_for_packing(small) is None
            far = _difference(small, packs)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ModelError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"a {config.model_type} model cannot be cut into stages: {type(error).__name__}: {first_line}",
            hint=f"{CAN_BE_CUT} can",
        ) from error
    if not far <= SAME_LOGITS:
        raise ModelError(
            f"a {config.model_type} model cannot be cut into stages: composed, their logits differ from the "
            f"whole model's by {far:.1e}",
            hint=f"it does more between layers than pass on hidden states; {CAN_BE_CUT} do not",
        )
    return packs


def _small(config: Any) -> Any:
    """Return the configuration of a model of the same kind with few, narrow layers. Heads keep their width,
    which rotary settings depend on."""
    small = copy.deepcopy(config.get_text_config())
    kinds = getattr(small, "layer_types", None)
    if kinds is not None:
        distinct = list(dict.fromkeys(kinds))
        small.layer_types = [distinct[n % len(distinct)] for n in range(PROBE_LAYERS)]
    if getattr(small, "sliding_window", None) is not None:
        small.sliding_window = 3
    shared = small.num_key_value_heads < small.num_attention_heads
    small.num_hidden_layers = PROBE_LAYERS
    small.hidden_size = small.intermediate_size = PROBE_WIDTH
    small.num_attention_heads, small.num_key_value_heads = 2, 1 if shared else 2
    small.vocab_size = PROBE_WIDTH
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def _random_model(config: Any) -> Any:
    """Return a model with weights far from zero. With transformers' own initial weights, a layer adds almost
    nothing, so a missing layer or an embedding scale would go unnoticed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def _difference(whole: Any, packs: bool) -> float:
    """Return the relative difference between the logits of three stages and of the whole model; also with
    packed rows, if those are possible."""
    state = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    parts = [StagePart(0, 1, has_ends=True), StagePart(1, 3), StagePart(3, PROBE_LAYERS)]
    settings = StageSettings(trainable="full")
    stages = [
        build_stage(whole.config, part, lambda names: {name: state[name] for name in names}, settings, packs)
        for part in parts
    ]
    ids_1T = (torch.arange(sum(PROBE_LENGTHS)) * 7 + 1)[None] % whole.config.vocab_size
    layouts = [None, packed_layout(PROBE_LENGTHS, ids_1T.device)] if packs else [None]
    return max(_relative_difference(whole, stages, ids_1T, layout) for layout in layouts)


def _relative_difference(
    whole: Any, stages: Sequence[StageModel], ids_1T: Tensor, layout: PackedLayout | None
) -> float:
    arguments = {"input_ids": ids_1T, "use_cache": False} if layout is None else layout.arguments(ids_1T)
    expected = whole(**arguments).logits.double()
    hidden_BTD = stages[0].embed(ids_1T)
    for stage in stages:
        hidden_BTD = stage.forward(hidden_BTD, layout)
    found = stages[0].head(stages[0].final_norm(hidden_BTD)).double()
    return ((found - expected).abs().max() / expected.abs().max()).item()
