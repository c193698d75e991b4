"""Passes over tokens, on tensors: each reads and writes memory once where torch does so several times.

tensors.py -> [passes] <- model/token_passes.py, rollout/decode/

Only for tensors that `fits`. Shapes: M tokens, D numbers, H heads, E head size.
"""

import torch
from torch import Tensor

from swarmnode.native.tensors import expect, expect_rows, kernel


def rms_norm(x_MD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    x_MD = x_MD.contiguous()
    y_MD = torch.empty_like(x_MD)
    _rms_norm(x_MD, scale_D, eps, y_MD=y_MD)
    return y_MD


def rms_norm_kept(x_MD: Tensor, scale_D: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """xhat = x / sqrt(mean(x^2) + eps), 1 / sqrt(...) in float32 [..., 1], and xhat times the scale (xhat
    itself without one)."""
    x_MD = x_MD.contiguous()
    xhat_MD = torch.empty_like(x_MD)
    y_MD = None if scale_D is None else torch.empty_like(x_MD)
    rstd_M1 = x_MD.new_empty((*x_MD.shape[:-1], 1), dtype=torch.float32)
    _rms_norm(x_MD, scale_D, eps, xhat_MD, y_MD, rstd_M1)
    return xhat_MD, rstd_M1, xhat_MD if y_MD is None else y_MD


def rms_norm_gradient(
    dy_MD: Tensor, xhat_MD: Tensor, rstd_M1: Tensor, scale_D: Tensor | None, more_MD: Tensor | None = None
) -> Tensor:
    """The gradient of x from that of y = xhat scale; plus `more`."""
    shape, width = tuple(dy_MD.shape), dy_MD.shape[-1]
    dy_MD = dy_MD.contiguous()
    more_MD = None if more_MD is None else more_MD.contiguous()
    expect(xhat_MD, shape, dy_MD.dtype)
    expect(rstd_M1, (*shape[:-1], 1), torch.float32)
    if more_MD is not None:
        expect(more_MD, shape, dy_MD.dtype)
    dx_MD = torch.empty_like(dy_MD)
    scale_D = _exact(scale_D, width)
    kernel("rms_norm_gradient", dy_MD.dtype)(
        dy_MD.data_ptr(), xhat_MD.data_ptr(), rstd_M1.data_ptr(), _address(scale_D), _address(more_MD),
        dx_MD.data_ptr(), dy_MD.numel() // width, width,
    )  # fmt: skip
    return dx_MD


def silu_mul(gate_MD: Tensor, up_MD: Tensor) -> Tensor:
    """silu(gate) * up, contiguous. Both [M, D] with the same strides, rows contiguous."""
    return _gate("silu_mul", gate_MD, up_MD)


def gelu_tanh_mul(gate_MD: Tensor, up_MD: Tensor) -> Tensor:
    """gelu(gate) * up with the approximation of GELU by a tanh; otherwise as `silu_mul`."""
    return _gate("gelu_tanh_mul", gate_MD, up_MD)


def silu_mul_gradient(gate_MD: Tensor, up_MD: Tensor, dactive_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, and the gradients of gate and up; all contiguous. The memory of `dactive` becomes that
    of the last."""
    for tensor in (gate_MD, up_MD, dactive_MD):
        expect(tensor, tuple(gate_MD.shape), gate_MD.dtype)
    active_MD, dgate_MD = torch.empty_like(gate_MD), torch.empty_like(gate_MD)
    kernel("silu_mul_gradient", gate_MD.dtype)(
        gate_MD.data_ptr(), up_MD.data_ptr(), dactive_MD.data_ptr(), active_MD.data_ptr(),
        dgate_MD.data_ptr(), dactive_MD.data_ptr(), gate_MD.numel(),
    )  # fmt: skip
    return active_MD, dgate_MD, dactive_MD


def rotate_heads(x_MHE: Tensor, scale_E: Tensor | None, eps: float, cos_ME: Tensor, sin_ME: Tensor) -> Tensor:
    """Each head normed, where there is a scale, and rotated, in transformers' order of dimensions. The heads
    of a token lie together."""
    tokens, heads, size = _check_heads(x_MHE, cos_ME, sin_ME)
    y_MHE = x_MHE.new_empty(tokens, heads, size)
    scale_E = _exact(scale_E, size)
    kernel("rotate_heads", x_MHE.dtype)(
        x_MHE.data_ptr(), x_MHE.stride(0), _address(scale_E), eps, cos_ME.data_ptr(), sin_ME.data_ptr(),
        y_MHE.data_ptr(), tokens, heads, size,
    )  # fmt: skip
    return y_MHE


def rotate_heads_gradient(
    dy_MHE: Tensor, x_MHE: Tensor | None, scale_E: Tensor | None, eps: float, cos_ME: Tensor, sin_ME: Tensor
) -> Tensor:
    """The gradient of x, contiguous. x may be None where there is no scale."""
    dy_MHE = dy_MHE.contiguous()
    tokens, heads, size = _check_heads(dy_MHE, cos_ME, sin_ME)
    if x_MHE is None or scale_E is None:
        x_MHE = dy_MHE  # Some memory: what is read there counts zero times.
    expect_rows(x_MHE, (tokens, heads, size), dy_MHE.dtype)
    dx_MHE = torch.empty_like(dy_MHE)
    scale_E = _exact(scale_E, size)
    kernel("rotate_heads_gradient", x_MHE.dtype)(
        dy_MHE.data_ptr(), x_MHE.data_ptr(), x_MHE.stride(0), _address(scale_E), eps, cos_ME.data_ptr(),
        sin_ME.data_ptr(), dx_MHE.data_ptr(), tokens, heads, size,
    )  # fmt: skip
    return dx_MHE


def _gate(name: str, gate_MD: Tensor, up_MD: Tensor) -> Tensor:
    """The gate that the kernel of this name computes."""
    rows, width = gate_MD.shape
    for tensor in (gate_MD, up_MD):
        expect_rows(tensor, (rows, width), gate_MD.dtype)
    stride = gate_MD.stride(0)
    if rows > 1 and up_MD.stride(0) != stride:
        raise ValueError(f"rows of gate lie {stride} apart, those of up {up_MD.stride(0)}")
    active_MD = gate_MD.new_empty(rows, width)
    kernel(name, gate_MD.dtype)(
        gate_MD.data_ptr(), up_MD.data_ptr(), stride, active_MD.data_ptr(), rows, width
    )
    return active_MD


def _rms_norm(
    x_MD: Tensor,
    scale_D: Tensor | None,
    eps: float,
    xhat_MD: Tensor | None = None,
    y_MD: Tensor | None = None,
    rstd_M1: Tensor | None = None,
) -> None:
    width = x_MD.shape[-1]
    scale_D = _exact(scale_D, width)
    kernel("rms_norm", x_MD.dtype)(
        x_MD.data_ptr(), _address(scale_D), eps, _address(xhat_MD), _address(y_MD), _address(rstd_M1),
        x_MD.numel() // width, width,
    )  # fmt: skip


def _check_heads(x_MHE: Tensor, cos_ME: Tensor, sin_ME: Tensor) -> tuple[int, int, int]:
    tokens, heads, size = x_MHE.shape
    if size % 2:
        raise ValueError(f"heads of {size} dimensions have no pairs to rotate")
    expect_rows(x_MHE, (tokens, heads, size))
    for turn in (cos_ME, sin_ME):
        expect(turn, (tokens, size), x_MHE.dtype)
    return tokens, heads, size


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _exact(scale_D: Tensor | None, width: int) -> Tensor | None:
    """The scale in float32, as the kernels take it."""
    if scale_D is None:
        return None
    scale_D = scale_D.detach().float().contiguous()
    expect(scale_D, (width,), torch.float32)
    return scale_D
