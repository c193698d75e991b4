"""One ragged Triton GEMM for a LoRA linear: its output, and the gradient of its input.

kernel_choice.py -> [kernels] -> the GPU          (lora.py does everything else with cuBLAS)

    Y[m, n] = sum_k X[m, k] W[n, k] + scaling[a(m)] * sum_r S[m, r] B[a(m), n, r] (+ bias[n])

with S = X A^T, which is tiny and comes from cuBLAS. The low-rank term is in the accumulator before that is
written, so the [M, N] output crosses memory once; `addmm_` after a GEMM reads and writes it once more
(splitting at S is the idea of LoRAFusion, arXiv 2510.00206, section 4). The gradient dX is the same sum over
swapped strides: X := dY, W := W^T, S := dY B, B := A^T.

Rows of several adapters lie in one batch. A small table gives each tile of rows its adapter; a tile never
crosses from one adapter to another, so nothing is padded, and rows of the base alone skip the low-rank term.

Triton is imported right here, so this file is imported only where Triton is: `lora_kernel.available` looks
first. With TRITON_INTERPRET=1 the same launcher runs on CPU tensors: so it is tested without a GPU.
"""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.knobs
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

if TYPE_CHECKING:
    from swarmnode.model.adapters.lora import Segment

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_RANK_BLOCK = 16
"""Tensor cores multiply at least 16 deep; smaller ranks are padded in registers, by mask."""

MAX_STRIDE = 2**23
"""Offsets inside a tile (up to 256 steps of a stride) are 32-bit. Vocabularies of today stay below 2^18."""

GROUP_TILES = 8
"""Row tiles that are walked together, column by column, so that W and X are found in the L2 cache."""

INTERPRETED = triton.knobs.runtime.interpret
"""True under the interpreter, which holds bfloat16 as integers and multiplies those: inputs are widened
first."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The division of the work into tiles. The best one is measured, never looked up by the name of a GPU."""

    block_m: int
    """Rows (tokens) of one tile."""
    block_n: int
    """Output features of one tile."""
    block_k: int
    """Input features per step of the inner loop."""
    warps: int
    stages: int
    """Depth of the pipeline of loads: at most so many buffers of (block_m + block_n) * block_k elements."""

    @property
    def name(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} warps {self.warps} stages {self.stages}"


CONFIGS = (
    LaunchConfig(64, 64, 64, 4, 3),
    LaunchConfig(128, 128, 32, 4, 4),
    LaunchConfig(128, 128, 64, 8, 3),
    LaunchConfig(128, 256, 64, 8, 3),
    LaunchConfig(128, 256, 64, 8, 4),
    LaunchConfig(64, 128, 32, 4, 4),
)
"""Configurations to measure. The first takes 48 KiB of shared memory in 16 bits, which any GPU has; one that
does not fit is skipped."""


@dataclass(frozen=True, slots=True)
class TileTable:
    """The rows and the adapter of each tile. Made once per micro-batch, used by all its layers."""

    tiles_T3: Tensor
    """Tiles, int32 on the device: first row, row after the last, adapter (-1: base only)."""
    block_m: int
    rows: int
    adapters: int
    """Least number of adapters in the stack."""

    @classmethod
    def build(
        cls, segments: Sequence["Segment"], rows: int, block_m: int, device: torch.device
    ) -> "TileTable":
        """Cuts `rows` rows into tiles of at most `block_m`. Rows in no segment get the base alone.

        Raises ValueError for segments that overlap, are out of order, pass the last row or name no adapter.
        """
        end = 0
        for segment in segments:
            if not end <= segment.start <= segment.end <= rows or segment.adapter < -1:
                raise ValueError(f"{segment} does not fit between row {end} and row {rows}")
            end = segment.end
        tiles_T3 = torch.tensor(list(tile_rows(segments, rows, block_m)), dtype=torch.int32).view(-1, 3)
        adapters = 1 + max((s.adapter for s in segments), default=-1)
        return cls(tiles_T3.to(device), block_m, rows, adapters)


def tile_rows(segments: Sequence["Segment"], rows: int, block_m: int) -> Iterator[tuple[int, int, int]]:
    """Returns (first row, row after the last, adapter) of each tile, in order of rows; -1 between
    segments."""
    done = 0
    for segment in segments:
        yield from _cut(done, segment.start, -1, block_m)
        yield from _cut(segment.start, segment.end, segment.adapter, block_m)
        done = segment.end
    yield from _cut(done, rows, -1, block_m)


def _cut(start: int, end: int, adapter: int, block_m: int) -> Iterator[tuple[int, int, int]]:
    for row in range(start, end, block_m):
        yield row, min(row + block_m, end), adapter


def lora_gemm(
    x_MK: Tensor,
    weight_NK: Tensor,
    s_MR: Tensor,
    b_ANR: Tensor,
    scaling_A: Tensor,
    tiles: TileTable,
    config: LaunchConfig,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Returns the sum at the head of this file, in the dtype of `x_MK`, accumulated in float32.

    All matrices may have any strides (a transposed weight, an expanded gradient) and share one dtype and
    device; `scaling_A` is float32. Raises ValueError for inputs that do not fit together, before anything is
    read, and RuntimeError when the kernel cannot be compiled for this device or does not fit into it.
    """
    _check(x_MK, weight_NK, s_MR, b_ANR, scaling_A, tiles, config, bias_N)
    (M, K), N, R = x_MK.shape, weight_NK.shape[0], s_MR.shape[1]
    y_MN = x_MK.new_empty(M, N)
    if M == 0:
        return y_MN
    tile_count = len(tiles.tiles_T3)
    options: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_R": max(MIN_RANK_BLOCK, triton.next_power_of_2(R)),
        "GROUP": GROUP_TILES,
        "HAS_BIAS": bias_N is not None,
        "EVEN_N": N % config.block_n == 0,
        "EVEN_K": K % config.block_k == 0,
        "UPCAST": INTERPRETED,
        "num_warps": config.warps,
        "num_stages": config.stages,
        # Multiply and add in one instruction; left unsaid, Triton 3.9 warns that its default will change.
        "enable_fp_fusion": True,
    }
    grid = (tile_count * triton.cdiv(N, config.block_n),)
    pointers = (x_MK, weight_NK, s_MR, b_ANR, scaling_A, y_MN if bias_N is None else bias_N, y_MN)
    strides = (*x_MK.stride(), *weight_NK.stride(), *s_MR.stride(), *b_ANR.stride())
    launch: Any = ragged_lora_gemm[grid]
    try:
        with torch.cuda.device_of(x_MK):
            launch(*pointers, tiles.tiles_T3, tile_count, N, K, R, *strides, **options)
    except (TritonError, OSError, subprocess.CalledProcessError) as error:
        # Too little shared memory, no C compiler for the launch stub, a driver without this target.
        raise RuntimeError(f"{config.name}: {str(error).strip() or type(error).__name__}") from error
    return y_MN


def _check(
    x_MK: Tensor,
    weight_NK: Tensor,
    s_MR: Tensor,
    b_ANR: Tensor,
    scaling_A: Tensor,
    tiles: TileTable,
    config: LaunchConfig,
    bias_N: Tensor | None,
) -> None:
    """Raises ValueError for arguments that would read or write past the end of a tensor."""
    if (x_MK.dim(), weight_NK.dim(), s_MR.dim(), b_ANR.dim()) != (2, 2, 2, 3):
        raise ValueError("lora_gemm takes x [M, K], weight [N, K], s [M, R] and b [A, N, R]")
    (M, K), N, (A, _, R) = x_MK.shape, weight_NK.shape[0], b_ANR.shape
    expected = {
        "weight": (weight_NK, (N, K)),
        "s": (s_MR, (M, R)),
        "b": (b_ANR, (A, N, R)),
        "bias": (bias_N, (N,)),
    }
    if x_MK.dtype not in DTYPES:
        raise ValueError(f"lora_gemm multiplies float32, float16 and bfloat16, not {x_MK.dtype}")
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, and must be {list(shape)} beside x {[M, K]}")
        if tensor.dtype != x_MK.dtype or tensor.device != x_MK.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, x {x_MK.dtype} on {x_MK.device}")
    if min(N, K, R, A) == 0:
        raise ValueError(f"nothing to multiply: N {N}, K {K}, R {R}, adapters {A}")
    if scaling_A.shape != (A,) or scaling_A.dtype != torch.float32 or not scaling_A.is_contiguous():
        raise ValueError(f"scaling is {scaling_A.dtype} {list(scaling_A.shape)}, and must be float32 [{A}]")
    if bias_N is not None and not bias_N.is_contiguous():
        raise ValueError("bias must be contiguous")
    strides = (N, *(_longest_stride(matrix) for matrix in (x_MK, weight_NK, s_MR, b_ANR[0])))
    if max(strides) >= MAX_STRIDE:
        raise ValueError(f"a stride of {max(strides)} elements is too long for this kernel")
    if scaling_A.device != x_MK.device or tiles.tiles_T3.device != x_MK.device:
        raise ValueError(f"scaling and the tile table must be on {x_MK.device}, where x is")
    if (tiles.rows, tiles.block_m) != (M, config.block_m) or tiles.adapters > A:
        raise ValueError(
            f"the tile table is for {tiles.rows} rows by {tiles.block_m} and {tiles.adapters} adapters, "
            f"x has {M} rows by {config.block_m}, the stack {A} adapters"
        )


def _longest_stride(matrix: Tensor) -> int:
    """Returns the longest stride of dimensions with more than one element."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    return max(row * (rows > 1), column * (columns > 1))


# N, K, R, strides and scaling are run-time values: one compiled kernel serves the layers of a model (Triton
# tells apart multiples of 16, which it needs to load 16 bytes at once, and strides of 1). The number of tiles
# changes with every micro-batch and is kept out of even that.
@triton.jit(do_not_specialize=["tile_count"])
def ragged_lora_gemm(
    x_ptr,
    weight_ptr,
    s_ptr,
    b_ptr,
    scaling_ptr,
    bias_ptr,
    y_ptr,
    tiles_ptr,
    tile_count,
    N,
    K,
    R,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_sm,
    stride_sr,
    stride_ba,
    stride_bn,
    stride_br,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes one [BLOCK_M, BLOCK_N] tile of Y per program. Y is contiguous; everything else has strides."""
    program = tl.program_id(0)
    programs_per_group = GROUP * tl.cdiv(N, BLOCK_N)
    first_tile = program // programs_per_group * GROUP
    tiles_in_group = tl.minimum(tile_count - first_tile, GROUP)
    tile = first_tile + program % programs_per_group % tiles_in_group
    column = program % programs_per_group // tiles_in_group * BLOCK_N

    row = tl.load(tiles_ptr + tile * 3)
    row_end = tl.load(tiles_ptr + tile * 3 + 1)
    adapter = tl.load(tiles_ptr + tile * 3 + 2)

    # Offsets of a tile's corner are 64-bit (M * K may pass 2^31); those inside a tile stay 32-bit.
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    row64 = row.to(tl.int64)
    column64 = column.to(tl.int64)
    inside_m = (row + m < row_end)[:, None]
    inside_n = column + n < N

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if adapter >= 0:
        s_ptrs = s_ptr + row64 * stride_sm + m[:, None] * stride_sm + r[None, :] * stride_sr
        b_ptr += adapter.to(tl.int64) * stride_ba + column64 * stride_bn
        b_ptrs = b_ptr + n[None, :] * stride_bn + r[:, None] * stride_br
        s = tl.load(s_ptrs, mask=inside_m & (r < R)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside_n[None, :] & (r < R)[:, None], other=0.0)
        if UPCAST:
            s = s.to(tl.float32)
            b = b.to(tl.float32)
        accumulator = tl.dot(s, b, input_precision="ieee") * tl.load(scaling_ptr + adapter)

    x_ptrs = x_ptr + row64 * stride_xm + m[:, None] * stride_xm + k[None, :] * stride_xk
    w_ptrs = weight_ptr + column64 * stride_wn + n[None, :] * stride_wn + k[:, None] * stride_wk
    for start in range(0, K, BLOCK_K):
        x_mask = inside_m
        w_mask = inside_n[None, :]
        if not EVEN_K:
            x_mask = x_mask & (start + k < K)[None, :]
            w_mask = w_mask & (start + k < K)[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        accumulator = tl.dot(x, w, accumulator, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk

    if HAS_BIAS:
        bias = tl.load(bias_ptr + column + n, mask=inside_n, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    y_ptrs = y_ptr + row64 * N + column64 + m[:, None] * N + n[None, :]
    tl.store(y_ptrs, accumulator.to(y_ptr.dtype.element_ty), mask=inside_m & inside_n[None, :])
