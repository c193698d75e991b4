"""Forward and backward of one LoRA linear on a GPU: our Triton kernel, our `addmm_`, and PEFT.

python benchmarks/lora_kernel.py [--quick] [--json FILE]    needs a GPU and Triton; without, it exits with 2

bfloat16, r = 16, no dropout, gradients of x, A and B. Each side is checked against float64 first, then they
take turns; medians of the turns, by CUDA events. `gated` is what a node runs: the kernel in the directions
where its own measurement says that it pays, `addmm_` in the others. `kernel` forces it everywhere.

No GPU was lent to us yet, so no figures are committed. What is verified without one: the numbers, in Triton's
interpreter, and compilation to machine code for sm_80 to sm_90
(tests/unit/extensions/native/triton/test_kernels.py).
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, middle, ratios, report
from torch import Tensor, nn

from swarmnode.extensions.native.triton.kernel_choice import CudaTimer
from swarmnode.extensions.native.triton.lora_kernel import available, lora_gemm_for
from swarmnode.model.adapters.lora import GemmInputs, LoraGemm
from swarmnode.model.adapters.lora_patch import FusedLora

RANK = 16
SHAPES = ((4096, 4096), (5120, 5120), (8192, 8192), (896, 4864), (4864, 896), (896, 896), (896, 128))
"""(features in, out): the squares of the LoRAFusion paper, then the layers of Qwen2.5-0.5B."""

TOKENS = (2048, 4096, 8192)
ROUNDS = 15
CHECKED_ROWS = 256
MAX_ERROR = 2e-2
"""Of bfloat16 against float64, over the largest value; PEFT rounds several times on the way."""

BASELINES = ("peft default", "peft bf16", "addmm")


class Forced:
    """The kernel in both directions, whether it pays or not, each with its best configuration."""

    def __init__(self, gemm: LoraGemm) -> None:
        self._gemm = gemm

    def pays(self, x_MK: Tensor, weight_NK: Tensor, rank: int) -> bool:
        self._gemm.pays(x_MK, weight_NK, rank)
        return True

    def __call__(self, given: GemmInputs) -> Tensor:
        return self._gemm(given)


class Side:
    """One way to run the same layer. The adapters of all sides start from the same numbers."""

    def __init__(self, base_NK: Tensor, a_RK: Tensor, b_NR: Tensor, fp32_adapters: bool) -> None:
        from peft import LoraConfig, get_peft_model

        layer = nn.Linear(base_NK.shape[1], base_NK.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(base_NK, requires_grad=False)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=["0"])
        self.model: Any = get_peft_model(nn.Sequential(layer), config, autocast_adapter_dtype=fp32_adapters)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(a_RK if "lora_A" in name else b_NR)

    def fuse(self, gemm: LoraGemm | None) -> "Side":
        self.fused = FusedLora(self.model, gemm)
        return self

    def step(self, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
        wanted = [x, *(p for p in self.model.parameters() if p.requires_grad)]

        def run() -> Tensor:
            return torch.autograd.grad(self.model(x), wanted, dy)[0]

        return run


def sides(base_NK: Tensor, gemm: LoraGemm) -> dict[str, Side]:
    """All ways over one frozen weight. Ours keep float32 adapters, as PEFT makes them by default."""
    n, k = base_NK.shape
    a_RK, b_NR = (torch.randn(size, device="cuda") / size[1] ** 0.5 for size in ((RANK, k), (n, RANK)))
    return {
        "peft default": Side(base_NK, a_RK, b_NR, fp32_adapters=True),
        "peft bf16": Side(base_NK, a_RK, b_NR, fp32_adapters=False),
        "addmm": Side(base_NK, a_RK, b_NR, fp32_adapters=True).fuse(None),
        "gated": Side(base_NK, a_RK, b_NR, fp32_adapters=True).fuse(gemm),
        "kernel": Side(base_NK, a_RK, b_NR, fp32_adapters=True).fuse(Forced(gemm)),
    }


def check(found: dict[str, Side], base_NK: Tensor, x: Tensor, dy: Tensor) -> None:
    """Output and input gradient of the first and last rows against float64. Exits when a side is wrong."""
    rows = torch.cat([torch.arange(CHECKED_ROWS), torch.arange(len(x) - CHECKED_ROWS, len(x))]).cuda()
    with torch.no_grad():
        factors = dict(found["addmm"].model.named_parameters())
        a, b = (next(p.double() for n, p in factors.items() if f"lora_{which}" in n) for which in "AB")
        weight = base_NK.double() + 2.0 * (b @ a)
        y_exact, dx_exact = x[rows].double() @ weight.t(), dy[rows].double() @ weight
    for name, side in found.items():
        y, dx = side.model(x).detach(), side.step(x, dy)()
        errors = [
            float((got[rows].double() - exact).abs().max() / exact.abs().max())
            for got, exact in ((y, y_exact), (dx, dx_exact))
        ]
        if not max(errors) <= MAX_ERROR:
            sys.exit(f"{name} is wrong by {errors} (output, input gradient) for {list(base_NK.shape)}")


def measure(k: int, n: int, tokens: int, gemm: LoraGemm, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by side."""
    torch.manual_seed(0)
    base_NK = torch.randn(n, k, device="cuda").div_(k**0.5).bfloat16()
    x = torch.randn(tokens, k, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(tokens, n, device="cuda").bfloat16()
    found = sides(base_NK, gemm)
    check(found, base_NK, x, dy)
    runs = {name: side.step(x, dy) for name, side in found.items()}
    timer = CudaTimer(torch.device("cuda"), turns=1)
    times = [timer(runs) for _ in range(rounds)]
    return {name: [time_ms[name] for time_ms in times] for name in runs}


def main() -> None:
    options = arguments("Forward and backward of one LoRA linear on a GPU, against PEFT and addmm_.")
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        print(
            "benchmarks/lora_kernel.py needs a GPU, and torch sees none: nothing was measured",
            file=sys.stderr,
        )
        sys.exit(2)
    possible, reason = available(device)
    if not possible:
        print(f"{reason}: nothing was measured", file=sys.stderr)
        sys.exit(2)
    claims: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        offer = lora_gemm_for(device, Path(folder) / "lora_kernel.json", budget_s=3600.0)
        if offer.gemm is None:
            print(f"{offer.reason}: nothing was measured", file=sys.stderr)
            sys.exit(2)
        for k, n in SHAPES:
            for tokens in TOKENS[1:2] if options.quick else TOKENS:
                times = measure(k, n, tokens, offer.gemm, 5 if options.quick else ROUNDS)
                told = ", ".join(f"{name} {middle(ms)[0]:.3f}" for name, ms in times.items())
                print(f"{k} -> {n}, {tokens} tokens, ms forward + backward: {told}", flush=True)
                for ours in ("gated", "kernel"):
                    for baseline in BASELINES:
                        claim = f"{ours}_vs_{baseline.replace(' ', '_')}_{k}x{n}_{tokens}"
                        claims[claim], spread[claim] = middle(ratios(times[baseline], times[ours]))
    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    report("lora_kernel", claims, spread, options.json, extra=gpu)


if __name__ == "__main__":
    main()
