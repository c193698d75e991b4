"""Random models of a few layers, samples for them, and the single machine that a pipeline must equal."""

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from swarmnode.extensions.pipeline.stages.stage_model import PEFT_PREFIX, StageSettings, adapter_start
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig
from swarmnode.training.packing import MicroBatch, TrainingSample, micro_batches
from swarmnode.types import one_span

LAYERS = 6
VOCABULARY = 40
ADAPTER = PolicyConfig(lora_rank=4, lora_alpha=8)
SETTINGS = StageSettings(adapter=ADAPTER)
CPU = torch.device("cpu")
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_config(family: str = "qwen3", **settings: Any) -> Any:
    return CONFIGS[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=settings.pop("tied", True),
        pad_token_id=0,
        **settings,
    )


def tiny_model(family: str = "qwen3", **settings: Any) -> Any:
    """Weights far enough from zero that every layer matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model: Any, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def nudge(parameters: dict[str, nn.Parameter]) -> None:
    """Move every parameter by what its name says: the same wherever the parameter is held."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            noise = adapter_start(7, name, (1, parameter.numel())).view_as(parameter)
            parameter.add_(noise * parameter.numel() ** 0.5 * 0.1)


def single_machine(model: Any) -> Policy:
    """The whole model with the adapter that all stages together have, nudged."""
    base = LoadedModel("random", copy.deepcopy(model), SimpleNamespace(eos_token_id=1), "")
    policy = Policy(base, ADAPTER, seed=0)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if ".lora_A." in name:
                module = name.removeprefix(PEFT_PREFIX).split(".lora_A.")[0]
                parameter.copy_(adapter_start(0, module, parameter.shape))
    nudge(policy.trainable())
    return policy


class Bypass(nn.Module):
    def forward(self, hidden_BTD: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_BTD


def bypass(model: Any, layers: Sequence[int]) -> None:
    for number in layers:
        model.base_model.layers[number] = Bypass()


def reorder(model: Any, order: Sequence[int]) -> None:
    layers = list(model.base_model.layers)
    model.base_model.layers = nn.ModuleList([layers[number] for number in order])


def samples(count: int = 5) -> list[TrainingSample]:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    made = []
    for number in range(count):
        prompt, answer = draw(2, VOCABULARY, draw(2, 5, 1)[0]), draw(2, VOCABULARY, draw(3, 9, 1)[0])
        own = number % 2 == 0
        recorded = tuple(-2.0 - 0.1 * i for i in range(len(answer))) if own else None
        advantage = (-1.0) ** number * (0.5 + number)
        made.append(
            TrainingSample(tuple(prompt), tuple(answer), advantage, recorded, one_span(0, len(answer)))
        )
    return made


def batches(packed: bool, max_tokens: int = 28) -> list[MicroBatch]:
    return list(micro_batches(samples(), max_tokens, CPU, packed=packed))
