"""Models whose linear layers hold bytes, not numbers: in a format of our own, and in bitsandbytes' NF4."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


class ByteLinear(nn.Linear):
    """A weight as a column of bytes and one scale, unpacked for each product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.scale = float(weight.abs().max()) / 127
        packed = (weight / self.scale).round().add(128).to(torch.uint8)
        self.weight = nn.Parameter(packed.reshape(-1, 1), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight.to(input.dtype) - 128) * self.scale
        return F.linear(input, weight.view(self.out_features, self.in_features), self.bias)


def in_bytes(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, its linear layers packed in place. Not the head."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            model.set_submodule(name, ByteLinear(module))
    return model.requires_grad_(False).eval()


def in_nf4(model: PreTrainedModel, folder: Path, device: str = "cpu") -> PreTrainedModel:
    """The same weights as bitsandbytes holds them, as a node loads them; without it, a skipped test."""
    pytest.importorskip("bitsandbytes")
    from swarmnode.model.adapters.nf4 import keep_differentiable, nf4_arguments

    model.save_pretrained(folder)
    arguments: dict[str, Any] = nf4_arguments(model.dtype, torch.device(device))
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **arguments)
    keep_differentiable(loaded)
    return loaded.requires_grad_(False).eval()
