"""The kernels on tensors: passes over tokens, and attention inside the sequences of a packed row.

compiler.py -> [passes] -> native_record.py
                  |
                  +-- [kernel] -> decode_kernels.py, for kernels of its own

A pass reads and writes memory once where torch does so several times. All of them take only tensors that
`fits`, and what a kernel gets is checked before its memory is handed over.

Shapes: M tokens, D numbers, H heads, E head size; in a packed row (`PackedLayout`) T tokens, H query heads,
G key heads, R runs, S key slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from swarmnode.cpu_kernels import Sequences, expect
from swarmnode.extensions.native.compiler import library, loaded

KERNEL_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Suffixes of kernel names, as in kernels/kernels.c."""

WIDTH, QUERIES = 32, 4
"""Block sizes of packed attention, the same as in kernels/blocks.h."""


def fits(tensor: Tensor) -> bool:
    """Returns True if there are kernels for tensors like this one. With any other the caller computes without
    them."""
    return tensor.device.type == "cpu" and tensor.dtype in KERNEL_KINDS and library() is not None


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Returns one kernel, for tensors that fit. It takes addresses and numbers as in compiler.SIGNATURES."""
    kernels = loaded()
    assert kernels is not None, "ask `fits` first"
    return getattr(kernels, f"{name}_{KERNEL_KINDS[dtype]}")


def expect_rows(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raises ValueError, as `expect` does, unless each row (all but the first dimension) is plain and rows
    lie a fixed distance apart."""
    expect(tensor[:1] if len(tensor) else tensor, (min(1, shape[0]), *shape[1:]), dtype)
    if len(tensor) != shape[0] or (len(tensor) > 1 and tensor.stride(0) < tensor[0].numel()):
        raise ValueError(f"{tuple(tensor.shape)} strided {tensor.stride()}, not {shape}")


# ---- passes over tokens: norms, gates and the rotation of heads ----


def rms_norm(x_MD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    x_MD = x_MD.contiguous()
    y_MD = torch.empty_like(x_MD)
    _rms_norm(x_MD, scale_D, eps, y_MD=y_MD)
    return y_MD


def rms_norm_kept(x_MD: Tensor, scale_D: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns xhat = x / sqrt(mean(x^2) + eps), 1 / sqrt(...) in float32 [..., 1], and xhat times the scale
    (xhat itself without one)."""
    x_MD = x_MD.contiguous()
    xhat_MD = torch.empty_like(x_MD)
    y_MD = None if scale_D is None else torch.empty_like(x_MD)
    rstd_M1 = x_MD.new_empty((*x_MD.shape[:-1], 1), dtype=torch.float32)
    _rms_norm(x_MD, scale_D, eps, xhat_MD, y_MD, rstd_M1)
    return xhat_MD, rstd_M1, xhat_MD if y_MD is None else y_MD


def rms_norm_gradient(
    dy_MD: Tensor, xhat_MD: Tensor, rstd_M1: Tensor, scale_D: Tensor | None, more_MD: Tensor | None = None
) -> Tensor:
    """Returns the gradient of x from that of y = xhat scale, plus `more`."""
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
    """Returns silu(gate) * up, contiguous. Both are [M, D] with the same strides, rows contiguous."""
    return _gate("silu_mul", gate_MD, up_MD)


def gelu_tanh_mul(gate_MD: Tensor, up_MD: Tensor) -> Tensor:
    """Returns gelu(gate) * up with the approximation of GELU by a tanh; otherwise as `silu_mul`."""
    return _gate("gelu_tanh_mul", gate_MD, up_MD)


def silu_mul_gradient(gate_MD: Tensor, up_MD: Tensor, dactive_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns silu(gate) * up, and the gradients of gate and up; all contiguous. The last one takes the
    memory of `dactive`."""
    for tensor in (gate_MD, up_MD, dactive_MD):
        expect(tensor, tuple(gate_MD.shape), gate_MD.dtype)
    active_MD, dgate_MD = torch.empty_like(gate_MD), torch.empty_like(gate_MD)
    kernel("silu_mul_gradient", gate_MD.dtype)(
        gate_MD.data_ptr(), up_MD.data_ptr(), dactive_MD.data_ptr(), active_MD.data_ptr(),
        dgate_MD.data_ptr(), dactive_MD.data_ptr(), gate_MD.numel(),
    )  # fmt: skip
    return active_MD, dgate_MD, dactive_MD


def rotate_heads(x_MHE: Tensor, scale_E: Tensor | None, eps: float, cos_ME: Tensor, sin_ME: Tensor) -> Tensor:
    """Returns each head normed, if there is a scale, and rotated, in transformers' order of dimensions. The
    heads of a token lie together."""
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
    """Returns the gradient of x, contiguous. x may be None if there is no scale."""
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
    """Returns the gate that the kernel of this name computes."""
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
    """Returns the scale in float32, as the kernels take it."""
    if scale_D is None:
        return None
    scale_D = scale_D.detach().float().contiguous()
    expect(scale_D, (width,), torch.float32)
    return scale_D


# ---- attention inside the sequences of a packed row ----


def packed_attention(
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    sequences: Sequences,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns attention [T, H, E], and the logarithms of the sums that the gradient needs, [T, H] in
    float32."""
    query_THE, key_TGE, value_TGE = map(_by_token, (query_THE, key_TGE, value_TGE))
    tokens, all_heads, size = query_THE.shape
    groups = key_TGE.shape[1]
    _check_packed(query_THE, key_TGE, value_TGE, sequences)
    out_THE = query_THE.new_empty(query_THE.shape)
    sums_TH = query_THE.new_empty(tokens, all_heads, dtype=torch.float32)
    scratch = _scratch(sequences.longest, size, blocks=1, tables=2)
    kernel("packed_attention", query_THE.dtype)(
        *_by_stride(query_THE, key_TGE, value_TGE),
        *_addresses(sequences), window or 0, scale,
        out_THE.data_ptr(), sums_TH.data_ptr(), scratch.data_ptr(),
        len(sequences.query_ends) - 1, groups, all_heads // groups, size, sequences.longest,
    )  # fmt: skip
    return out_THE, sums_TH


def packed_attention_gradient(
    dout_THE: Tensor,
    query_THE: Tensor,
    key_TGE: Tensor,
    value_TGE: Tensor,
    out_THE: Tensor,
    sums_TH: Tensor,
    sequences: Sequences,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values, in their type."""
    query_THE, key_TGE, value_TGE = map(_by_token, (query_THE, key_TGE, value_TGE))
    all_heads, size = query_THE.shape[1:]
    groups = key_TGE.shape[1]
    _check_packed(query_THE, key_TGE, value_TGE, sequences)
    dout_THE = dout_THE.contiguous()
    for tensor in (dout_THE, out_THE):
        expect(tensor, tuple(query_THE.shape), query_THE.dtype)
    expect(sums_TH, tuple(query_THE.shape[:2]), torch.float32)
    dquery_THE = query_THE.new_empty(query_THE.shape)
    dkey_TGE, dvalue_TGE = (key_TGE.new_zeros(key_TGE.shape, dtype=torch.float32) for _ in range(2))
    scratch = _scratch(sequences.longest, size, blocks=2, tables=5)
    kernel("packed_attention_gradient", query_THE.dtype)(
        dout_THE.data_ptr(),
        *_by_stride(query_THE, key_TGE, value_TGE),
        out_THE.data_ptr(), sums_TH.data_ptr(), *_addresses(sequences), window or 0, scale,
        dquery_THE.data_ptr(), dkey_TGE.data_ptr(), dvalue_TGE.data_ptr(), scratch.data_ptr(),
        len(sequences.query_ends) - 1, groups, all_heads // groups, size, sequences.longest,
    )  # fmt: skip
    return dquery_THE, dkey_TGE.to(key_TGE.dtype), dvalue_TGE.to(value_TGE.dtype)


def _check_packed(query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, sequences: Sequences) -> None:
    tokens, all_heads, size = query_THE.shape
    groups = key_TGE.shape[1]
    if tokens != sequences.tokens or groups < 1 or all_heads % groups:
        raise ValueError(f"{tokens} tokens, {all_heads} and {groups} heads for {sequences.tokens} tokens")
    expect_rows(query_THE, (tokens, all_heads, size))
    for tensor in (key_TGE, value_TGE):
        expect_rows(tensor, (tokens, groups, size), query_THE.dtype)


def _by_token(tensor_THE: Tensor) -> Tensor:
    """Returns a tensor with the numbers of each token together, copied if need be."""
    size = tensor_THE.shape[2]
    return tensor_THE if tensor_THE.stride()[1:] == (size, 1) else tensor_THE.contiguous()


def _by_stride(*tensors: Tensor) -> list[int]:
    """Returns address and stride of each tensor."""
    return [number for tensor in tensors for number in (tensor.data_ptr(), tensor.stride(0))]


def _scratch(keys: int, size: int, *, blocks: int, tables: int) -> Tensor:
    """Returns float32 memory: blocks of rows over the keys, three over a head, and tables of keys by head."""
    long, wide = -(-keys // WIDTH) * WIDTH, -(-size // WIDTH) * WIDTH
    return torch.empty(blocks * QUERIES * long + 3 * QUERIES * wide + tables * wide * long)


def _addresses(sequences: Sequences) -> tuple[int, int, int]:
    return sequences.query_ends.data_ptr(), sequences.key_ends.data_ptr(), sequences.key_tokens.data_ptr()
