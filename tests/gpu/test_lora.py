"""LoRA layers on a card: gradients of float32 adapters are never rounded. Skipped without a GPU."""

import pytest
import torch
from torch import Tensor

from swarmnode.model.adapters.lora import LoraWeights, Segment, lora_linear, lora_linear_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    # torch says so once, of its own thread for gradients.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

K, N, TOKENS, RANK = 96, 160, 128, 8


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.bfloat16, torch.float32, 2e-2),
    ],
)
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, adapter_dtype: torch.dtype, bound: float, several: bool
) -> None:
    torch.manual_seed(0)
    x, a, b, weight, dy = (
        torch.randn(shape, device="cuda").to(adapter_dtype if shape[0] != TOKENS else dtype)
        for shape in ((TOKENS, K), (RANK, K), (N, RANK), (N, K), (TOKENS, N))
    )
    inputs = [tensor.requires_grad_() for tensor in (x, a, b)]
    adapter = LoraWeights(a, b, 0.3)
    weight = weight.to(dtype)
    if several:
        halves = (Segment(0, TOKENS // 2, 0), Segment(TOKENS // 2, TOKENS, 0))
        y = lora_linear_segments(x, weight, None, [adapter], halves)
    else:
        y = lora_linear(x, weight, None, adapter)
    exact_x, exact_a, exact_b = exact = [t.detach().double().requires_grad_() for t in inputs]
    exact_y = exact_x @ weight.double().t() + 0.3 * exact_x @ exact_a.t() @ exact_b.t()
    found = torch.autograd.grad(y, inputs, dy)
    expected = torch.autograd.grad(exact_y, exact, dy.double())
    assert [g.dtype for g in found] == [dtype, adapter_dtype, adapter_dtype]
    assert far(y, exact_y) < bound
    assert max(far(g, e) for g, e in zip(found, expected, strict=True)) < bound


def far(ours: Tensor, exact: Tensor) -> float:
    """Distance relative to the size of what it should be."""
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())
