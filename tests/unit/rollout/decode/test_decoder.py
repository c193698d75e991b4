"""Queries and keys: the operations for a GPU, run here, give what those for a CPU give."""

import pytest
import torch

from swarmnode.rollout.decode.decoder import Heads, Rotary, shared_by_heads
from swarmnode.rollout.decode.matrix import RmsNorm
from swarmnode.rollout.decode.weights import Shape

SHAPE = Shape(
    layers=1, heads=4, kv_heads=2, head_dim=8, hidden=16, intermediate=16, vocab=8, norm_eps=1e-6
)  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_split_on_a_gpu_as_on_a_cpu(dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    on_cpu, on_gpu = (
        Heads(SHAPE, RmsNorm(SHAPE.norm_eps, torch.device("cpu")), torch.device(kind))
        for kind in ("cpu", "cuda")
    )
    rotary = Rotary(torch.rand(SHAPE.head_dim // 2), scaling=1.0)
    rotary.reserve(5)
    rotation = shared_by_heads(rotary.until(5))
    fused = torch.randn(2 * 5, SHAPE.kv_heads * (SHAPE.group + 2) * SHAPE.head_dim).to(dtype)
    scale = torch.rand(SHAPE.group + 1, SHAPE.head_dim) if normed else None
    expected = on_cpu.split(fused.clone(), scale, rotation)
    found = on_gpu.split(fused.clone(), scale, rotation)
    assert [part.dtype for part in found] == [dtype] * 3
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), exact.float(), rtol=8e-3, atol=1e-5)
