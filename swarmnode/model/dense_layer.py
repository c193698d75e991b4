"""A decoder layer of Llama or a similar family with one LoRA: two autograd functions around its attention.

dense_patch.py (where, and with which weights) -> [dense_layer] -> cpu_kernels.py, or torch
                                                        |
   hidden -> into_attention -> queries, keys, values -> attention.py -> out_of_attention -> hidden

The base is frozen, so a backward pass only needs gradients for the adapter and the layer's input, and
everything between can be chosen to make few passes over few numbers. Layers that read the same input are one
product. In float32 and float64 that product includes the adapter, W + scaling B A, and the scale of the norm
before it, as it would after merging: the low-rank terms then cost nothing per token. In bfloat16 such a sum
would round the adapter away, so there they are added to the product.

    norm                xhat = h / rms(h)          y = xhat W'^T,  W' = (W + scaling B A) diag(norm)
    its gradient        dh = (dxhat - xhat mean(dxhat xhat)) / rms(h)
    LoRA, S = x A^T     dA = scaling (dy B)^T x    dB = scaling dy^T S

Kept for the backward pass are xhat, gate and up, S, and queries and keys if they are normed. The rest is
recomputed, including W': it would be a copy of the layer's weights, and costs as much as R more tokens would.
Per-token work between products (norms, rotation, the gate) is one pass of a kernel in float32 and bfloat16 on
a CPU (cpu_kernels.py), and torch's operations elsewhere.

Shapes: M tokens, D hidden size, K features in, N out, I width of the MLP, H query heads, G key heads, E head
size, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarmnode.cpu_kernels import kernels
from swarmnode.model.adapters.lora import LoraWeights


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * scale."""

    scale_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Adapted:
    """A frozen linear layer with its adapter."""

    weight_NK: Tensor
    bias_N: Tensor | None
    adapter: LoraWeights


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The operands of one call of a layer."""

    head_dim: int
    before: Norm
    qkv: tuple[Adapted, ...]
    head_norms: tuple[Norm | None, Norm | None]
    """Norms over each query and over each key, if the family has them (Qwen3)."""
    out: tuple[Adapted]
    after: Norm
    gate_up: tuple[Adapted, ...]
    down: tuple[Adapted]


def into_attention(
    hidden_MD: Tensor, cos_ME: Tensor, sin_ME: Tensor, layer: DenseLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes norm, projections and rotation. Returns queries [M, H, E], keys and values [M, G, E]."""
    found = _IntoAttention.apply(hidden_MD, cos_ME, sin_ME, layer, *_parameters(layer.qkv))
    return cast(tuple[Tensor, Tensor, Tensor], found)


def out_of_attention(attended_MX: Tensor, hidden_MD: Tensor, layer: DenseLayer) -> Tensor:
    """Computes the rest of the layer: attended heads [M, H * E] and the layer's input -> its output, [M,
    D]."""
    adapted = (*layer.out, *layer.gate_up, *layer.down)
    return cast(Tensor, _OutOfAttention.apply(attended_MX, hidden_MD, layer, *_parameters(adapted)))


class _IntoAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, cos_ME: Tensor, sin_ME: Tensor, layer: DenseLayer, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.qkv = _Products.of(layer.qkv, layer.before.scale_D, hidden_MD.dtype)
        before = normed(hidden_MD, layer.before, scaled=not ctx.qkv.merges)
        found, low_MR = ctx.qkv.outputs(before.y_MD)
        queries_keys_values = [y_MN.unflatten(1, (-1, layer.head_dim)) for y_MN in found]
        of_heads: list[Tensor] = []
        for number, norm in enumerate(layer.head_norms):
            turned, kept = turned_heads(queries_keys_values[number], norm, Rotation(cos_ME, sin_ME))
            queries_keys_values[number] = turned
            of_heads += kept
        ctx.kept_of_a_head = len(of_heads) // 2
        ctx.save_for_backward(before.xhat_MD, before.rstd_M1, cos_ME, sin_ME, low_MR, *of_heads, *parameters)
        return tuple(queries_keys_values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: DenseLayer = ctx.layer
        products: _Products = ctx.qkv
        xhat_MD, rstd_M1, cos_ME, sin_ME, low_MR, *of_heads = ctx.saved_tensors
        turned = list(gradients)
        for number, norm in enumerate(layer.head_norms):
            kept = of_heads[number * ctx.kept_of_a_head : (number + 1) * ctx.kept_of_a_head]
            rotation = Rotation(cos_ME, sin_ME)
            turned[number] = turned_heads_gradient(gradients[number], kept, norm, rotation)
        outputs = [gradient.flatten(1).contiguous() for gradient in turned]
        low_gradient_MR = products.low_gradient(outputs)
        of_adapters = products.adapter_gradients(outputs, low_gradient_MR, xhat_MD, low_MR)
        needs_hidden, *_ = ctx.needs_input_grad
        if not needs_hidden:
            return None, None, None, None, *of_adapters
        dy_MD = products.input_gradient(outputs, low_gradient_MR)
        dhidden_MD = norm_gradient(dy_MD, xhat_MD, rstd_M1, products.scale_before)
        return dhidden_MD, None, None, None, *of_adapters


class _OutOfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attended_MX: Tensor, hidden_MD: Tensor, layer: DenseLayer, *parameters: Tensor
    ) -> Tensor:
        ctx.out = _Products.of(layer.out, None, hidden_MD.dtype)
        ctx.gate_up = _Products.of(layer.gate_up, layer.after.scale_D, hidden_MD.dtype)
        ctx.down = _Products.of(layer.down, None, hidden_MD.dtype)
        (middle_MD,), low_out = ctx.out.outputs(attended_MX, onto=hidden_MD)
        after = normed(middle_MD, layer.after, scaled=not ctx.gate_up.merges)
        (gate_MI, up_MI), low_gate_up = ctx.gate_up.outputs(after.y_MD)
        (y_MD,), low_down = ctx.down.outputs(gated(gate_MI, up_MI), onto=middle_MD)
        lows = (low_out, low_gate_up, low_down)
        ctx.save_for_backward(attended_MX, after.xhat_MD, after.rstd_M1, gate_MI, up_MI, *lows, *parameters)
        return y_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        attended_MX, xhat_MD, rstd_M1, gate_MI, up_MI, *lows = ctx.saved_tensors
        low_out, low_gate_up, low_down, *_ = lows
        out: _Products = ctx.out
        gate_up: _Products = ctx.gate_up
        down: _Products = ctx.down
        down_gradient = [dy_MD.contiguous()]
        dlow_MR = down.low_gradient(down_gradient)
        active_MI, dgate_MI, dup_MI = gated_gradient(
            gate_MI, up_MI, down.input_gradient(down_gradient, dlow_MR)
        )
        of_down = down.adapter_gradients(down_gradient, dlow_MR, active_MI, low_down)
        both = [dgate_MI, dup_MI]
        dlow_MR = gate_up.low_gradient(both)
        of_gate_up = gate_up.adapter_gradients(both, dlow_MR, xhat_MD, low_gate_up)
        dnormed_MD = gate_up.input_gradient(both, dlow_MR)
        dmiddle_MD = norm_gradient(dnormed_MD, xhat_MD, rstd_M1, gate_up.scale_before, down_gradient[0])
        dlow_MR = out.low_gradient([dmiddle_MD])
        of_out = out.adapter_gradients([dmiddle_MD], dlow_MR, attended_MX, low_out)
        needs_attended, *_ = ctx.needs_input_grad
        dattended_MX = out.input_gradient([dmiddle_MD], dlow_MR) if needs_attended else None
        return dattended_MX, dmiddle_MD, None, *of_out, *of_gate_up, *of_down


def _parameters(adapted: Sequence[Adapted]) -> list[Tensor]:
    """Returns every A and B in order, for autograd to see."""
    return [weight for one in adapted for weight in (one.adapter.a_RK, one.adapter.b_NR)]


# ---- products of layers that share an input ----

ONEDNN_FROM = 2**24
"""Number of multiplications from which oneDNN is used: it needs half a millisecond of preparation for each
new number of tokens."""


def product(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, onto_MN: Tensor | None = None
) -> Tensor:
    """Returns x W^T (+ bias) (+ onto); the weight may be a transposed view. oneDNN multiplies float32 with
    AVX-512 where torch's default (MKL) does not on AMD: 5 to 40 % less time on an EPYC."""
    large = x_MK.numel() * len(weight_NK) >= ONEDNN_FROM
    if large and x_MK.dtype is torch.float32 and x_MK.is_cpu and torch.backends.mkldnn.is_available():
        multiply = torch.ops.mkldnn._linear_pointwise
        if onto_MN is not None:
            return multiply.binary(x_MK.contiguous(), onto_MN.contiguous(), weight_NK, bias_N, "add")
        return multiply(x_MK.contiguous(), weight_NK, bias_N, "none", [], "")
    if onto_MN is not None and bias_N is None:
        return torch.addmm(onto_MN, x_MK, weight_NK.t())
    y_MN = F.linear(x_MK, weight_NK, bias_N)
    return y_MN if onto_MN is None else y_MN.add_(onto_MN)


@dataclass(frozen=True, slots=True)
class _Products:
    """The products of layers that share an input; one call of a layer needs them twice."""

    adapted: Sequence[Adapted]
    scale_K: Tensor | None
    """Scale by which x is multiplied first."""
    a_RK: Tensor
    """All A stacked, in the type of x."""
    scaled_b_NR: tuple[Tensor, ...]
    """scaling * B of each layer, in the type of x."""

    @classmethod
    def of(cls, adapted: Sequence[Adapted], scale_K: Tensor | None, dtype: torch.dtype) -> "_Products":
        downs = [one.adapter.a_RK for one in adapted]
        a_RK = downs[0] if len(downs) == 1 else torch.cat(downs)
        scaled = (one.adapter.b_NR * one.adapter.scaling for one in adapted)
        return cls(adapted, scale_K, a_RK.to(dtype), tuple(b_NR.to(dtype) for b_NR in scaled))

    @property
    def merges(self) -> bool:
        """True if W + scaling B A preserves the adapter's contribution. Then the merged weights include the
        scale of x, too."""
        return self.a_RK.dtype in (torch.float32, torch.float64)

    @property
    def scale_before(self) -> Tensor | None:
        """Scale by which the caller has to multiply x. None: there is none, or the weights include it."""
        return None if self.merges else self.scale_K

    def outputs(self, x_MK: Tensor, onto: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Returns [M, N] of every layer, and S of all layers for the backward pass. `onto` is added to the
        output of a single layer."""
        a_RK = self.a_RK if self.scale_K is None or not self.merges else self.a_RK * self.scale_K
        s_MR = product(x_MK, a_RK)
        found = [product(x_MK, self._weight(n), one.bias_N, onto) for n, one in enumerate(self.adapted)]
        if not self.merges:
            for y_MN, s, b_NR in zip(found, self._ranks(s_MR), self.scaled_b_NR, strict=True):
                y_MN.addmm_(s, b_NR.t())
        return found, s_MR

    def low_gradient(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns scaling dy B of all layers, [M, R]. Gradients of the outputs [M, N] must be contiguous,
        here and below."""
        parts = [product(dy, b_NR.t()) for dy, b_NR in zip(outputs, self.scaled_b_NR, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def adapter_gradients(
        self, outputs: Sequence[Tensor], ds_MR: Tensor, x_MK: Tensor, s_MR: Tensor
    ) -> list[Tensor]:
        """Returns the gradients of every A and B in order; `x_MK` is x before its scale."""
        da_RK = (ds_MR.t() @ x_MK).to(self.adapted[0].adapter.a_RK.dtype)
        if self.scale_K is not None:
            da_RK.mul_(self.scale_K)
        gradients: list[Tensor] = []
        of_a = da_RK.split([len(one.adapter.a_RK) for one in self.adapted])
        for dy_MN, s, da, one in zip(outputs, self._ranks(s_MR), of_a, self.adapted, strict=True):
            db_NR = (s.t() @ dy_MN).t().to(one.adapter.b_NR.dtype)
            gradients += da, db_NR.mul_(one.adapter.scaling)
        return gradients

    def input_gradient(self, outputs: Sequence[Tensor], ds_MR: Tensor) -> Tensor:
        """Returns the gradient of x as `outputs` got it, i.e. before the scale if the weights include it."""
        first, *others = outputs
        dx_MK = product(first, self._weight(0).t())
        for number, dy_MN in enumerate(others, 1):
            if self.merges:
                dx_MK = product(dy_MN, self._weight(number).t(), None, dx_MK)
            else:
                dx_MK.addmm_(dy_MN, self._weight(number))
        return dx_MK if self.merges else dx_MK.addmm_(ds_MR, self.a_RK)

    def _weight(self, number: int) -> Tensor:
        """Returns the factor of x: a new weight with adapter and scale merged into it, if they can be
        merged."""
        one = self.adapted[number]
        if not self.merges:
            return one.weight_NK
        a_RK = one.adapter.a_RK.to(one.weight_NK.dtype)
        weight_NK = torch.addmm(one.weight_NK, self.scaled_b_NR[number], a_RK)
        return weight_NK if self.scale_K is None else weight_NK.mul_(self.scale_K)

    def _ranks(self, of_all_MR: Tensor) -> tuple[Tensor, ...]:
        return of_all_MR.split([len(one.adapter.a_RK) for one in self.adapted], dim=1)


# ---- between the products, token by token: norms, the gate, rotation ----


@dataclass(frozen=True, slots=True)
class Normed:
    """The result of a norm, with the values that its gradient needs."""

    xhat_MD: Tensor
    """x / rms(x), before the scale."""
    rstd_M1: Tensor
    """1 / rms(x), in float32 at least."""
    y_MD: Tensor
    """xhat times the scale, or xhat itself without one."""


def normed(x_MD: Tensor, norm: Norm, *, scaled: bool) -> Normed:
    """Returns the norm over the last dimension, which may be that of heads. `scaled`: False omits the scale,
    for a caller whose weights include it."""
    scale_D = norm.scale_D if scaled else None
    if kernels().fits(x_MD):
        return Normed(*kernels().rms_norm_kept(x_MD, scale_D, norm.eps))
    xhat_MD, rstd_M1 = torch.ops.aten._fused_rms_norm(x_MD, x_MD.shape[-1:], None, norm.eps)
    return Normed(xhat_MD, rstd_M1, xhat_MD if scale_D is None else xhat_MD * scale_D)


def norm_gradient(
    dy_MD: Tensor, xhat_MD: Tensor, rstd_M1: Tensor, scale_D: Tensor | None, more_MD: Tensor | None = None
) -> Tensor:
    """Returns the gradient of x from that of y = xhat scale (of xhat without a scale), plus `more`. May
    overwrite `dy`."""
    if kernels().fits(dy_MD):
        return kernels().rms_norm_gradient(dy_MD, xhat_MD, rstd_M1, scale_D, more_MD)
    dxhat_MD = dy_MD if scale_D is None else dy_MD.mul_(scale_D)
    mean = (dxhat_MD * xhat_MD).sum(-1, keepdim=True, dtype=rstd_M1.dtype).div_(dxhat_MD.shape[-1])
    # In one type: with two, torch takes several times as long.
    dx_MD = dxhat_MD.addcmul_(xhat_MD, mean.to(xhat_MD.dtype), value=-1).mul_(rstd_M1.to(xhat_MD.dtype))
    return dx_MD if more_MD is None else dx_MD.add_(more_MD)


def gated(gate_MI: Tensor, up_MI: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    if kernels().fits(gate_MI):
        return kernels().silu_mul(gate_MI, up_MI)
    return F.silu(gate_MI).mul_(up_MI)


def gated_gradient(gate_MI: Tensor, up_MI: Tensor, dactive_MI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns silu(gate) * up, recomputed, and the gradients of gate and up. May overwrite `dactive`."""
    if kernels().fits(gate_MI):
        return kernels().silu_mul_gradient(gate_MI, up_MI, dactive_MI)
    silu_MI = F.silu(gate_MI)
    active_MI = silu_MI * up_MI
    dup_MI = silu_MI.mul_(dactive_MI)
    return active_MI, torch.ops.aten.silu_backward(dactive_MI.mul_(up_MI), gate_MI), dup_MI


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines by which each token's heads are rotated: [M, E] each, in transformers' order of
    dimensions, where the halves of a head form the pairs."""

    cos_ME: Tensor
    sin_ME: Tensor


def turned_heads(x_MHE: Tensor, norm: Norm | None, rotation: Rotation) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns each head normed, if there is a norm, and rotated, with the values that the gradient needs."""
    if kernels().fits(x_MHE):
        turned = kernels().rotate_heads(x_MHE, *_scale_of(norm), rotation.cos_ME, rotation.sin_ME)
        return turned, () if norm is None else (x_MHE,)
    cos, sin = rotation.cos_ME[:, None], rotation.sin_ME[:, None]
    if norm is None:
        return _rotated(x_MHE, cos, sin), ()
    found = normed(x_MHE, norm, scaled=True)
    return _rotated(found.y_MD, cos, sin), (found.xhat_MD, found.rstd_M1)


def turned_heads_gradient(
    dy_MHE: Tensor, kept: Sequence[Tensor], norm: Norm | None, rotation: Rotation
) -> Tensor:
    """Returns the gradient of x, contiguous. `kept`: the values that `turned_heads` returned for it."""
    by_kernel = len(kept) == 1 if norm is not None else kernels().fits(dy_MHE)
    if by_kernel:
        x_MHE = kept[0] if kept else None
        return kernels().rotate_heads_gradient(
            dy_MHE, x_MHE, *_scale_of(norm), rotation.cos_ME, rotation.sin_ME
        )
    cos, sin = rotation.cos_ME[:, None], rotation.sin_ME[:, None]
    dnormed_MHE = _rotated(dy_MHE, cos, sin, back=True)
    if norm is None:
        return dnormed_MHE.contiguous()
    xhat_MHE, rstd_MH1 = kept
    return norm_gradient(dnormed_MHE, xhat_MHE, rstd_MH1, norm.scale_D).contiguous()


def _scale_of(norm: Norm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.scale_D, norm.eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Returns x cos + rotate_half(x) sin, or its transpose if `back`."""
    half = x.shape[-1] // 2
    first, second = sin[..., :half], sin[..., half:]
    if back:
        first, second = -second, -first
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], first, value=-1)
    turned[..., half:].addcmul_(x[..., :half], second)
    return turned
