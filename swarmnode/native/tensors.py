"""Which tensors the kernels take, and the check before their memory is handed over.

compiler.py -> [tensors] <- passes.py, packed_attention.py, decode.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

from swarmnode.native.compiler import library, loaded

KERNEL_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What the names of kernels end with, as in kernels/kernels.c."""


def fits(tensor: Tensor) -> bool:
    """Whether there are kernels for tensors like this one. With any other a caller does what it would do
    without them."""
    return tensor.device.type == "cpu" and tensor.dtype in KERNEL_KINDS and library() is not None


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """One of them, for tensors that fit. It takes addresses and numbers as compiler.SIGNATURES says."""
    kernels = loaded()
    assert kernels is not None, "ask `fits` first"
    return getattr(kernels, f"{name}_{KERNEL_KINDS[dtype]}")


def expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless `tensor` is a plain block of memory with these numbers in it: a kernel reads
    and writes where it is told to, so a wrong one is a defect of the caller."""
    right = tensor.shape == shape and (dtype is None or tensor.dtype == dtype)
    if not right or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{tensor.dtype} {tuple(tensor.shape)} strided {tensor.stride()} on {tensor.device}, "
            f"not {dtype} {shape}"
        )


def expect_rows(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """The same of a block whose rows (all but the first dimension) are plain, and lie a fixed way apart."""
    expect(tensor[:1] if len(tensor) else tensor, (min(1, shape[0]), *shape[1:]), dtype)
    if len(tensor) != shape[0] or (len(tensor) > 1 and tensor.stride(0) < tensor[0].numel()):
        raise ValueError(f"{tuple(tensor.shape)} strided {tensor.stride()}, not {shape}")
