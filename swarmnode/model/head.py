"""Log-probability and entropy of chosen tokens from hidden states, without an [N, vocabulary] matrix.

decoder's hidden states -> [head] -> logprob

With a frozen head, the gradient of row i's log-probability with respect to its hidden state is one vector,
u_i = (onehot_i - p_i) W / temperature. Whatever the loss is, row i receives a multiple of u_i. So u is formed
while the probabilities are available, and the backward pass scales its rows: two matrix products in all, and
nothing as wide as the vocabulary outlives a chunk of rows. A head that is trained, or that is more than a
matrix, is recomputed chunk by chunk in the backward pass instead. The entropy is only measured and has no
gradient.

Names: N tokens, C rows of a chunk, R rows of a block, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarmnode.model.nucleus import FAR_BELOW, outside_nucleus

SMALLEST_CHUNK = 256
"""Rows below which reading the head's weights costs more than multiplying with them."""
RECOMPUTED_BUFFERS = 4
"""Float32 copies of a chunk's logits that autograd holds while the chunk is recomputed."""


@dataclass(frozen=True, slots=True)
class LogitsBudget:
    """Bytes of float32 logits processed at a time. Affects the speed, not the result."""

    chunk_bytes: int
    """Bytes of the rows of one matrix product. More rows need more memory; fewer read the head's weights more
    often."""
    block_bytes: int
    """Bytes of the rows of one softmax: all its passes after the first should find them in a cache."""


CPU_BUDGET = LogitsBudget(chunk_bytes=48 * 2**20, block_bytes=2**19)
"""Budget of a CPU, measured by `benchmarks/logprob.py`. The block is per thread."""
GPU_BUDGET = LogitsBudget(chunk_bytes=256 * 2**20, block_bytes=2**25)
"""Budget of a GPU. Reasoned, not measured: 400 rows at 150k tokens feed the tensor cores, and a block
outweighs its launches."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities and entropies of N chosen tokens. Both are NaN in a row whose logits are not all
    finite."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of the distribution that the token was drawn from, in nats."""


def head_logprobs(
    head: nn.Module,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    *,
    top_p: float = 1.0,
    chunk_rows: int | None = None,
) -> TokenLogprobs:
    """Returns the log-probability of each target and the entropy around it, in float32 (float64 for a float64
    head).

    `temperature` must be above zero. `top_p` is the sampler's: the distribution is restricted to the head's
    own nucleus (nucleus.py). `chunk_rows` changes the rows per chunk, not the result. The products use the
    dtype of the head's weights, the softmax float32. Autocast is not supported, and a head that is recomputed
    must give the same logits twice: no active dropout.

    >>> head = nn.Linear(2, 3, bias=False).requires_grad_(False)
    >>> head_logprobs(head, torch.zeros(1, 2), torch.tensor([0])).logprobs_N
    tensor([-1.0986])
    """
    trained = [p for p in head.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    if _is_matrix(head) and not trained:
        wanted = hidden_ND.requires_grad and torch.is_grad_enabled()
        rows = _chunk_rows(hidden_ND, head.out_features, chunk_rows)
        found = _FrozenHead.apply(
            hidden_ND, head.weight, head.bias, targets_N, 1 / temperature, top_p, wanted, rows
        )
    else:
        rows = _chunk_rows(hidden_ND, _vocabulary(head, hidden_ND) * RECOMPUTED_BUFFERS, chunk_rows)
        found = _RecomputedHead.apply(head, hidden_ND, targets_N, 1 / temperature, top_p, rows, *trained)
    return TokenLogprobs(*found)


def logits_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    *,
    top_p: float = 1.0,
) -> TokenLogprobs:
    """Measures targets as `head_logprobs` does, from existing logits; autograd keeps the parts that it
    needs."""
    return TokenLogprobs(*_measure(logits_NV, targets_N, 1 / temperature, top_p))


class _FrozenHead(torch.autograd.Function):
    """Two products, or one if nothing needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse: float,
        top_p: float,
        wanted: bool,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        inputs_ND = hidden_ND.to(weight_VD.dtype)
        count, exact = len(inputs_ND), _exact(weight_VD.dtype)
        slopes_ND = torch.empty_like(inputs_ND) if wanted else None
        buffer_CV = weight_VD.new_empty(chunk_rows, len(weight_VD))
        softmax = _BlockSoftmax(weight_VD, chunk_rows, top_p)
        logprobs_N, entropy_N = (inputs_ND.new_empty(count, dtype=exact) for _ in range(2))
        for chunk in _slices(count, chunk_rows):
            inputs_CD = inputs_ND[chunk]
            logits_CV = buffer_CV[: len(inputs_CD)]
            _linear(inputs_CD, weight_VD, bias_V, out=logits_CV)
            for block in _slices(len(inputs_CD), softmax.rows):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                measured = softmax.measure(logits_CV[block], targets_N[at], inverse)
                logprobs_N[at], entropy_N[at] = measured.logprobs_R, measured.entropy_R
                if wanted:
                    measured.store_slope(logits_CV[block], targets_N[at])
            if slopes_ND is not None:
                torch.mm(logits_CV, weight_VD, out=slopes_ND[chunk])
        ctx.save_for_backward(slopes_ND)
        ctx.inverse, ctx.hidden_dtype = inverse, hidden_ND.dtype
        ctx.mark_non_differentiable(entropy_N)
        return _nan_where_entropy_is(logprobs_N, entropy_N), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_N: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slopes_ND,) = ctx.saved_tensors
        return (
            (slopes_ND * (gradient_N[:, None] * ctx.inverse)).to(ctx.hidden_dtype),
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """A measured block. Valid until the next one is measured, because it uses the softmax's buffers."""

    logprobs_R: Tensor
    entropy_R: Tensor
    exp_RV: Tensor
    """exp(z), where z is the logits over the temperature, minus the largest in their row."""
    total_R1: Tensor
    """Sum of exp(z)."""

    def store_slope(self, slope_RV: Tensor, targets_R: Tensor) -> None:
        """Writes onehot - p, the gradient of the log-probabilities in the logits, into a buffer, which may
        be that of the logits."""
        minus_inverse_R1 = self.total_R1.reciprocal().neg_()
        minus_p_RV = self.exp_RV.mul_(minus_inverse_R1)
        ones_R1 = torch.ones_like(minus_inverse_R1)
        slope_RV.copy_(minus_p_RV.scatter_add_(-1, targets_R[:, None], ones_R1))


class _BlockSoftmax:
    """Softmax of a few rows at a time, in buffers allocated once: all passes after the first find them
    cached."""

    def __init__(self, weight_VD: Tensor, chunk_rows: int, top_p: float) -> None:
        exact = _exact(weight_VD.dtype)
        on_cpu = weight_VD.device.type == "cpu"
        threads = torch.get_num_threads() if on_cpu else 1
        block_rows = _budget(weight_VD).block_bytes * threads // (4 * len(weight_VD))
        self.rows = max(1, min(chunk_rows, block_rows))
        self._in_place = weight_VD.dtype == exact
        self._top_p = top_p
        shape = self.rows, len(weight_VD)
        self._exp_RV = weight_VD.new_empty(shape, dtype=exact)
        self._shifted_RV = self._exp_RV if self._in_place else torch.empty_like(self._exp_RV)

    def measure(self, logits_RV: Tensor, targets_R: Tensor, inverse: float) -> _Block:
        """Measures a block of rows. Logits of the exact dtype are overwritten."""
        shifted_RV = logits_RV if self._in_place else self._shifted_RV[: len(logits_RV)].copy_(logits_RV)
        if inverse != 1:
            shifted_RV.mul_(inverse)
        if self._top_p < 1:
            shifted_RV.masked_fill_(outside_nucleus(shifted_RV, targets_R, self._top_p), FAR_BELOW)
        shifted_RV.sub_(shifted_RV.amax(-1, keepdim=True))
        chosen_R = shifted_RV.gather(-1, targets_R[:, None])[:, 0]
        exp_RV = torch.exp(shifted_RV, out=self._exp_RV[: len(logits_RV)])
        total_R1 = exp_RV.sum(-1, keepdim=True)
        # 0 * -inf is NaN on purpose: a row with any logit that is not finite has no entropy.
        mean_R1 = shifted_RV.mul_(exp_RV).sum(-1, keepdim=True).div_(total_R1)
        log_total_R = total_R1.log()[:, 0]
        return _Block(chosen_R - log_total_R, log_total_R - mean_R1[:, 0], exp_RV, total_R1)


class _RecomputedHead(torch.autograd.Function):
    """Any head: its logits are computed twice, and its own gradients summed over the chunks in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        hidden_ND: Tensor,
        targets_N: Tensor,
        inverse: float,
        top_p: float,
        chunk_rows: int,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.inverse, ctx.top_p, ctx.chunk_rows = head, inverse, top_p, chunk_rows
        ctx.save_for_backward(hidden_ND, targets_N, *trained)
        found: list[tuple[Tensor, Tensor]] = []
        for at in _slices(len(hidden_ND), chunk_rows):
            found.append(_measure(head(hidden_ND[at]), targets_N[at], inverse, top_p))
        empty = hidden_ND.new_empty(0, dtype=_exact(hidden_ND.dtype))
        logprobs, entropies = zip(*found, strict=True) if found else ((empty,), (empty,))
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_N: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, targets_N, *trained = ctx.saved_tensors
        hidden_gradient_ND = torch.zeros_like(hidden_ND)
        sums = [torch.zeros_like(p, dtype=_exact(p.dtype)) for p in trained]
        for at in _slices(len(hidden_ND), ctx.chunk_rows):
            with torch.enable_grad():
                hidden_CD = hidden_ND[at].detach().requires_grad_()
                logprobs_C, _ = _measure(ctx.head(hidden_CD), targets_N[at], ctx.inverse, ctx.top_p)
            found = torch.autograd.grad(logprobs_C, (hidden_CD, *trained), gradient_N[at], allow_unused=True)
            hidden_gradient_ND[at] = found[0]
            for total, part in zip(sums, found[1:], strict=True):
                if part is not None:
                    total.add_(part)
        gradients_of_trained = (total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return None, hidden_gradient_ND, None, None, None, None, *gradients_of_trained


def _measure(logits_NV: Tensor, targets_N: Tensor, inverse: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns (log-probabilities, entropies) by plain operations; only the former have a gradient."""
    logits_NV = logits_NV.to(_exact(logits_NV.dtype))
    if inverse != 1:
        logits_NV = logits_NV * inverse
    if top_p < 1:
        logits_NV = logits_NV.masked_fill(outside_nucleus(logits_NV, targets_N, top_p), FAR_BELOW)
    all_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    chosen_N = all_NV.gather(-1, targets_N[:, None])[:, 0]
    return _nan_where_entropy_is(chosen_N, entropy_N), entropy_N


def _nan_where_entropy_is(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
    return logprobs_N.masked_fill(entropy_N.isnan(), torch.nan)


def _is_matrix(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns True if the head is exactly W h + b. Adapters and quantizers have types of their own, and some
    libraries replace `forward` on the instance."""
    return type(head) is nn.Linear and "forward" not in vars(head)


def _linear(inputs_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, out: Tensor) -> None:
    if bias_V is None:
        torch.mm(inputs_CD, weight_VD.t(), out=out)
    else:
        torch.addmm(bias_V, inputs_CD, weight_VD.t(), out=out)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of softmax and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _budget(tensor: Tensor) -> LogitsBudget:
    return CPU_BUDGET if tensor.device.type == "cpu" else GPU_BUDGET


def _chunk_rows(hidden_ND: Tensor, width: int, asked: int | None) -> int:
    """Returns the rows per chunk if each needs `width` numbers, spread evenly: a last chunk of few rows would
    be slow."""
    largest = asked or max(SMALLEST_CHUNK, _budget(hidden_ND).chunk_bytes // (4 * width))
    chunks = max(1, -(-len(hidden_ND) // largest))
    return max(1, -(-len(hidden_ND) // chunks))


def _vocabulary(head: nn.Module, hidden_ND: Tensor) -> int:
    """Returns the size of the vocabulary, measured on one row, since a module need not state it."""
    with torch.no_grad():
        return head(hidden_ND.new_zeros(1, hidden_ND.shape[1])).shape[1]


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
