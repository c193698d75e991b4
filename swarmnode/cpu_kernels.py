"""CPU kernels for the work on tokens between two products, in one pass over memory.

model/, rollout/decode/ -> [kernels] -> registry.py -> extensions/native/, or none

They are optional. A caller asks `fits` first, and has torch's operations beside the call for a tensor that
does not fit: on a GPU, of another type, or if there are no kernels.

Shapes: M tokens, D numbers, H query heads, G key heads, E head size; in a packed row T tokens, R runs, S key
slots; in a decode step N rows with one token each, P prompts of W tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swarmnode.errors import ConfigError
from swarmnode.registry import find, names


def expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless `tensor` is a contiguous block on the CPU, of this shape and type. A kernel
    reads and writes where it is told to, so a wrong tensor is a defect of the caller."""
    right = tensor.shape == shape and (dtype is None or tensor.dtype == dtype)
    if not right or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{tensor.dtype} {tuple(tensor.shape)} strided {tensor.stride()} on {tensor.device}, "
            f"not {dtype} {shape}"
        )


@dataclass(frozen=True, slots=True)
class Sequences:
    """The queries and keys of each sequence in a packed row."""

    query_ends: Tensor
    """0 and the running sum of the runs' lengths, int64 [R + 1]."""
    key_ends: Tensor
    """0 and the running sum of the whole sequences' lengths; a run's tokens are the last of its sequence."""
    key_tokens: Tensor
    """Tokens of all sequences, one sequence after another, int64 [S]."""
    longest: int
    """Tokens of the longest sequence."""
    tokens: int
    """T, the number of tokens in the row."""

    def __post_init__(self) -> None:
        """Raises ValueError for indices outside of T tokens. Checked once for all layers."""
        queries, keys = self.query_ends.diff(), self.key_ends.diff()
        runs = len(queries)
        expect(self.query_ends, (runs + 1,), torch.int64)
        expect(self.key_ends, (runs + 1,), torch.int64)
        expect(self.key_tokens, (int(self.key_ends[-1]),), torch.int64)
        inside = not len(self.key_tokens) or (
            int(self.key_tokens.min()) >= 0 and int(self.key_tokens.max()) < self.tokens
        )
        if (
            not inside
            or int(self.query_ends[0]) != 0
            or int(self.key_ends[0]) != 0
            or int(self.query_ends[-1]) != self.tokens
            or bool((queries < 0).any())
            or bool((keys < queries).any())
            or (runs and int(keys.max()) > self.longest)
        ):
            raise ValueError(f"these sequences are not in a row of {self.tokens} tokens")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The order of a token's numbers: for each key head its `group` queries, its key and its value."""

    kv_heads: int
    group: int
    size: int
    eps: float
    """Epsilon of the norm of queries and keys."""
    scale: float
    """Factor of queries times keys."""
    cap: float | None = None
    """The c of c tanh(score / c). None: scores are not capped."""

    @property
    def fused(self) -> int:
        """Number of a token's numbers."""
        return self.kv_heads * (self.group + 2) * self.size


class StepRows(Protocol):
    """Sequences in a cache with one new token each: what all layers of a step share, checked once."""

    def attend(self, layer: int, fused_ND: Tensor, scale: Tensor | None, attended_ND: Tensor) -> None:
        """Writes the new keys and values of a layer, and the attention over everything up to them into
        `attended` [N, G * group * E]. `scale` [group + 1, E] is that of the norm, float32."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The random streams of rows, as sampler.py defines them."""

    words: Tensor
    """Random words, [2, windows + V or more] int32."""
    windows: int
    """Number of windows in each table of words; a power of two."""
    steps: tuple[int, int]
    """Distance by which a row's window moves per position in each table."""
    unit: float
    """Unit of a sum of two words."""
    offsets: Tensor
    """Start of each row's windows, [2, N]. It moves."""


def _nothing_fits(*_: Any) -> Any:
    raise AssertionError("ask `fits` first")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """A set of kernels, which take only tensors that `fits`, and check them. By default no tensor does."""

    fits: Callable[[Tensor], bool] = lambda tensor: False
    """Returns True if there are kernels for tensors like this one."""
    keep_in: Callable[[Path], None] = lambda cache: None
    """Sets the folder for compiled code, if the installation is not writable."""
    prepare: Callable[[], object] = lambda: None
    """Prepares the kernels now rather than at the first call, if they have to be compiled."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _nothing_fits
    """(x, scale, eps) -> x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    rms_norm_kept: Callable[[Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]] = _nothing_fits
    """(x, scale, eps) -> xhat, 1 / sqrt(...) in float32 [..., 1], and xhat times the scale."""
    rms_norm_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor] = (
        _nothing_fits
    )
    """(dy, xhat, rstd, scale, more) -> dx + more."""
    silu_mul: Callable[[Tensor, Tensor], Tensor] = _nothing_fits
    """(gate, up) -> silu(gate) * up."""
    gelu_tanh_mul: Callable[[Tensor, Tensor], Tensor] = _nothing_fits
    silu_mul_gradient: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _nothing_fits
    """(gate, up, dactive) -> silu(gate) * up, dgate, dup. May overwrite `dactive`."""
    rotate_heads: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], Tensor] = _nothing_fits
    """(x [M, H, E], scale, eps, cos, sin) -> heads normed, if there is a scale, and rotated."""
    rotate_heads_gradient: Callable[[Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor], Tensor] = (
        _nothing_fits
    )
    """(dy, x, scale, eps, cos, sin) -> dx. x may be None if there is no scale."""
    packed_attention: Callable[
        [Tensor, Tensor, Tensor, Sequences, int | None, float], tuple[Tensor, Tensor]
    ] = _nothing_fits
    """(queries [T, H, E], keys and values [T, G, E], sequences, window, scale) -> attention [T, H, E], and
    the logarithms of the sums that the gradient needs, [T, H] in float32."""
    packed_attention_gradient: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequences, int | None, float],
        tuple[Tensor, Tensor, Tensor],
    ] = _nothing_fits
    """(dout, queries, keys, values, out, sums, sequences, window, scale) -> the gradients of queries, keys
    and values."""
    cached_rows: Callable[[HeadLayout, Tensor, Tensor, Tensor, int | None], StepRows] = _nothing_fits
    """(heads, cache [2 * layers, places, G, columns, E], positions [N], rotation [N, E], window) -> the rows
    of a decode step."""
    split_heads: Callable[[HeadLayout, Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor] = _nothing_fits
    """(heads, fused, scale, rotation [W, E], keys, values) -> queries [P, H, W, E] of whole prompts, whose
    keys and values are written to `keys` and `values` [P, G, W, E]."""
    sample: Callable[[Tensor, Tensor, Tensor, Streams], tuple[Tensor, Tensor]] = _nothing_fits
    """(logits [N, V], temperature [N], greedy [N], streams) -> tokens and their log-probabilities."""


_kernels: CpuKernels | None = None


def kernels() -> CpuKernels:
    """Returns the kernels of this process: those set by `use_kernels`, or else those of `auto`."""
    return use_kernels("auto") if _kernels is None else _kernels


def use_kernels(name: str) -> CpuKernels:
    """Sets the kernels of this process by a name as in policy.cpu_kernels, and returns them. Raises
    ConfigError."""
    global _kernels
    if name == "auto":
        name = next(iter(names("kernels")), "off")
    found = CpuKernels() if name == "off" else find("kernels", name)
    if not isinstance(found, CpuKernels):
        raise ConfigError(
            f"policy.cpu_kernels = {name!r} is a {type(found).__name__}, not a CpuKernels",
            hint="write NAME = CpuKernels(fits=...), from swarmnode.cpu_kernels",
        )
    _kernels = found
    return found
