"""The ragged LoRA GEMM, computed by the Triton interpreter on the CPU and compared with float64.

Triton decides at its import whether it interprets, and vLLM's tests import it compiling. So this file runs
itself as a program of its own (the end of the file), which prints the errors of all cases as JSON. What the
interpreter cannot show (registers, shared memory) is compiled ahead of time for GPUs that are not here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.model.adapters.lora import Segment

ROOT = Path(__file__).parents[5]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error over the largest value. The interpreter rounds to bfloat16 by cutting."""


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...] = ((20, 0), (13, 1))
    """(tokens, adapter) of each segment."""
    rank: int = 16
    n: int = 40
    k: int = 72
    dtype: torch.dtype = torch.float32
    bias: bool = False
    swapped: bool = False
    block_m: int = 16

    @property
    def segments(self) -> tuple[Segment, ...]:
        found, start = [], 0
        for tokens, adapter in self.lengths:
            found.append(Segment(start, start + tokens, adapter))
            start += tokens
        return tuple(found)


CASES = {
    "ragged segments": Case(((33, 0), (1, 1), (20, 2))),
    "one adapter for all": Case(((35, 0),)),
    "an adapter twice": Case(((5, 1), (20, 0), (7, 1))),
    "tokens of the base alone": Case(((10, -1), (20, 1), (9, -1))),
    "the base for all": Case(((20, -1),)),
    "empty segments": Case(((0, 0), (20, 1), (0, -1), (5, 0), (0, 2))),
    "whole blocks only": Case(((32, 0), (32, 1)), n=64, k=64),
    "whole blocks along n only": Case(n=64, k=40),
    "whole blocks along k only": Case(n=40, k=64),
    "more tiles than one group": Case(((100, 0), (60, 1)), rank=4, n=70, k=33),
    "k below one block": Case(k=7),
    "one feature out": Case(n=1),
    "a bias": Case(bias=True),
    "a transposed weight": Case(((20, 0), (9, -1), (13, 1)), swapped=True),
    "float16": Case(dtype=torch.float16, bias=True),
    "bfloat16": Case(((20, 0), (9, -1), (13, 1)), dtype=torch.bfloat16, bias=True),
    "bfloat16 with a transposed weight": Case(dtype=torch.bfloat16, swapped=True),
    **{f"rank {rank}": Case(rank=rank) for rank in (1, 4, 8, 12, 24)},
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float | str]:
    pytest.importorskip("triton")
    return run_this_file("interpret", TRITON_INTERPRET="1")


def run_this_file(what: str, **environment: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, __file__, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_what_float64_does(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] <= TOLERANCE[CASES[case].dtype]


def test_a_row_in_no_segment_gets_the_base_alone(interpreted: dict[str, float]) -> None:
    assert interpreted["rows in no segment"] <= TOLERANCE[torch.float32]


def test_an_expanded_gradient_has_a_stride_of_zero_and_is_read_right(interpreted: dict[str, float]) -> None:
    assert interpreted["expanded"] <= TOLERANCE[torch.float32]


def test_the_scaling_is_not_rounded_to_the_dtype_of_the_weights(interpreted: dict[str, float]) -> None:
    assert interpreted["scaling"] <= 1e-6


@pytest.mark.parametrize("gradient", ["y", "x", "a0", "b0", "a1", "b1"])
def test_with_it_a_lora_linear_has_the_output_and_gradients_it_has_without(
    interpreted: dict[str, float], gradient: str
) -> None:
    assert interpreted[f"linear {gradient}"] <= 2e-6


def test_every_configuration_is_measured_and_right_on_the_way_a_node_takes(
    interpreted: dict[str, str],
) -> None:
    assert interpreted["node"] == "kernel pays: True, contenders: 7, second ask measures: False"


REFUSED = {
    "s with too few rows": "s is",
    "b for another width": "b is",
    "b of another rank": "s is [33, 16], and must be [33, 15]",
    "another dtype": "s is torch.float16",
    "float64": "not torch.float64",
    "a scaling too short": "scaling is",
    "a scaling in float16": "scaling is torch.float16",
    "a bias with gaps": "bias must be contiguous",
    "a table for other rows": "the tile table is for 32 rows by 16",
    "a table for other blocks": "the tile table is for 33 rows by 32",
    "an adapter beyond the stack": "4 adapters",
    "a stride that overflows": "a stride of 8388608",
    "no rank at all": "nothing to multiply",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_inputs_that_do_not_fit_are_refused_before_anything_is_read(
    interpreted: dict[str, str], wrong: str
) -> None:
    assert REFUSED[wrong] in interpreted[wrong]


lengths = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40), st.integers(-1, 3)), max_size=6)


@given(lengths, st.integers(0, 50), st.sampled_from([16, 32, 64]))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_tiles_cover_each_row_once_and_never_cross_a_segment(
    parts: list[tuple[int, int, int]], rest: int, block_m: int
) -> None:
    pytest.importorskip("triton")
    from swarmnode.extensions.native.triton.kernels import tile_rows

    segments, adapter_of_row = [], []
    for length, gap, adapter in parts:
        start = len(adapter_of_row)
        segments.append(Segment(start, start + length, adapter))
        adapter_of_row += [adapter] * length + [-1] * gap
    adapter_of_row += [-1] * rest
    tiles = list(tile_rows(segments, len(adapter_of_row), block_m))
    assert [row for start, end, _ in tiles for row in range(start, end)] == list(range(len(adapter_of_row)))
    assert [adapter for start, end, adapter in tiles for _ in range(start, end)] == adapter_of_row
    assert all(0 < end - start <= block_m for start, end, _ in tiles)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 10, 0), Segment(9, 20, 1)),
        (Segment(10, 20, 0), Segment(0, 10, 1)),
        (Segment(5, 4, 0),),
        (Segment(0, 21, 0),),
        (Segment(-1, 5, 0),),
        (Segment(0, 5, -2),),
    ],
)
def test_segments_that_make_no_sense_are_refused(segments: tuple[Segment, ...]) -> None:
    pytest.importorskip("triton")
    from swarmnode.extensions.native.triton.kernels import TileTable

    with pytest.raises(ValueError, match="does not fit between"):
        TileTable.build(segments, 20, 16, torch.device("cpu"))


@pytest.fixture(scope="module")
def compiled_for(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int | bool]]:
    pytest.importorskip("triton")
    cache = str(tmp_path_factory.mktemp("triton"))
    return run_this_file("compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90"])
def test_it_compiles_for_gpus_that_are_not_here(
    compiled_for: dict[str, dict[str, int | bool]], capability: str
) -> None:
    """Down to machine code, with the assembler that Triton brings."""
    found = compiled_for[capability]
    assert found["spilled_bytes"] == 0
    assert found["shared_bytes"] <= 99 * 1024, "this one has to fit into any of them"
    assert found["tensor_cores"]
    assert found["loads_of_16_bytes"]


# What follows runs in the program of its own.


def fenced(values: Tensor) -> Tensor:
    """The same matrix amid NaN: one element read too far and the result is NaN."""
    buffer = torch.full([size + 40 for size in values.shape], float("nan"), dtype=values.dtype)
    view = buffer[tuple(slice(size) for size in values.shape)]
    return view.copy_(values)


@dataclass(frozen=True)
class Inputs:
    x_MK: Tensor
    weight_NK: Tensor
    s_MR: Tensor
    b_ANR: Tensor
    scaling_A: Tensor
    bias_N: Tensor | None

    @classmethod
    def of(cls, case: Case, adapters: int = 3) -> "Inputs":
        torch.manual_seed(0)
        rows = case.segments[-1].end
        weight = torch.randn(case.k, case.n) if case.swapped else torch.randn(case.n, case.k)
        stack = torch.randn(adapters, *((case.rank, case.n) if case.swapped else (case.n, case.rank)))
        x, weight, s, stack, bias = (
            t.to(case.dtype)
            for t in (
                torch.randn(rows, case.k),
                weight,
                torch.randn(rows, case.rank),
                stack,
                torch.randn(case.n),
            )
        )
        weight, stack = fenced(weight), fenced(stack)
        return cls(
            fenced(x),
            weight.t() if case.swapped else weight,
            fenced(s),
            stack.transpose(1, 2) if case.swapped else stack,
            torch.tensor([0.7, -1.3, 2.1][:adapters]),
            bias if case.bias else None,
        )

    def exact(self, segments: tuple[Segment, ...]) -> Tensor:
        y = self.x_MK.double() @ self.weight_NK.double().t()
        for segment in segments:
            if segment.adapter >= 0:
                rows = slice(segment.start, segment.end)
                low_rank = self.s_MR[rows].double() @ self.b_ANR[segment.adapter].double().t()
                y[rows] += float(self.scaling_A[segment.adapter]) * low_rank
        return y if self.bias_N is None else y + self.bias_N.double()


def relative_error(y: Tensor, exact: Tensor) -> float:
    error = float((y.double() - exact).abs().max() / exact.abs().max())
    return error if error == error else float("inf")


def compute(inputs: Inputs, segments: tuple[Segment, ...], block_m: int = 16) -> Tensor:
    from swarmnode.extensions.native.triton import kernels

    config = kernels.LaunchConfig(block_m, 32, 32, 4, 2)
    tiles = kernels.TileTable.build(segments, len(inputs.x_MK), block_m, torch.device("cpu"))
    return kernels.lora_gemm(
        inputs.x_MK,
        inputs.weight_NK,
        inputs.s_MR,
        inputs.b_ANR,
        inputs.scaling_A,
        tiles,
        config,
        inputs.bias_N,
    )


def error_of(case: Case) -> float:
    inputs = Inputs.of(case)
    return relative_error(compute(inputs, case.segments, case.block_m), inputs.exact(case.segments))


def error_in_no_segment() -> float:
    inputs, segments = Inputs.of(Case(((40, 0),))), (Segment(3, 20, 1), Segment(22, 30, 0))
    return relative_error(compute(inputs, segments), inputs.exact(segments))


def error_expanded() -> float:
    case = Case()
    inputs = replace(Inputs.of(case), x_MK=torch.randn(1, 1).expand(33, case.k))
    return relative_error(compute(inputs, case.segments), inputs.exact(case.segments))


def error_of_scaling() -> float:
    """-2048 + 2048 * (1 + 2^-11) = 1, and 0 where the scaling passed through float16."""
    ones = torch.ones(16, 16, dtype=torch.float16)
    inputs = Inputs(ones, ones * -128, ones * 16, ones[None] * 8, torch.tensor([1 + 2**-11]), None)
    segments = (Segment(0, 16, 0),)
    return relative_error(compute(inputs, segments), inputs.exact(segments))


def linear_errors() -> dict[str, float]:
    """`lora_linear_segments` with this kernel against the same in float64 without."""
    from swarmnode.extensions.native.triton import kernels
    from swarmnode.model.adapters.lora import GemmInputs, LoraWeights, StackedGemm, lora_linear_segments

    class Always:
        def pays(self, x_MK: Tensor, weight_NK: Tensor, rank: int) -> bool:
            return True

        def __call__(self, given: GemmInputs) -> Tensor:
            x, weight, s, b, scaling, segments, bias = given
            tiles = kernels.TileTable.build(segments, len(x), 16, x.device)
            config = kernels.LaunchConfig(16, 32, 32, 4, 2)
            return kernels.lora_gemm(x, weight, s, b, scaling, tiles, config, bias)

    torch.manual_seed(0)
    segments = (Segment(0, 21, 0), Segment(21, 25, -1), Segment(25, 40, 1))
    leaves = {
        "x": torch.randn(40, 24),
        **{f"a{i}": torch.randn(8, 24) for i in range(2)},
        **{f"b{i}": torch.randn(36, 8) for i in range(2)},
    }
    weight, bias, dy, scalings = torch.randn(36, 24), torch.randn(36), torch.randn(40, 36), (0.5, 2.0)

    def run(dtype: torch.dtype, kernel: bool) -> dict[str, Tensor]:
        mine = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
        adapters = [LoraWeights(mine[f"a{i}"], mine[f"b{i}"], scalings[i]) for i in range(2)]
        stack_a = torch.stack([a.a_RK.detach() for a in adapters])
        stack_b = torch.stack([a.b_NR.detach() for a in adapters])
        stacked = StackedGemm(Always(), stack_a, stack_b, torch.tensor(scalings)) if kernel else None
        y = lora_linear_segments(mine["x"], weight.to(dtype), bias.to(dtype), adapters, segments, stacked)
        y.backward(dy.to(dtype))
        return {"y": y.detach(), **{name: t.grad for name, t in mine.items() if t.grad is not None}}

    exact, ours = run(torch.float64, kernel=False), run(torch.float32, kernel=True)
    return {f"linear {name}": relative_error(ours[name], exact[name]) for name in exact}


def node_way(folder: Path) -> str:
    """LoraKernel with every launch configuration; a timer that says the last one is fastest."""
    from swarmnode.extensions.native.triton.kernel_choice import KernelChoice, KernelEnvironment, Run
    from swarmnode.extensions.native.triton.lora_kernel import LoraKernel

    asked: list[int] = []

    def timer(runs: dict[str, Run]) -> dict[str, float]:
        asked.append(len(runs))
        return {name: 10.0 - place for place, name in enumerate(runs)}

    machine = KernelEnvironment("interpreter", "none", "none", "none", "interpreted", "this")
    kernel = LoraKernel(KernelChoice(folder / "kernel.json", machine, timer, budget_s=1e9), policies=2)
    x, weight = torch.randn(70, 40), torch.randn(48, 40)
    pays = kernel.pays(x, weight, 8)
    kernel.pays(x[:66], weight, 8)
    return f"kernel pays: {pays}, contenders: {asked[0]}, second ask measures: {len(asked) > 1}"


def refusals() -> dict[str, str]:
    case = Case()
    good = Inputs.of(case)
    other_rows = (Segment(0, 32, 0),)
    tries: dict[str, Callable[[], object]] = {
        "s with too few rows": lambda: compute(replace(good, s_MR=good.s_MR[:-1]), case.segments),
        "b for another width": lambda: compute(replace(good, b_ANR=good.b_ANR[:, :-1]), case.segments),
        "b of another rank": lambda: compute(replace(good, b_ANR=good.b_ANR[:, :, :-1]), case.segments),
        "another dtype": lambda: compute(replace(good, s_MR=good.s_MR.half()), case.segments),
        "float64": lambda: compute(replace(good, x_MK=good.x_MK.double()), case.segments),
        "a scaling too short": lambda: compute(replace(good, scaling_A=good.scaling_A[:2]), case.segments),
        "a scaling in float16": lambda: compute(
            replace(good, scaling_A=good.scaling_A.half()), case.segments
        ),
        "a bias with gaps": lambda: compute(replace(good, bias_N=torch.ones(80)[::2]), case.segments),
        "a table for other rows": lambda: with_table(good, other_rows, 32, 16),
        "a table for other blocks": lambda: with_table(good, case.segments, 33, 32),
        "an adapter beyond the stack": lambda: compute(good, (Segment(0, 33, 3),)),
        "a stride that overflows": lambda: compute(
            replace(
                good, x_MK=torch.empty(2**23 + case.k).as_strided((2, case.k), (2**23, 1)), s_MR=good.s_MR[:2]
            ),
            (Segment(0, 2, 0),),
        ),
        "no rank at all": lambda: compute(
            replace(good, s_MR=good.s_MR[:, :0], b_ANR=good.b_ANR[:, :, :0]), case.segments
        ),
    }
    return {name: refusal(run) for name, run in tries.items()}


def with_table(inputs: Inputs, segments: tuple[Segment, ...], rows: int, block_m: int) -> Tensor:
    from swarmnode.extensions.native.triton import kernels

    tiles = kernels.TileTable.build(segments, rows, block_m, torch.device("cpu"))
    config = kernels.LaunchConfig(16, 32, 32, 4, 2)
    x, weight, s, b = inputs.x_MK, inputs.weight_NK, inputs.s_MR, inputs.b_ANR
    return kernels.lora_gemm(x, weight, s, b, inputs.scaling_A, tiles, config)


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "not refused"


def compiled(capability: int) -> dict[str, int | bool]:
    """bfloat16, all sizes multiples of 16, as a GPU would be given them: the fullest registers of all."""
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from swarmnode.extensions.native.triton import kernels

    config = kernels.LaunchConfig(128, 128, 32, 4, 4)
    assert config in kernels.CONFIGS
    constants: dict[str, int] = {
        **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "BLOCK_R": 16},
        **{"GROUP": 8, "HAS_BIAS": True, "EVEN_N": False, "EVEN_K": False, "UPCAST": False},
        **dict.fromkeys(("stride_xk", "stride_wk", "stride_sr", "stride_br"), 1),
    }
    pointers = {"scaling_ptr": "*fp32", "tiles_ptr": "*i32"}
    names = kernels.ragged_lora_gemm.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "*bf16" if "_ptr" in name else "i32")
        for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in {*constants, "tile_count"}
    }
    source = ASTSource(kernels.ragged_lora_gemm, signature, constants, aligned)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = found.asm["ptx"]
    return {
        "shared_bytes": found.metadata.shared,
        "spilled_bytes": stack_bytes(found.asm["cubin"]),
        "tensor_cores": re.search(r"mma\.sync|wgmma\.mma_async", ptx) is not None,
        "loads_of_16_bytes": re.search(r"cp\.async\.cg\S* .*0x10,", ptx) is not None,
    }


def stack_bytes(cubin: bytes) -> int:
    """What one thread keeps in memory because its registers are full."""
    import re
    import tempfile

    import triton.knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", told))


def interpret() -> dict[str, float | str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return {
            **{name: error_of(case) for name, case in CASES.items()},
            "rows in no segment": error_in_no_segment(),
            "expanded": error_expanded(),
            "scaling": error_of_scaling(),
            **linear_errors(),
            "node": node_way(Path(folder)),
            **refusals(),
        }


if __name__ == "__main__":
    results = interpret() if sys.argv[1] == "interpret" else {str(c): compiled(c) for c in (80, 86, 89, 90)}
    print(json.dumps(results))
