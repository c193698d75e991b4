"""A decoder layer of Llama, Qwen2 or Qwen3 with one LoRA on it: two autograd functions around its attention.

dense_patch.py (where, and with which weights) -> [dense_layer] -> products of oneDNN or torch
                                                        |
   hidden -> into_attention -> queries, keys, values -> attention.py -> out_of_attention -> hidden

The base is frozen, so a backward pass owes gradients to the adapter and to the layer's input alone, and all
between can be chosen for few passes over few numbers. Layers that read the same input are one product. In
float32 and float64 that product has the adapter inside, W + scaling B A, and the scale of the norm before it,
as it would have after merging: the low-rank terms then cost nothing per token. In bfloat16 such a sum would
round the adapter away, so there they are added to the product.

    norm                xhat = h / rms(h)          y = xhat W'^T,  W' = (W + scaling B A) diag(norm)
    its gradient        dh = (dxhat - xhat mean(dxhat xhat)) / rms(h)
    LoRA, S = x A^T     dA = scaling (dy B)^T x    dB = scaling dy^T S

Kept for the backward pass are xhat, gate and up, and S. The rest is computed again, W' too: it would be a
copy of the layer's weights, and costs what R more tokens would. Shapes: M tokens, D hidden size, K features
in, N out, H query heads, G key heads, E head size, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarmnode.training.lora import LoraWeights

ONEDNN_FROM = 2**24
"""Multiplications from which oneDNN is asked: it prepares itself for half a millisecond per new number of
tokens."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A frozen linear layer with its adapter."""

    weight_NK: Tensor
    bias_N: Tensor | None
    adapter: LoraWeights


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * scale."""

    scale_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """What a layer computes with in one call."""

    head_dim: int
    before: Norm
    qkv: tuple[Adapted, ...]
    head_norms: tuple[Norm | None, Norm | None]
    """Over each query and over each key; Qwen3 has them."""
    out: tuple[Adapted]
    after: Norm
    gate_up: tuple[Adapted, ...]
    down: tuple[Adapted]


def into_attention(
    hidden_MD: Tensor, cos_ME: Tensor, sin_ME: Tensor, layer: DenseLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections and rotation: queries [M, H, E], keys and values [M, G, E]."""
    found = _IntoAttention.apply(hidden_MD, cos_ME, sin_ME, layer, *_parameters(layer.qkv))
    return cast(tuple[Tensor, Tensor, Tensor], found)


def out_of_attention(attended_MX: Tensor, hidden_MD: Tensor, layer: DenseLayer) -> Tensor:
    """The rest of the layer: attended heads [M, H * E] and the layer's input -> its output, [M, D]."""
    adapted = (*layer.out, *layer.gate_up, *layer.down)
    return cast(Tensor, _OutOfAttention.apply(attended_MX, hidden_MD, layer, *_parameters(adapted)))


def product(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, onto_MN: Tensor | None = None
) -> Tensor:
    """x W^T (+ bias) (+ onto); the weight may be a transposed view. oneDNN multiplies float32 with AVX-512
    where torch's default (MKL) does not on AMD: 5 to 40 % less time on an EPYC."""
    large = x_MK.numel() * len(weight_NK) >= ONEDNN_FROM
    if large and x_MK.dtype is torch.float32 and x_MK.is_cpu and torch.backends.mkldnn.is_available():
        multiply = torch.ops.mkldnn._linear_pointwise
        if onto_MN is not None:
            return multiply.binary(x_MK.contiguous(), onto_MN.contiguous(), weight_NK, bias_N, "add")
        return multiply(x_MK.contiguous(), weight_NK, bias_N, "none", [], "")
    y_MN = F.linear(x_MK, weight_NK, bias_N)
    return y_MN if onto_MN is None else y_MN.add_(onto_MN)


class _IntoAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, cos_ME: Tensor, sin_ME: Tensor, layer: DenseLayer, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer = layer
        xhat_MD, rstd_M1 = _normalised(hidden_MD, layer.before.eps)
        found, low_MR = _project(xhat_MD, layer.qkv, layer.before.scale_D)
        queries_keys_values = [y_MN.unflatten(1, (-1, layer.head_dim)) for y_MN in found]
        of_heads: list[Tensor] = []
        for number, norm in enumerate(layer.head_norms):
            heads_MHE = queries_keys_values[number]
            if norm is not None:
                head_xhat, head_rstd = _normalised(heads_MHE, norm.eps)
                of_heads += head_xhat, head_rstd
                heads_MHE = head_xhat * norm.scale_D
            queries_keys_values[number] = _rotated(heads_MHE, cos_ME[:, None], sin_ME[:, None])
        ctx.save_for_backward(xhat_MD, rstd_M1, cos_ME, sin_ME, low_MR, *of_heads, *parameters)
        return tuple(queries_keys_values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: DenseLayer = ctx.layer
        xhat_MD, rstd_M1, cos_ME, sin_ME, low_MR, *of_heads = ctx.saved_tensors
        turned = list(gradients)
        for number, norm in enumerate(layer.head_norms):
            turned[number] = _rotated(gradients[number], cos_ME[:, None], sin_ME[:, None], back=True)
            if norm is not None:
                of_head = of_heads[2 * number], of_heads[2 * number + 1]
                turned[number] = _norm_gradient(turned[number].mul_(norm.scale_D), *of_head)
        outputs = [gradient.flatten(1).contiguous() for gradient in turned]
        needs_hidden, *_ = ctx.needs_input_grad
        dxhat_MD, of_adapters = _project_gradients(
            outputs, xhat_MD, low_MR, layer.qkv, layer.before.scale_D, needs_hidden
        )
        dhidden = None if dxhat_MD is None else _norm_gradient(dxhat_MD, xhat_MD, rstd_M1)
        return dhidden, None, None, None, *of_adapters


class _OutOfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attended_MX: Tensor, hidden_MD: Tensor, layer: DenseLayer, *parameters: Tensor
    ) -> Tensor:
        ctx.layer = layer
        (middle_MD,), low_out = _project(attended_MX, layer.out, None, onto=hidden_MD)
        xhat_MD, rstd_M1 = _normalised(middle_MD, layer.after.eps)
        (gate_MI, up_MI), low_gate_up = _project(xhat_MD, layer.gate_up, layer.after.scale_D)
        (y_MD,), low_down = _project(F.silu(gate_MI).mul_(up_MI), layer.down, None, onto=middle_MD)
        lows = (low_out, low_gate_up, low_down)
        ctx.save_for_backward(attended_MX, xhat_MD, rstd_M1, gate_MI, up_MI, *lows, *parameters)
        return y_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: DenseLayer = ctx.layer
        attended_MX, xhat_MD, rstd_M1, gate_MI, up_MI, *lows = ctx.saved_tensors
        low_out, low_gate_up, low_down, *_ = lows
        dy_MD = dy_MD.contiguous()
        silu_MI = F.silu(gate_MI)
        dactive_MI, of_down = _project_gradients([dy_MD], silu_MI * up_MI, low_down, layer.down, None)
        assert dactive_MI is not None
        dup_MI = silu_MI.mul_(dactive_MI)
        dgate_MI = torch.ops.aten.silu_backward(dactive_MI.mul_(up_MI), gate_MI)
        dxhat_MD, of_gate_up = _project_gradients(
            [dgate_MI, dup_MI], xhat_MD, low_gate_up, layer.gate_up, layer.after.scale_D
        )
        assert dxhat_MD is not None
        dmiddle_MD = _norm_gradient(dxhat_MD, xhat_MD, rstd_M1).add_(dy_MD)
        needs_attended, *_ = ctx.needs_input_grad
        dattended_MX, of_out = _project_gradients(
            [dmiddle_MD], attended_MX, low_out, layer.out, None, needs_attended
        )
        return dattended_MX, dmiddle_MD, None, *of_out, *of_gate_up, *of_down


def _parameters(adapted: Sequence[Adapted]) -> list[Tensor]:
    """What autograd has to see: every A and B, in order."""
    return [weight for one in adapted for weight in (one.adapter.a_RK, one.adapter.b_NR)]


# Layers that read one input


def _project(
    x_MK: Tensor, adapted: Sequence[Adapted], scale_K: Tensor | None, onto: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """The output [M, N] of every layer, and S of all for the backward pass. With a scale x is to be
    multiplied by it first. `onto` is what the output of a single layer is added to."""
    merges = _merges(x_MK.dtype)
    downs_RK = _downs(adapted, x_MK.dtype)
    if scale_K is not None and merges:
        downs_RK = downs_RK * scale_K
    elif scale_K is not None:
        x_MK = x_MK * scale_K
    s_MR = product(x_MK, downs_RK)
    found = [product(x_MK, _weight(one, scale_K), one.bias_N, onto) for one in adapted]
    if not merges:
        for y_MN, s, one in zip(found, _ranks(s_MR, adapted), adapted, strict=True):
            y_MN.addmm_(s, one.adapter.b_NR.to(s.dtype).t(), alpha=one.adapter.scaling)
    return found, s_MR


def _project_gradients(
    outputs: Sequence[Tensor],
    x_MK: Tensor,
    s_MR: Tensor,
    adapted: Sequence[Adapted],
    scale_K: Tensor | None,
    needs_input: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """From the gradients of the outputs [M, N], all contiguous: of x, before its scale, and of every A and B.
    `s_MR` is what `_project` kept."""
    ds_MR = torch.empty_like(s_MR)
    of_b: list[Tensor] = []
    for dy_MN, s, ds, one in zip(
        outputs, _ranks(s_MR, adapted), _ranks(ds_MR, adapted), adapted, strict=True
    ):
        b_NR, scaling = one.adapter.b_NR, one.adapter.scaling
        torch.mul(product(dy_MN, b_NR.to(dy_MN.dtype).t()), scaling, out=ds)
        of_b.append((s.t() @ dy_MN).t().to(b_NR.dtype).mul_(scaling))
    da_RK = ds_MR.t() @ x_MK
    if scale_K is not None:
        da_RK.mul_(scale_K)
    of_a = da_RK.split([len(one.adapter.a_RK) for one in adapted])
    gradients = [
        gradient
        for a_RK, b_NR, one in zip(of_a, of_b, adapted, strict=True)
        for gradient in (a_RK.to(one.adapter.a_RK.dtype), b_NR)
    ]
    if not needs_input:
        return None, gradients
    dx_MK = None
    for dy_MN, one in zip(outputs, adapted, strict=True):
        dx_MK = product(dy_MN, _weight(one, scale_K).t(), None, dx_MK)
    assert dx_MK is not None
    if not _merges(x_MK.dtype):
        dx_MK.addmm_(ds_MR, _downs(adapted, ds_MR.dtype))
        if scale_K is not None:
            dx_MK.mul_(scale_K)
    return dx_MK, gradients


def _merges(dtype: torch.dtype) -> bool:
    """Whether W + scaling B A keeps what the adapter adds."""
    return dtype in (torch.float32, torch.float64)


def _weight(one: Adapted, scale_K: Tensor | None) -> Tensor:
    """What x is multiplied with: a new weight with adapter and scale inside, where those can be merged."""
    dtype = one.weight_NK.dtype
    if not _merges(dtype):
        return one.weight_NK
    a_RK, b_NR = one.adapter.a_RK.to(dtype), one.adapter.b_NR.to(dtype)
    weight_NK = torch.addmm(one.weight_NK, b_NR, a_RK, alpha=one.adapter.scaling)
    return weight_NK if scale_K is None else weight_NK.mul_(scale_K)


def _downs(adapted: Sequence[Adapted], dtype: torch.dtype) -> Tensor:
    """All A on top of each other."""
    parts = [one.adapter.a_RK.to(dtype) for one in adapted]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranks(of_all_MR: Tensor, adapted: Sequence[Adapted]) -> tuple[Tensor, ...]:
    return of_all_MR.split([len(one.adapter.a_RK) for one in adapted], dim=1)


# Norms and rotation


def _exact(x: Tensor) -> Tensor:
    """In the type that means are taken in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) over the last dimension, and 1 / rms(x)."""
    exact = _exact(x)
    square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_()
    rstd = square.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (exact * rstd).to(x.dtype), rstd


def _norm_gradient(dxhat: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    """Of x where xhat = x / rms(x). May overwrite `dxhat`."""
    gradient, exact = _exact(dxhat), _exact(xhat)
    mean = (gradient * exact).mean(-1, keepdim=True)
    return gradient.addcmul_(exact, mean, value=-1).mul_(rstd).to(dxhat.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin, in transformers' order of a head: its halves are the pairs. `back` is the
    transpose of that."""
    half = x.shape[-1] // 2
    first, second = sin[..., :half], sin[..., half:]
    if back:
        first, second = -second, -first
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], first, value=-1)
    turned[..., half:].addcmul_(x[..., :half], second)
    return turned
