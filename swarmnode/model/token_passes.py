"""What a dense layer does to each token between its products, and the gradients: norms, rotation, the gate.

dense_layer.py -> [token_passes] -> native/passes.py (float32 and bfloat16 on a CPU), or torch

Shapes: M tokens, D hidden size, H heads, E head size, I width of the MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.native import passes
from swarmnode.native.tensors import fits


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * scale."""

    scale_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Normed:
    """What a norm gives, and what its gradient needs."""

    xhat_MD: Tensor
    """x / rms(x), before the scale."""
    rstd_M1: Tensor
    """1 / rms(x), in float32 at least."""
    y_MD: Tensor
    """xhat times the scale; xhat itself where the scale was left out."""


def normed(x_MD: Tensor, norm: Norm, *, scaled: bool) -> Normed:
    """The norm over the last dimension, which may be that of heads. `scaled` False: whoever multiplies by the
    result has the scale in its weights."""
    scale_D = norm.scale_D if scaled else None
    if fits(x_MD):
        return Normed(*passes.rms_norm_kept(x_MD, scale_D, norm.eps))
    xhat_MD, rstd_M1 = torch.ops.aten._fused_rms_norm(x_MD, x_MD.shape[-1:], None, norm.eps)
    return Normed(xhat_MD, rstd_M1, xhat_MD if scale_D is None else xhat_MD * scale_D)


def norm_gradient(
    dy_MD: Tensor, xhat_MD: Tensor, rstd_M1: Tensor, scale_D: Tensor | None, more_MD: Tensor | None = None
) -> Tensor:
    """The gradient of x from that of y = xhat scale (of xhat without a scale), plus `more`. May overwrite
    `dy`."""
    if fits(dy_MD):
        return passes.rms_norm_gradient(dy_MD, xhat_MD, rstd_M1, scale_D, more_MD)
    dxhat_MD = dy_MD if scale_D is None else dy_MD.mul_(scale_D)
    mean = (dxhat_MD * xhat_MD).sum(-1, keepdim=True, dtype=rstd_M1.dtype).div_(dxhat_MD.shape[-1])
    # Of one type: with two, torch takes several times as long.
    dx_MD = dxhat_MD.addcmul_(xhat_MD, mean.to(xhat_MD.dtype), value=-1).mul_(rstd_M1.to(xhat_MD.dtype))
    return dx_MD if more_MD is None else dx_MD.add_(more_MD)


def gated(gate_MI: Tensor, up_MI: Tensor) -> Tensor:
    """silu(gate) * up."""
    if fits(gate_MI):
        return passes.silu_mul(gate_MI, up_MI)
    return F.silu(gate_MI).mul_(up_MI)


def gated_gradient(gate_MI: Tensor, up_MI: Tensor, dactive_MI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients of gate and up. May overwrite `dactive`."""
    if fits(gate_MI):
        return passes.silu_mul_gradient(gate_MI, up_MI, dactive_MI)
    silu_MI = F.silu(gate_MI)
    active_MI = silu_MI * up_MI
    dup_MI = silu_MI.mul_(dactive_MI)
    return active_MI, torch.ops.aten.silu_backward(dactive_MI.mul_(up_MI), gate_MI), dup_MI


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines by which each token's heads are turned: [M, E] each, in transformers' order of
    dimensions, where the halves of a head are the pairs."""

    cos_ME: Tensor
    sin_ME: Tensor


def turned_heads(x_MHE: Tensor, norm: Norm | None, rotation: Rotation) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Each head normed, where there is a norm, and rotated; and what the gradient needs."""
    if fits(x_MHE):
        turned = passes.rotate_heads(x_MHE, *_scale_of(norm), rotation.cos_ME, rotation.sin_ME)
        return turned, () if norm is None else (x_MHE,)
    cos, sin = rotation.cos_ME[:, None], rotation.sin_ME[:, None]
    if norm is None:
        return _rotated(x_MHE, cos, sin), ()
    found = normed(x_MHE, norm, scaled=True)
    return _rotated(found.y_MD, cos, sin), (found.xhat_MD, found.rstd_M1)


def turned_heads_gradient(
    dy_MHE: Tensor, kept: Sequence[Tensor], norm: Norm | None, rotation: Rotation
) -> Tensor:
    """The gradient of x, contiguous; `kept` as `turned_heads` gave it, which says how."""
    by_kernel = len(kept) == 1 if norm is not None else fits(dy_MHE)
    if by_kernel:
        x_MHE = kept[0] if kept else None
        return passes.rotate_heads_gradient(dy_MHE, x_MHE, *_scale_of(norm), rotation.cos_ME, rotation.sin_ME)
    cos, sin = rotation.cos_ME[:, None], rotation.sin_ME[:, None]
    dnormed_MHE = _rotated(dy_MHE, cos, sin, back=True)
    if norm is None:
        return dnormed_MHE.contiguous()
    xhat_MHE, rstd_MH1 = kept
    return norm_gradient(dnormed_MHE, xhat_MHE, rstd_MH1, norm.scale_D).contiguous()


def _scale_of(norm: Norm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.scale_D, norm.eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin. `back` is the transpose of that."""
    half = x.shape[-1] // 2
    first, second = sin[..., :half], sin[..., half:]
    if back:
        first, second = -second, -first
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], first, value=-1)
    turned[..., half:].addcmul_(x[..., :half], second)
    return turned
