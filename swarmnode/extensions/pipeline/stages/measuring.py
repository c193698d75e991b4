"""Measures this machine for a pipeline: free memory, and the time of a token through a few real layers.

whole_model.py -> [measure_stage], hardware -> [memory_for_stage] -> MemberCosts, announced
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.extensions.pipeline.membership.link_probes import time_stage
from swarmnode.extensions.pipeline.plans.member_costs import StageTiming
from swarmnode.extensions.pipeline.stages.loading import load_stage
from swarmnode.extensions.pipeline.stages.stage_model import StageModel, StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.machine.hardware import GIB, inspect_machine

MEASURED_LAYERS = (1, 2)
"""Numbers of layers that are timed. The cost of a call beside its layers follows from two numbers."""

TOKEN_SHARES = (4, 1)
"""Divisors of the micro-batch sizes that are timed: a quarter of a micro-batch and all of it."""

FREE_SHARE = 0.75
"""Share of the free memory that a stage may take by default. The rest is for the owner of the machine."""


def memory_for_stage(memory_gb: float | None, device: torch.device) -> int:
    """Return the bytes that a stage may take here: the setting, else a share of the device's free memory."""
    if memory_gb is not None:
        return round(memory_gb * GIB)
    if device.type == "cuda":
        return round(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    return round(FREE_SHARE * inspect_machine().memory_free_bytes)


def measure_stage(
    whole: WholeModel, settings: StageSettings, *, micro_batch_tokens: int
) -> tuple[StageTiming, ...]:
    """Return the seconds of a token of a micro-batch through the first layers, by number of layers. They are
    loaded for it and released. Raises ModelError if they cannot be loaded."""
    return tuple(
        _timing(whole, settings, layers, micro_batch_tokens)
        for layers in MEASURED_LAYERS
        if layers <= whole.layers
    )


def _timing(whole: WholeModel, settings: StageSettings, layers: int, tokens: int) -> StageTiming:
    part = StagePart(0, layers)
    model = load_stage(whole.folder, part, settings, cut=whole.cut, weights=whole.weights)
    passes = _Passes(model)
    counts = sorted({max(1, tokens // share) for share in TOKEN_SHARES})
    return time_stage(layers, passes.forward, passes.backward, token_counts=counts, micro_batch_tokens=tokens)


class _Passes:
    """Forward and backward passes with random hidden states."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._parameters: Sequence[Tensor] = list(model.trainable().values())

    def forward(self, tokens: int) -> tuple[Tensor, Tensor]:
        size, settings = self._model.hidden_size, self._model.settings
        hidden_BTD = torch.randn(1, tokens, size, dtype=settings.dtype, device=settings.device)
        hidden_BTD.requires_grad_()
        output_BTD = self._model.forward(hidden_BTD)
        self._wait()
        return hidden_BTD, output_BTD

    def backward(self, kept: tuple[Tensor, Tensor]) -> None:
        hidden_BTD, output_BTD = kept
        ones_BTD = torch.ones_like(output_BTD)
        torch.autograd.grad(output_BTD, [hidden_BTD, *self._parameters], ones_BTD, allow_unused=True)
        self._wait()

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
