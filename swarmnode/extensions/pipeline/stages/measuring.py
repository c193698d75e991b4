"""Measures this machine for a pipeline: free memory, and the time of a token through a few real layers.

whole_model.py -> [measure_stage], hardware -> [memory_for_stage] -> MemberCosts, announced
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from swarmnode.extensions.pipeline.plans.member_costs import LEAST_TOKEN_S, MAX_TOKEN_S, StageTiming
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import WholeModel
from swarmnode.machine.hardware import GIB, inspect_machine

MEASURED_LAYERS = (1, 2)
"""Numbers of layers that are timed. Two numbers reveal the cost of a call apart from its layers."""

REPEATS = 3
"""Passes whose median is taken, after one pass that does not count."""

Kept = TypeVar("Kept")
"""Data from a forward pass that the backward pass needs."""

FREE_SHARE = 0.75
"""Share of the free memory that a stage may take by default. The rest is for the owner of the machine."""


def memory_for_stage(memory_gb: float | None, device: torch.device) -> int:
    """Return the bytes that a stage may use here: the setting, or else a share of the device's free
    memory."""
    if memory_gb is not None:
        return round(memory_gb * GIB)
    if device.type == "cuda":
        return round(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    return round(FREE_SHARE * inspect_machine().memory_free_bytes)


def measure_stage(
    whole: WholeModel, settings: StageSettings, *, micro_batch_tokens: int
) -> tuple[StageTiming, ...]:
    """Return the seconds per token of a micro-batch through the first layers, by number of layers. The layers
    are loaded for this and then released. Raises ModelError if they cannot be loaded."""
    return tuple(
        _timing(whole, settings, layers, micro_batch_tokens)
        for layers in MEASURED_LAYERS
        if layers <= whole.layers
    )


def _timing(whole: WholeModel, settings: StageSettings, layers: int, tokens: int) -> StageTiming:
    """Return the time of forward and backward passes with random hidden states."""
    model = whole.stage(StagePart(0, layers), settings)
    parameters = list(model.trainable().values())

    def forward() -> tuple[Tensor, Tensor]:
        hidden_BTD = torch.randn(1, tokens, model.hidden_size, dtype=settings.dtype, device=settings.device)
        hidden_BTD.requires_grad_()
        output_BTD = model.forward(hidden_BTD)
        _wait(model.device)
        return hidden_BTD, output_BTD

    def backward(kept: tuple[Tensor, Tensor]) -> None:
        hidden_BTD, output_BTD = kept
        ones_BTD = torch.ones_like(output_BTD)
        torch.autograd.grad(output_BTD, [hidden_BTD, *parameters], ones_BTD, allow_unused=True)
        _wait(model.device)

    return time_stage(layers, forward, backward, tokens)


def time_stage(
    layers: int,
    forward: Callable[[], Kept],
    backward: Callable[[Kept], object],
    tokens: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> StageTiming:
    """Return the time per token of a micro-batch. `forward` processes a micro-batch of this size and returns
    the input of `backward`. Both return only when the device has finished."""
    backward(forward())
    marks: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        start_s = clock()
        kept = forward()
        middle_s = clock()
        backward(kept)
        marks.append((middle_s - start_s, clock() - middle_s))
    seconds = (median(passes) / tokens for passes in zip(*marks, strict=True))
    return StageTiming(layers, *(min(max(each, LEAST_TOKEN_S), MAX_TOKEN_S) for each in seconds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
