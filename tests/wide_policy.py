"""A policy that is large and knows what the tiny one knows: for tests of models that no member can hold.

tiny policy -> [widen_tiny] -> a folder

Its layers have thousands of further units whose outputs count for nothing, and layers stand between that add
nothing. So it answers as the tiny policy does, token for token, and takes as much memory as one likes.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn


def widen_tiny(tiny: Path, folder: Path, *, layers: int, intermediate: int) -> Path:
    """The tiny policy in `layers` layers, its own spread among them, with MLPs of `intermediate` units."""
    from transformers import AutoModelForCausalLM

    small: Any = AutoModelForCausalLM.from_pretrained(str(tiny), dtype=torch.float32)
    config = copy.deepcopy(small.config)
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    config.intermediate_size = intermediate
    wide: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    places = {own * layers // len(small.model.layers): layer for own, layer in enumerate(small.model.layers)}
    with torch.no_grad():
        wide.model.embed_tokens.weight.copy_(small.model.embed_tokens.weight)
        wide.model.norm.weight.copy_(small.model.norm.weight)
        for number, layer in enumerate(wide.model.layers):
            _fill(layer, places.get(number))
    wide.generation_config = small.generation_config
    wide.save_pretrained(str(folder))
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, folder / file.name)
    return folder


def _fill(layer: Any, source: Any | None) -> None:
    """The layer computes what `source` does; None: it lets everything through."""
    if source is None:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        return
    own = dict(source.named_parameters())
    for name, parameter in layer.named_parameters():
        _copy_into(parameter, own[name])


def _copy_into(parameter: nn.Parameter, source: nn.Parameter) -> None:
    if parameter.shape == source.shape:
        parameter.copy_(source)
        return
    parameter.zero_()
    parameter[tuple(slice(0, size) for size in source.shape)].copy_(source)
