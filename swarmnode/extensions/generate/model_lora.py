"""A policy on a whole transformers model: LoRA merged into its weights, or added to its layers' results."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarmnode.errors import EngineError
from swarmnode.rollout.decode.adapters.adapter import LoraPair, linear_modules, merged_weight


class MergedLora:
    """LoRA merged into the weights: base plus delta, each time from the base, so that rounding does not add
    up."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = linear_modules(model)
        self._base: dict[str, Tensor] = {}
        """Weights as they were, of modules that a policy has changed."""

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Returns (out, in) of every module that a policy may change, by name."""
        return {name: _out_in(module) for name, module in self._modules.items()}

    def take(self, pairs: Mapping[str, LoraPair]) -> None:
        """Replaces the present policy by these LoRA tensors."""
        for name in {*pairs, *self._base}:
            weight = self._modules[name].weight
            base = self._base.setdefault(name, weight.clone())
            if name not in pairs:
                weight.copy_(base)
            elif isinstance(self._modules[name], Conv1D):
                weight.copy_(merged_weight(base.T, pairs[name]).T)
            else:
                weight.copy_(merged_weight(base, pairs[name]))


class AddedLora:
    """LoRA added to the results: each linear layer of `model` is wrapped, and the weights stay the base's."""

    def __init__(self, model: Any) -> None:
        linear = linear_modules(model)
        self._shapes = {name: _out_in(module) for name, module in linear.items()}
        self._layers = {name: _WithLora(module) for name, module in linear.items()}
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Returns (out, in) of every module that a policy may change, by name."""
        return self._shapes

    def take(self, pairs: Mapping[str, LoraPair]) -> None:
        """Replaces the present policy by these LoRA tensors."""
        placed = {name: _placed(pair, self._layers[name].base.weight.device) for name, pair in pairs.items()}
        for name, layer in self._layers.items():
            layer.pair = placed.get(name)


class _WithLora(nn.Module):
    """A linear layer with the LoRA of a policy."""

    def __init__(self, base: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.base = base
        self.pair: LoraPair | None = None

    @property
    def weight(self) -> Tensor:
        """The layer's weight, since some families look at its type before they call the layer."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if (pair := self.pair) is None:
            return y
        # In the adapter's own type, as PEFT computes it: the trainer must find the same log-probabilities.
        low_rank = F.linear(F.linear(x.to(pair.a.dtype), pair.a), pair.b) * pair.scaling
        return y + low_rank.to(y.dtype)


def own_model(
    model: PreTrainedModel, device: torch.device | str | None = None
) -> tuple[PreTrainedModel, MergedLora | AddedLora]:
    """Returns the model that an engine samples from, without PEFT's LoRA layers, and the means to give it a
    policy. The weights of a quantized model are `model`'s own, frozen; any other model is copied. Raises
    EngineError for a quantized model on another device than its own."""
    if not is_quantized(model):
        own = _copied(model, device)
        return own, MergedLora(own)
    if device is not None and torch.empty(0, device=device).device != model.device:
        raise EngineError(
            f"a quantized model must be sampled from on its own device: on {model.device}, not {device}",
            hint="load it onto the device you want to use",
        )
    own = _sharing(model)
    return own, AddedLora(own)


def is_quantized(model: nn.Module) -> bool:
    """Returns True if weights are packed into numbers that cannot be added to."""
    return not all(parameter.is_floating_point() for parameter in model.parameters())


def _copied(model: PreTrainedModel, device: torch.device | str | None) -> PreTrainedModel:
    own: Any = copy.deepcopy(model)
    for name, module in list(own.named_modules()):
        if isinstance(module, BaseTunerLayer):
            own.set_submodule(name, module.get_base_layer())
    return own.to(own.device if device is None else device).eval().requires_grad_(False)


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of everything but the parameters and the linear layers, which are shared. Whole layers
    are, since the attributes that unpack a weight (blocks, scales, a code) belong to the layer."""
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            same[id(module)] = module.get_base_layer()
        elif isinstance(module, nn.Linear | Conv1D):
            same[id(module)] = module
    return copy.deepcopy(model, same).eval()


def _out_in(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Returns (out, in) by the layer's attributes, since a packed weight is a column of bytes."""
    if isinstance(module, Conv1D):
        rows, columns = module.weight.shape
        return columns, rows
    return module.out_features, module.in_features


def _placed(pair: LoraPair, device: torch.device) -> LoraPair:
    """Returns a copy of an update on the device: its sender may write into its tensors again."""
    return LoraPair(pair.a.to(device, copy=True), pair.b.to(device, copy=True), pair.scaling)
