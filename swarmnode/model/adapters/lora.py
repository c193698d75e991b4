"""A frozen linear layer with LoRA adapters on it, forward and backward with few passes over the activations.

lora_patch.py (which adapter takes which tokens) -> [lora] -> GEMMs of torch

    S = alpha x A^T        y = x W^T (+ bias) + S B^T
    dS = alpha dy B        dx = dy W + dS A        dA = dS^T x        dB = dy^T S

The rank-r matrix S is the boundary (LoRAFusion, arXiv 2510.00206, section 4): it costs next to nothing to
store, and with it every large product is one GEMM into which the low-rank term is added (`addmm_`). PEFT
makes several more matrices of the size of y and of dx, and so would autograd if it differentiated these
products itself. Kept for the backward pass are x and S, and A and B in the type of x.

A and B are cast to the type of x here and their gradients cast back, so float32 adapters on a bfloat16 base
cost as much as bfloat16 adapters. The price on a CPU: each product of such a gradient is rounded to bfloat16
once, a relative error of 3e-3, where PEFT multiplies in float32, and so does a GPU here; sums over
micro-batches and Adam stay in float32.

Shapes: M tokens, K features in, N out, R rank, A adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TRANSPOSE_FROM_FEATURES = 512
"""Width from which, on a CPU in bfloat16, a skinny operand is transposed by a copy before its GEMM. This
saves 6-8 % of the whole layer at 512 and 1024 and costs 18 % at 64 (AMX, 4000 tokens); float32 gains
nothing."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One adapter of one linear layer."""

    a_RK: Tensor
    """Parameter, or a view of one; any floating type."""
    b_NR: Tensor
    scaling: float
    """alpha: PEFT's lora_alpha / r, or lora_alpha / sqrt(r)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens (rows of x, flattened) of one adapter."""

    start: int
    end: int
    """Index after the last token."""
    adapter: int
    """Index into the adapters of the layer. -1: the base alone."""


def lora_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, adapter: LoraWeights) -> Tensor:
    """Computes all tokens through one adapter: x [..., K] -> y [..., N], of the type of x, which must be the
    weight's. Does not support autocast.

    `weight_NK` and `bias_N` are frozen: a backward pass in which either requires a gradient raises
    RuntimeError.

    >>> x, weight, a, b = torch.ones(1, 2), torch.eye(2), torch.ones(1, 2), torch.ones(2, 1)
    >>> lora_linear(x, weight, None, LoraWeights(a, b, 0.5))
    tensor([[2., 2.]])
    """
    return _OneAdapter.apply(x, weight_NK, bias_N, adapter.a_RK, adapter.b_NR, adapter.scaling)  # pyright: ignore[reportReturnType]


def lora_linear_segments(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    adapters: Sequence[LoraWeights],
    segments: tuple[Segment, ...],
    *,
    alike: bool = False,
) -> Tensor:
    """Computes each segment of the flattened tokens through its own adapter: x [..., K] -> y [..., N].

    The base is one GEMM for all. Tokens in no segment, or in one with adapter -1, get only the base. Ranks
    may differ. An adapter without tokens gets no gradient (None, not zero: its optimizer state must not
    move). `weight_NK` and `bias_N` are frozen as in `lora_linear`. `alike`: all adapters are equal, and all
    tokens are in segments; only their gradients are kept apart.
    """
    kept = tuple(s for s in segments if s.adapter >= 0 and s.end > s.start)
    products = (Segment(0, kept[-1].end, 0),) if alike else kept
    plan = _Plan(kept, products, tuple(adapter.scaling for adapter in adapters))
    # Every A and B is an input of its own, so that autograd keeps gradients, and thus Adam's state, apart.
    weights = [w for adapter in adapters for w in (adapter.a_RK, adapter.b_NR)]
    return _SeveralAdapters.apply(x, weight_NK, bias_N, plan, *weights)  # pyright: ignore[reportReturnType]


class _OneAdapter(torch.autograd.Function):
    """The LoRA layer for a single adapter. Kept lean: on a fast card, its Python code and the number of its
    operations take longer than the operations, unless the layer is wide. So alpha goes into S and dS, inside
    their GEMMs, and no gradient is scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        a_RK: Tensor,
        b_NR: Tensor,
        scaling: float,
    ) -> Tensor:
        shape, dtype = x.shape, x.dtype
        ctx.kept = weight_NK, scaling, shape, a_RK.dtype, b_NR.dtype
        x_MK = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        # A call of `to` takes a third of the time of launching an operation, even if there is nothing to do.
        if a_RK.dtype is not dtype or b_NR.dtype is not dtype:
            a_RK, b_NR = a_RK.to(dtype), b_NR.to(dtype)
        s_MR = x_MK.new_empty((x_MK.shape[0], a_RK.shape[0])).addmm_(x_MK, a_RK.t(), beta=0, alpha=scaling)
        y_MN = F.linear(x_MK, weight_NK, bias_N).addmm_(s_MR, b_NR.t())
        ctx.save_for_backward(x_MK, s_MR, a_RK, b_NR)
        return y_MN if len(shape) == 2 else y_MN.view((*shape[:-1], y_MN.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MK, s_MR, a_RK, b_NR = ctx.saved_tensors
        weight_NK, scaling, shape, a_dtype, b_dtype = ctx.kept
        needs_x, needs_weight, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        _refuse_base_gradient(needs_weight or needs_bias)
        dy_MN = dy if len(shape) == 2 else dy.reshape(-1, dy.shape[-1])
        dx = da_RK = db_NR = None
        if needs_b:
            db_NR = _outer(dy_MN, s_MR, b_dtype)
        if needs_x or needs_a:
            ds_MR = dy_MN.new_empty(s_MR.shape).addmm_(dy_MN, b_NR, beta=0, alpha=scaling)
            if needs_a:
                da_RK = _outer(ds_MR, x_MK, a_dtype)
            if needs_x:
                dx = dy_MN.mm(weight_NK).addmm_(ds_MR, a_RK)
                if len(shape) != 2:
                    dx = dx.view(shape)
        return dx, None, None, da_RK, db_NR, None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The non-tensor arguments of a layer with several adapters."""

    segments: tuple[Segment, ...]
    """Segments of adapters, without those of the base and empty ones."""
    products: tuple[Segment, ...]
    """Segments that have a product of their own: `segments`, or a single one if all adapters are alike."""
    scalings: tuple[float, ...]


class _SeveralAdapters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, plan: _Plan, *weights: Tensor
    ) -> Tensor:
        ctx.kept = weight_NK, plan, x.shape, [w.dtype for w in weights]
        x_MK = x.reshape(-1, x.shape[-1])
        cast = [w.to(x.dtype) for w in weights]
        s_MR = _low_rank(x_MK, [a.t() for a in cast[::2]], plan)
        y_MN = F.linear(x_MK, weight_NK, bias_N)
        _add_low_rank(y_MN, s_MR, [b.t() for b in cast[1::2]], plan)
        ctx.save_for_backward(x_MK, s_MR, *cast)
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MK, s_MR, *cast = ctx.saved_tensors
        weight_NK, plan, shape, dtypes = ctx.kept
        needs_x, needs_weight, needs_bias, _, *needs = ctx.needs_input_grad
        _refuse_base_gradient(needs_weight or needs_bias)
        dy_MN = dy.reshape(-1, dy.shape[-1]).contiguous()
        ds_MR = _low_rank(dy_MN, cast[1::2], plan)
        gradients: list[Tensor | None] = [None] * len(cast)
        for segment in plan.segments:
            rows, i = slice(segment.start, segment.end), 2 * segment.adapter
            rank = len(cast[i])
            if needs[i]:
                _accumulate(gradients, i, _outer(ds_MR[rows, :rank], x_MK[rows], dtypes[i]))
            if needs[i + 1]:
                _accumulate(gradients, i + 1, _outer(dy_MN[rows], s_MR[rows, :rank], dtypes[i + 1]))
        dx = None
        if needs_x:
            dx_MK = dy_MN.mm(weight_NK)
            _add_low_rank(dx_MK, ds_MR, cast[::2], plan)
            dx = dx_MK.view(shape)
        return dx, None, None, None, *gradients


def _low_rank(rows_MX: Tensor, factors_XR: list[Tensor], plan: _Plan) -> Tensor:
    """Returns alpha times each segment's rows times its adapter's factor: [M, largest rank], zero beyond the
    adapter's rank."""
    rank = max((factor.shape[1] for factor in factors_XR), default=0)
    out_MR = rows_MX.new_zeros(rows_MX.shape[0], rank)
    for segment in plan.products:
        factor, scaling = factors_XR[segment.adapter], plan.scalings[segment.adapter]
        rows = slice(segment.start, segment.end)
        out_MR[rows, : factor.shape[1]].addmm_(rows_MX[rows], factor, beta=0, alpha=scaling)
    return out_MR


def _add_low_rank(out_MX: Tensor, s_MR: Tensor, factors_RX: list[Tensor], plan: _Plan) -> None:
    for segment in plan.products:
        factor, rows = factors_RX[segment.adapter], slice(segment.start, segment.end)
        out_MX[rows].addmm_(s_MR[rows, : len(factor)], factor)


def _accumulate(gradients: list[Tensor | None], i: int, gradient: Tensor) -> None:
    present = gradients[i]
    gradients[i] = gradient if present is None else present.add_(gradient)


def _outer(left_MX: Tensor, right_MY: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns left^T right in this type, [X, Y]: the gradient of a factor, in the faster order of
    operations."""
    if left_MX.is_cuda and dtype is torch.float32 and left_MX.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left_MX.t(), right_MY, out_dtype=dtype)
    if left_MX.is_cuda:
        return left_MX.t().mm(right_MY).to(dtype)
    if left_MX.shape[1] > right_MY.shape[1]:
        return _outer(right_MY, left_MX, dtype).t()
    left_XM = left_MX.t()
    if right_MY.dtype is torch.bfloat16 and right_MY.shape[1] >= TRANSPOSE_FROM_FEATURES:
        left_XM = left_XM.contiguous()
    product_XY = left_XM.mm(right_MY)
    return product_XY if product_XY.dtype is dtype else product_XY.to(dtype)


def _refuse_base_gradient(asked: bool) -> None:
    if asked:
        raise RuntimeError("a LoRA linear has a frozen base: its weight and bias get no gradient here")
