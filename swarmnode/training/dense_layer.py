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
        ctx.qkv = _Products.of(layer.qkv, layer.before.scale_D, hidden_MD.dtype)
        found, low_MR = ctx.qkv.outputs(xhat_MD)
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
        dxhat_MD, of_adapters = ctx.qkv.gradients(outputs, xhat_MD, low_MR, needs_hidden)
        dhidden = None if dxhat_MD is None else _norm_gradient(dxhat_MD, xhat_MD, rstd_M1)
        return dhidden, None, None, None, *of_adapters


class _OutOfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attended_MX: Tensor, hidden_MD: Tensor, layer: DenseLayer, *parameters: Tensor
    ) -> Tensor:
        ctx.out = _Products.of(layer.out, None, hidden_MD.dtype)
        ctx.gate_up = _Products.of(layer.gate_up, layer.after.scale_D, hidden_MD.dtype)
        ctx.down = _Products.of(layer.down, None, hidden_MD.dtype)
        (middle_MD,), low_out = ctx.out.outputs(attended_MX, onto=hidden_MD)
        xhat_MD, rstd_M1 = _normalised(middle_MD, layer.after.eps)
        (gate_MI, up_MI), low_gate_up = ctx.gate_up.outputs(xhat_MD)
        (y_MD,), low_down = ctx.down.outputs(F.silu(gate_MI).mul_(up_MI), onto=middle_MD)
        lows = (low_out, low_gate_up, low_down)
        ctx.save_for_backward(attended_MX, xhat_MD, rstd_M1, gate_MI, up_MI, *lows, *parameters)
        return y_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        attended_MX, xhat_MD, rstd_M1, gate_MI, up_MI, *lows = ctx.saved_tensors
        low_out, low_gate_up, low_down, *_ = lows
        dy_MD = dy_MD.contiguous()
        silu_MI = F.silu(gate_MI)
        active_MI = silu_MI * up_MI
        dactive_MI, of_down = ctx.down.gradients([dy_MD], active_MI, low_down)
        dup_MI = silu_MI.mul_(dactive_MI)
        dsilu_MI, dgate_MI = dactive_MI.mul_(up_MI), active_MI
        torch.ops.aten.silu_backward.grad_input(dsilu_MI, gate_MI, grad_input=dgate_MI)
        dxhat_MD, of_gate_up = ctx.gate_up.gradients([dgate_MI, dup_MI], xhat_MD, low_gate_up)
        dmiddle_MD = _norm_gradient(dxhat_MD, xhat_MD, rstd_M1).add_(dy_MD)
        needs_attended, *_ = ctx.needs_input_grad
        dattended_MX, of_out = ctx.out.gradients([dmiddle_MD], attended_MX, low_out, needs_attended)
        return dattended_MX, dmiddle_MD, None, *of_out, *of_gate_up, *of_down


def _parameters(adapted: Sequence[Adapted]) -> list[Tensor]:
    """What autograd has to see: every A and B, in order."""
    return [weight for one in adapted for weight in (one.adapter.a_RK, one.adapter.b_NR)]


# Layers that read one input


@dataclass(frozen=True, slots=True)
class _Products:
    """The products of layers that read one input, as one call of the layer needs them twice."""

    adapted: Sequence[Adapted]
    scale_K: Tensor | None
    """What x is to be multiplied by first."""
    a_RK: Tensor
    """All A on top of each other, in the type of x."""
    scaled_b_NR: tuple[Tensor, ...]
    """scaling B of each, in the type of x."""

    @classmethod
    def of(cls, adapted: Sequence[Adapted], scale_K: Tensor | None, dtype: torch.dtype) -> "_Products":
        downs = [one.adapter.a_RK for one in adapted]
        a_RK = downs[0] if len(downs) == 1 else torch.cat(downs)
        scaled = (one.adapter.b_NR * one.adapter.scaling for one in adapted)
        return cls(adapted, scale_K, a_RK.to(dtype), tuple(b_NR.to(dtype) for b_NR in scaled))

    def outputs(self, x_MK: Tensor, onto: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """[M, N] of every layer, and S of all for the backward pass. `onto` is what the output of a single
        layer is added to."""
        a_RK = self.a_RK
        if self.scale_K is not None and self._merges:
            a_RK = a_RK * self.scale_K
        elif self.scale_K is not None:
            x_MK = x_MK * self.scale_K
        s_MR = product(x_MK, a_RK)
        found = [product(x_MK, self._weight(n), one.bias_N, onto) for n, one in enumerate(self.adapted)]
        if not self._merges:
            for y_MN, s, b_NR in zip(found, self._ranks(s_MR), self.scaled_b_NR, strict=True):
                y_MN.addmm_(s, b_NR.t())
        return found, s_MR

    def gradients(
        self, outputs: Sequence[Tensor], x_MK: Tensor, s_MR: Tensor, needs_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From the gradients of the outputs [M, N], all contiguous: of x, before its scale, and of every A
        and B in order."""
        parts = [product(dy, b_NR.t()) for dy, b_NR in zip(outputs, self.scaled_b_NR, strict=True)]
        ds_MR = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        da_RK = (ds_MR.t() @ x_MK).to(self.adapted[0].adapter.a_RK.dtype)
        if self.scale_K is not None:
            da_RK.mul_(self.scale_K)
        gradients: list[Tensor] = []
        of_a = da_RK.split([len(one.adapter.a_RK) for one in self.adapted])
        for dy_MN, s, da, one in zip(outputs, self._ranks(s_MR), of_a, self.adapted, strict=True):
            db_NR = (s.t() @ dy_MN).t().to(one.adapter.b_NR.dtype)
            gradients += da, db_NR.mul_(one.adapter.scaling)
        return self._input_gradient(outputs, ds_MR) if needs_input else None, gradients

    def _input_gradient(self, outputs: Sequence[Tensor], ds_MR: Tensor) -> Tensor:
        first, *others = outputs
        dx_MK = product(first, self._weight(0).t())
        for number, dy_MN in enumerate(others, 1):
            dx_MK = product(dy_MN, self._weight(number).t(), None, dx_MK)
        if not self._merges:
            dx_MK.addmm_(ds_MR, self.a_RK)
            if self.scale_K is not None:
                dx_MK.mul_(self.scale_K)
        return dx_MK

    @property
    def _merges(self) -> bool:
        """Whether W + scaling B A keeps what the adapter adds."""
        return self.a_RK.dtype in (torch.float32, torch.float64)

    def _weight(self, number: int) -> Tensor:
        """What x is multiplied with: a new weight with adapter and scale inside, where they can be merged."""
        one = self.adapted[number]
        if not self._merges:
            return one.weight_NK
        a_RK = one.adapter.a_RK.to(one.weight_NK.dtype)
        weight_NK = torch.addmm(one.weight_NK, self.scaled_b_NR[number], a_RK)
        return weight_NK if self.scale_K is None else weight_NK.mul_(self.scale_K)

    def _ranks(self, of_all_MR: Tensor) -> tuple[Tensor, ...]:
        return of_all_MR.split([len(one.adapter.a_RK) for one in self.adapted], dim=1)


# Norms and rotation


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) over the last dimension, and 1 / rms(x), in float32 at least."""
    return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)


def _norm_gradient(dxhat: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    """Of x where xhat = x / rms(x). May overwrite `dxhat`."""
    mean = (dxhat * xhat).sum(-1, keepdim=True, dtype=rstd.dtype).div_(dxhat.shape[-1])
    # Of one type: with two, torch takes several times as long.
    return dxhat.addcmul_(xhat, mean.to(xhat.dtype), value=-1).mul_(rstd.to(xhat.dtype))


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
