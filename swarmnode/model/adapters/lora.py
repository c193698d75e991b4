"""A frozen linear layer with LoRA adapters on it, forward and backward with few passes over the activations.

lora_patch.py (which adapter takes which tokens) -> [lora] -> GEMMs of torch, or a LoraGemm where that pays

    S = x A^T        y = x W^T (+ bias) + alpha S B^T
    dS = dy B        dx = dy W + alpha dS A        dA = alpha dS^T x        dB = alpha dy^T S

The rank-r matrix S is the seam (LoRAFusion, arXiv 2510.00206, section 4): it costs next to nothing to store,
and with it every large product is one GEMM that the low-rank term is added into (`addmm_`, alpha inside the
GEMM). PEFT makes several more matrices of the size of y and of dx. Kept for the backward are x and S alone.

A and B are cast to the type of x inside and their gradients cast back, so float32 adapters on a bfloat16 base
cost what bfloat16 adapters do. The price: each product of such a gradient is rounded to bfloat16 once, a
relative error of 3e-3, where PEFT multiplies in float32; sums over micro-batches and Adam stay in float32.
Shapes: M tokens, K features in, N out, R rank, A adapters.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TRANSPOSE_FROM_FEATURES = 512
"""Width from which, on a CPU in bfloat16, a skinny operand is transposed by a copy before its GEMM. Of the
whole layer that saves 6-8 % at 512 and 1024 and costs 18 % at 64 (AMX, 4000 tokens); float32 gains
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
    """Neighbouring tokens (rows of x, flattened) of one adapter."""

    start: int
    end: int
    """Index after the last token."""
    adapter: int
    """Index into the adapters of the layer. -1: the base alone."""


class LoraGemm(Protocol):
    """A GEMM with the low-rank term inside, for tokens of several adapters (registry.py, `gemm`)."""

    def pays(self, x_MK: Tensor, weight_NK: Tensor, rank: int) -> bool:
        """Returns True if it is faster than `addmm_` for these shapes on this device."""
        ...

    def __call__(self, given: "GemmInputs") -> Tensor:
        """y = x W^T (+ bias) + scaling[a] S B[a]^T, with a the adapter of a row's segment; y is [M, N]."""
        ...


@dataclass(frozen=True, slots=True)
class KernelOffer:
    """A kernel to try, or None, and a sentence with the reason, for the log."""

    gemm: LoraGemm | None
    reason: str


class GemmInputs(NamedTuple):
    """The operands of one GEMM with the low-rank term."""

    x_MK: Tensor
    weight_NK: Tensor
    """A view of any strides, as are the factors B: the backward passes transposes."""
    s_MR: Tensor
    """Columns of S and B beyond an adapter's own rank are zero."""
    b_ANR: Tensor
    scaling_A: Tensor
    segments: tuple[Segment, ...]
    bias_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackedGemm:
    """The kernel with the stacked weights of all adapters of one layer (`adapter_stack.py`)."""

    gemm: LoraGemm
    a_ARK: Tensor
    """A of each adapter, zero beyond its own rank, as is b."""
    b_ANR: Tensor
    scaling_A: Tensor
    """float32, on the device."""


def lora_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, adapter: LoraWeights) -> Tensor:
    """Computes all tokens through one adapter: x [..., K] -> y [..., N], of the type of x or of autocast.

    `weight_NK` and `bias_N` are frozen: a backward with either requiring a gradient raises RuntimeError.

    >>> x, weight, a, b = torch.ones(1, 2), torch.eye(2), torch.ones(1, 2), torch.ones(2, 1)
    >>> lora_linear(x, weight, None, LoraWeights(a, b, 0.5))
    tensor([[2., 2.]])
    """
    cast_to = _autocast_dtype(x)
    with _without_autocast(x.device.type):
        return _OneAdapter.apply(x, weight_NK, bias_N, adapter.a_RK, adapter.b_NR, adapter.scaling, cast_to)  # pyright: ignore[reportReturnType]


def lora_linear_segments(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    adapters: Sequence[LoraWeights],
    segments: tuple[Segment, ...],
    stacked: StackedGemm | None = None,
    *,
    alike: bool = False,
) -> Tensor:
    """Computes each segment of the flattened tokens through its own adapter: x [..., K] -> y [..., N].

    The base is one GEMM for all. Tokens in no segment, or in one with adapter -1, get the base alone. Ranks
    may differ. An adapter without tokens gets no gradient (None, not zero: its optimizer state must not
    move). `weight_NK` and `bias_N` are frozen as in `lora_linear`. `alike`: all adapters have the same values,
    and all tokens are in segments; only gradients are told apart.
    """
    filled = tuple(s for s in segments if s.adapter >= 0 and s.end > s.start)
    plan = _Plan(
        filled,
        (Segment(0, filled[-1].end, 0),) if alike else filled,
        tuple(adapter.scaling for adapter in adapters),
        stacked,
        _autocast_dtype(x),
    )
    # Every A and B is an input of its own: autograd then keeps gradients, and so Adam's state, apart.
    weights = [w for adapter in adapters for w in (adapter.a_RK, adapter.b_NR)]
    with _without_autocast(x.device.type):
        return _SeveralAdapters.apply(x, weight_NK, bias_N, plan, *weights)  # pyright: ignore[reportReturnType]


class _OneAdapter(torch.autograd.Function):
    """The LoRA layer for a single adapter. Kept lean: in a small model its Python costs as much as its
    GEMMs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        a_RK: Tensor,
        b_NR: Tensor,
        scaling: float,
        cast_to: torch.dtype | None,
    ) -> Tensor:
        ctx.shape, ctx.dtype, ctx.scaling, ctx.cast_to = x.shape, x.dtype, scaling, cast_to
        x_MK, weight, bias = _inputs(x, weight_NK, bias_N, cast_to)
        y_MN = F.linear(x_MK, weight, bias)
        s_MR = x_MK @ a_RK.to(x_MK.dtype).t()
        y_MN.addmm_(s_MR, b_NR.to(x_MK.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x_MK, s_MR, weight_NK, a_RK, b_NR)
        return y_MN if x.dim() == 2 else y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _without_autocast(dy.device.type):
            return _OneAdapter._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, s_MR, weight_NK, a_RK, b_NR = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        _refuse_base_gradient(needs_weight or needs_bias)
        dy_MN = dy.reshape(-1, dy.shape[-1])
        dx = da_RK = db_NR = None
        if needs_b:
            db_NR = _transposed_times(s_MR, dy_MN).t().to(b_NR.dtype).mul_(ctx.scaling)
        if needs_x or needs_a:
            ds_MR = dy_MN @ b_NR.to(dy_MN.dtype)
            if needs_a:
                da_RK = _transposed_times(ds_MR, x_MK).to(a_RK.dtype).mul_(ctx.scaling)
            if needs_x:
                dx_MK = dy_MN @ (weight_NK if ctx.cast_to is None else weight_NK.to(ctx.cast_to))
                dx_MK.addmm_(ds_MR, a_RK.to(dy_MN.dtype), alpha=ctx.scaling)
                dx = dx_MK.view(ctx.shape).to(ctx.dtype)
        return dx, None, None, da_RK, db_NR, None, None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments of a layer with several adapters besides its tensors."""

    segments: tuple[Segment, ...]
    """Segments of adapters, without those of the base and empty ones."""
    products: tuple[Segment, ...]
    """Segments that have a product of their own: those, or one where all adapters are alike."""
    scalings: tuple[float, ...]
    stacked: StackedGemm | None
    cast_to: torch.dtype | None


class _SeveralAdapters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, plan: _Plan, *weights: Tensor
    ) -> Tensor:
        ctx.shape, ctx.dtype, ctx.plan = x.shape, x.dtype, plan
        x_MK, weight, bias = _inputs(x, weight_NK, bias_N, plan.cast_to)
        downs, ups = [w.to(x_MK.dtype) for w in weights[::2]], [w.to(x_MK.dtype) for w in weights[1::2]]
        s_MR = _per_segment(x_MK, [a.t() for a in downs], plan)
        stacked = _if_it_pays(plan, x_MK, weight, s_MR.shape[1])
        if stacked is not None:
            b_ANR = stacked.b_ANR.to(x_MK.dtype)
            y_MN = stacked.gemm(GemmInputs(x_MK, weight, s_MR, b_ANR, stacked.scaling_A, plan.segments, bias))
        else:
            y_MN = F.linear(x_MK, weight, bias)
            _add_low_rank(y_MN, s_MR, [b.t() for b in ups], plan)
        ctx.save_for_backward(x_MK, s_MR, weight_NK, *weights)
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _without_autocast(dy.device.type):
            return _SeveralAdapters._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, s_MR, weight_NK, *weights = ctx.saved_tensors
        plan: _Plan = ctx.plan
        _refuse_base_gradient(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        dy_MN = dy.reshape(-1, dy.shape[-1]).contiguous()
        downs, ups = [w.to(dy.dtype) for w in weights[::2]], [w.to(dy.dtype) for w in weights[1::2]]
        ds_MR = _per_segment(dy_MN, ups, plan)
        gradients: list[Tensor | None] = [None] * len(weights)
        for segment in plan.segments:
            rows, i, rank = (
                slice(segment.start, segment.end),
                2 * segment.adapter,
                downs[segment.adapter].shape[0],
            )
            if ctx.needs_input_grad[4 + i]:
                found = _transposed_times(ds_MR[rows, :rank], x_MK[rows])
                _accumulate(gradients, i, found.to(weights[i].dtype))
            if ctx.needs_input_grad[5 + i]:
                found = _transposed_times(s_MR[rows, :rank], dy_MN[rows]).t()
                _accumulate(gradients, i + 1, found.to(weights[i + 1].dtype))
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[i] = gradient.mul_(plan.scalings[i // 2])
        dx = _input_gradient(ctx, dy_MN, weight_NK, ds_MR, downs) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, *gradients


def _input_gradient(ctx: Any, dy_MN: Tensor, weight_NK: Tensor, ds_MR: Tensor, downs: list[Tensor]) -> Tensor:
    plan: _Plan = ctx.plan
    weight = weight_NK if plan.cast_to is None else weight_NK.to(plan.cast_to)
    stacked = _if_it_pays(plan, dy_MN, weight.t(), ds_MR.shape[1])
    if stacked is not None:
        a_AKR = stacked.a_ARK.to(dy_MN.dtype).transpose(1, 2)
        dx_MK = stacked.gemm(GemmInputs(dy_MN, weight.t(), ds_MR, a_AKR, stacked.scaling_A, plan.segments))
    else:
        dx_MK = dy_MN @ weight
        _add_low_rank(dx_MK, ds_MR, downs, plan)
    return dx_MK.view(ctx.shape).to(ctx.dtype)


def _per_segment(rows_MX: Tensor, factors_XR: list[Tensor], plan: _Plan) -> Tensor:
    """Returns each segment's rows times its adapter's factor: [M, largest rank], zero beyond its rank."""
    rank = max((factor.shape[1] for factor in factors_XR), default=0)
    out_MR = rows_MX.new_zeros(rows_MX.shape[0], rank)
    for segment in plan.products:
        factor = factors_XR[segment.adapter]
        rows = slice(segment.start, segment.end)
        torch.mm(rows_MX[rows], factor, out=out_MR[rows, : factor.shape[1]])
    return out_MR


def _add_low_rank(out_MX: Tensor, s_MR: Tensor, factors_RX: list[Tensor], plan: _Plan) -> None:
    for segment in plan.products:
        factor = factors_RX[segment.adapter]
        rows = slice(segment.start, segment.end)
        s = s_MR[rows, : factor.shape[0]]
        out_MX[rows].addmm_(s, factor, alpha=plan.scalings[segment.adapter])


def _if_it_pays(plan: _Plan, x_MK: Tensor, weight_NK: Tensor, rank: int) -> StackedGemm | None:
    stacked = plan.stacked
    return stacked if stacked is not None and stacked.gemm.pays(x_MK, weight_NK, rank) else None


def _accumulate(gradients: list[Tensor | None], i: int, gradient: Tensor) -> None:
    present = gradients[i]
    gradients[i] = gradient if present is None else present.add_(gradient)


def _transposed_times(skinny_MR: Tensor, wide_MX: Tensor) -> Tensor:
    """Returns skinny^T @ wide, [R, X], in whichever order of work is faster."""
    transposed_RM = skinny_MR.t()
    if (
        wide_MX.dtype is torch.bfloat16
        and wide_MX.shape[1] >= TRANSPOSE_FROM_FEATURES
        and not wide_MX.is_cuda
    ):
        transposed_RM = transposed_RM.contiguous()
    return transposed_RM @ wide_MX


def _inputs(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, cast_to: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    x_MK = x.reshape(-1, x.shape[-1])
    if cast_to is None:
        return x_MK, weight_NK, bias_N
    return x_MK.to(cast_to), weight_NK.to(cast_to), None if bias_N is None else bias_N.to(cast_to)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which our own casts hold. It does nothing where autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype for a linear layer. None: autocast is off, or leaves x alone (float64)."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _refuse_base_gradient(asked: bool) -> None:
    if asked:
        raise RuntimeError("a LoRA linear has a frozen base: its weight and bias get no gradient here")
