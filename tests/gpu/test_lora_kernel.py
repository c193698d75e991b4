"""The LoRA kernel where it is meant to run: compiled, in bfloat16, against float64. Skipped without a GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.extensions.native.triton.lora_kernel import lora_gemm_for
from swarmnode.model.adapters.lora import LoraWeights, Segment, StackedGemm, lora_linear_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error over the largest value: one rounding of the result."""

RAGGED = (Segment(0, 130, 1), Segment(130, 131, 0), Segment(140, 300, 2), Segment(300, 511, 0))
"""511 rows; 131 to 140 are in no segment."""


def launch(
    config: str,
    x: Tensor,
    weight: Tensor,
    s: Tensor,
    b: Tensor,
    scaling: Tensor,
    segments: tuple[Segment, ...],
) -> Tensor:
    from swarmnode.extensions.native.triton import kernels

    chosen = next(c for c in kernels.CONFIGS if c.name == config)
    tiles = kernels.TileTable.build(segments, len(x), chosen.block_m, x.device)
    try:
        return kernels.lora_gemm(x, weight, s, b, scaling, tiles, chosen)
    except RuntimeError as error:
        if "out of resource" in str(error):
            pytest.skip(f"this GPU is too small for it: {error}")
        raise


def exact(
    x: Tensor, weight: Tensor, s: Tensor, b: Tensor, scaling: Tensor, segments: tuple[Segment, ...]
) -> Tensor:
    y = x.double() @ weight.double().t()
    for segment in segments:
        rows, adapter = slice(segment.start, segment.end), segment.adapter
        y[rows] += scaling[adapter].double() * (s[rows].double() @ b[adapter].double().t())
    return y


def relative_error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).abs().max() / reference.abs().max())


def configs() -> list[str]:
    if not torch.cuda.is_available():
        return ["any"]
    from swarmnode.extensions.native.triton import kernels

    return [config.name for config in kernels.CONFIGS]


@pytest.mark.parametrize("config", configs())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["forward", "dX"])
@pytest.mark.parametrize(("n", "k", "rank"), [(896, 4864, 16), (128, 896, 8), (333, 205, 12)])
def test_every_configuration_computes_what_float64_does(
    config: str, dtype: torch.dtype, swapped: bool, n: int, k: int, rank: int
) -> None:
    torch.manual_seed(0)
    x, s = torch.randn(511, k, device="cuda", dtype=dtype), torch.randn(511, rank, device="cuda", dtype=dtype)
    weight = torch.randn(*((k, n) if swapped else (n, k)), device="cuda", dtype=dtype)
    stack = torch.randn(3, *((rank, n) if swapped else (n, rank)), device="cuda", dtype=dtype)
    if swapped:
        weight, stack = weight.t(), stack.transpose(1, 2)
    scaling = torch.tensor([0.7, -1.3, 2.1], device="cuda")
    y = launch(config, x, weight, s, stack, scaling, RAGGED)
    assert relative_error(y, exact(x, weight, s, stack, scaling, RAGGED)) <= TOLERANCE[dtype]
    again = launch(config, x, weight, s, stack, scaling, RAGGED)
    assert torch.equal(y, again), "no atomics: the same numbers every time"


def test_more_than_2_to_the_31_elements_do_not_overflow() -> None:
    rows, k, n = 2**19 + 100, 4096 + 64, 64
    if torch.cuda.mem_get_info()[0] < 3 * rows * k:
        pytest.skip("needs about 6.5 GB of GPU memory")
    x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    weight, b = x.new_ones(n, k), x.new_ones(1, n, 16)
    s, segments = x.new_ones(rows, 16), (Segment(0, rows, 0),)
    y = launch(configs()[0], x, weight, s, b, torch.ones(1, device="cuda"), segments)
    assert torch.equal(y[:-1], torch.full_like(y[:-1], 16))
    assert torch.equal(y[-1], torch.full_like(y[-1], k + 16))


def test_a_node_gets_a_kernel_measures_it_once_and_trains_with_it(tmp_path: Path) -> None:
    offer = lora_gemm_for(torch.device("cuda"), tmp_path / "lora_kernel.json", policies=3)
    assert offer.gemm is not None, offer.reason
    x, weight = (
        torch.randn(2000, 896, device="cuda").bfloat16(),
        torch.randn(896, 896, device="cuda").bfloat16(),
    )
    first = offer.gemm.pays(x, weight, 16)
    second = lora_gemm_for(torch.device("cuda"), tmp_path / "lora_kernel.json", policies=3)
    assert second.gemm is not None
    assert second.gemm.pays(x, weight, 16) is first


def test_gradients_with_the_kernel_are_those_of_float64(tmp_path: Path) -> None:
    gemm = lora_gemm_for(torch.device("cuda"), tmp_path / "lora_kernel.json").gemm
    assert gemm is not None

    class Always:
        def pays(self, x_MK: Tensor, weight_NK: Tensor, rank: int) -> bool:
            return True

        __call__ = gemm.__call__

    torch.manual_seed(0)
    weight, dy = torch.randn(333, 205, device="cuda"), torch.randn(511, 333, device="cuda")
    leaves = [torch.randn(511, 205, device="cuda")]
    leaves += [torch.randn(*size, device="cuda") for _ in range(3) for size in ((12, 205), (333, 12))]

    def run(dtype: torch.dtype, kernel: bool) -> list[Tensor]:
        x, *factors = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        adapters = [
            LoraWeights(a, b, 0.5 + i) for i, (a, b) in enumerate(zip(*[iter(factors)] * 2, strict=True))
        ]
        stack_a = torch.stack([adapter.a_RK.detach() for adapter in adapters])
        stack_b = torch.stack([adapter.b_NR.detach() for adapter in adapters])
        scaling = torch.tensor([0.5, 1.5, 2.5], device="cuda")
        stacked = StackedGemm(Always(), stack_a, stack_b, scaling) if kernel else None
        y = lora_linear_segments(x, weight.to(dtype), None, adapters, RAGGED, stacked)
        return [y.detach(), *torch.autograd.grad(y, [x, *factors], dy.to(dtype))]

    pairs = zip(run(torch.float32, kernel=True), run(torch.float64, kernel=False), strict=True)
    assert max(relative_error(ours, reference) for ours, reference in pairs) <= 5e-6
