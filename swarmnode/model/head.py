"""Log-probability and entropy of chosen tokens from hidden states, without an [N, vocabulary] matrix.

decoder's hidden states -> [head] -> logprob

With a frozen head, the gradient of row i's log-probability with respect to its hidden state is one vector,
u_i = (onehot_i - p_i) W / temperature. Whatever the loss is, row i receives a multiple of u_i. So u is formed
while the probabilities are at hand, and the backward pass scales its rows: two matrix products in all, and
nothing as wide as the vocabulary outlives a chunk of rows. A differentiable entropy adds a second vector,
v_i = sum_j p_ij (mean_i - z_ij) W_j / temperature with z the scaled logits and mean_i = sum_j p_ij z_ij,
and a third product. A head that is trained, or that is more than a matrix, is computed again in the backward
pass instead, chunk by chunk.

Names: N tokens, C rows of a chunk, R rows of a block, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SMALLEST_CHUNK = 256
"""Rows below which reading the head's weights costs more than multiplying with them."""
RECOMPUTED_BUFFERS = 4
"""Float32 copies of a chunk's logits that autograd holds while the chunk is computed again."""


@dataclass(frozen=True, slots=True)
class LogitsBudget:
    """Bytes of float32 logits that are worked on at a time. It changes the speed, not the result."""

    chunk_bytes: int
    """Bytes of one matrix product's rows. More need more memory; fewer read the head's weights more often."""
    block_bytes: int
    """Bytes of one softmax's rows: all its passes but the first should find them in a cache."""


CPU_BUDGET = LogitsBudget(chunk_bytes=48 * 2**20, block_bytes=2**19)
"""Budget of a CPU, measured by `benchmarks/logprob.py`. The block is per thread."""
GPU_BUDGET = LogitsBudget(chunk_bytes=256 * 2**20, block_bytes=2**25)
"""Budget of a GPU. Reasoned, not measured: 400 rows at 150k tokens feed the tensor cores, a block outweighs
its launches."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities and entropies of N chosen tokens. A row whose logits are not all finite is NaN in
    both."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of the distribution that the token was drawn from, in nats."""


def head_logprobs(
    head: nn.Module,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    top_p: float = 1.0,
    entropy_gradient: bool = False,
    chunk_rows: int | None = None,
) -> TokenLogprobs:
    """Returns the log-probability of each target and the entropy around it, in float32 (float64 for a float64
    head).

    `temperature` is above zero, one for all or one per token, and receives no gradient. `top_p` is the
    sampler's: the distribution is that over the head's own nucleus (nucleus.py). The entropy has a gradient
    only with `entropy_gradient`. `chunk_rows` replaces the rows per chunk, not the result. The products run
    in the dtype of the head's weights, the softmax in float32. Autocast is not supported, and a head that is
    computed again must give the same logits twice: no active dropout.

    >>> head = nn.Linear(2, 3, bias=False).requires_grad_(False)
    >>> head_logprobs(head, torch.zeros(1, 2), torch.tensor([0])).logprobs_N
    tensor([-1.0986])
    """
    trained = [p for p in head.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    inverse_N1 = _inverse(temperature, hidden_ND)
    if _is_matrix(head) and not trained:
        wanted = hidden_ND.requires_grad and torch.is_grad_enabled()
        vectors = (1 + entropy_gradient) if wanted else 0
        rows = _chunk_rows(hidden_ND, head.out_features * max(vectors, 1), chunk_rows)
        found = _FrozenHead.apply(
            hidden_ND, head.weight, head.bias, targets_N, inverse_N1, top_p, vectors, rows
        )
    else:
        rows = _chunk_rows(hidden_ND, _vocabulary(head, hidden_ND) * RECOMPUTED_BUFFERS, chunk_rows)
        found = _RecomputedHead.apply(
            head, hidden_ND, targets_N, inverse_N1, top_p, entropy_gradient, rows, *trained
        )
    return TokenLogprobs(*found)


def logits_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    top_p: float = 1.0,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Measures targets as `head_logprobs` does, from logits that exist already; autograd keeps the parts that
    it needs."""
    inverse_N1 = _inverse(temperature, logits_NV)
    return TokenLogprobs(*_measure(logits_NV, targets_N, inverse_N1, top_p, entropy_gradient))


class _FrozenHead(torch.autograd.Function):
    """Two products, or three with a differentiable entropy; one if nothing needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_N1: Tensor | None,
        top_p: float,
        vectors: int,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        inputs_ND = hidden_ND.to(weight_VD.dtype)
        count, exact = len(inputs_ND), _exact(weight_VD.dtype)
        # How the log-probabilities and the entropies change with the hidden states.
        slopes = [torch.empty_like(inputs_ND) for _ in range(vectors)]
        buffers = [weight_VD.new_empty(chunk_rows, len(weight_VD)) for _ in range(max(vectors, 1))]
        softmax = _BlockSoftmax(weight_VD, chunk_rows, top_p)
        logprobs_N, entropy_N = (inputs_ND.new_empty(count, dtype=exact) for _ in range(2))
        for chunk in _slices(count, chunk_rows):
            inputs_CD = inputs_ND[chunk]
            chunk_buffers = [buffer[: len(inputs_CD)] for buffer in buffers]
            _linear(inputs_CD, weight_VD, bias_V, out=chunk_buffers[0])
            for block in _slices(len(inputs_CD), softmax.rows):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                inverse_R1 = None if inverse_N1 is None else inverse_N1[at]
                measured = softmax.measure(chunk_buffers[0][block], targets_N[at], inverse_R1)
                logprobs_N[at], entropy_N[at] = measured.logprobs_R, measured.entropy_R
                if vectors:
                    measured.store_slopes([buffer[block] for buffer in chunk_buffers], targets_N[at])
            for slope_ND, slope_CV in zip(slopes, chunk_buffers, strict=False):
                torch.mm(slope_CV, weight_VD, out=slope_ND[chunk])
        ctx.save_for_backward(inverse_N1, *slopes)
        ctx.hidden_dtype = hidden_ND.dtype
        ctx.set_materialize_grads(False)
        if vectors < 2:
            ctx.mark_non_differentiable(entropy_N)
        return _nan_where_entropy_is(logprobs_N, entropy_N), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inverse_N1, *slopes = ctx.saved_tensors
        hidden_gradient_ND: Tensor | None = None
        for gradient_N, slope_ND in zip(gradients_N, slopes, strict=False):
            if gradient_N is None:
                continue
            factor_N1 = gradient_N[:, None] if inverse_N1 is None else gradient_N[:, None] * inverse_N1
            part_ND = slope_ND * factor_N1
            hidden_gradient_ND = part_ND if hidden_gradient_ND is None else hidden_gradient_ND.add_(part_ND)
        if hidden_gradient_ND is not None:
            hidden_gradient_ND = hidden_gradient_ND.to(ctx.hidden_dtype)
        return hidden_gradient_ND, None, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """A measured block. It lives in the buffers of its softmax, until the next one is measured."""

    logprobs_R: Tensor
    entropy_R: Tensor
    exp_RV: Tensor
    """exp(z), z being the logits over the temperature minus the largest of their row."""
    product_RV: Tensor
    """exp(z) z. The memory may be that of the logits."""
    total_R1: Tensor
    """Sum of exp(z)."""
    mean_R1: Tensor
    """Expectation of z."""

    def store_slopes(self, slopes: list[Tensor], targets_R: Tensor) -> None:
        """Writes onehot - p into the first buffer and, if there is a second, p (mean - z) into that one. The
        second goes first: the product may share the memory of the first."""
        minus_inverse_R1 = self.total_R1.reciprocal().neg_()
        if len(slopes) == 2:
            deviation_RV = self.product_RV.addcmul_(self.exp_RV, self.mean_R1, value=-1)
            slopes[1].copy_(deviation_RV.mul_(minus_inverse_R1))
        minus_p_RV = self.exp_RV.mul_(minus_inverse_R1)
        ones_R1 = torch.ones_like(minus_inverse_R1)
        slopes[0].copy_(minus_p_RV.scatter_add_(-1, targets_R[:, None], ones_R1))


class _BlockSoftmax:
    """Softmax of a few rows at a time, in buffers made once: all passes but the first find them cached."""

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

    def measure(self, logits_RV: Tensor, targets_R: Tensor, inverse_R1: Tensor | None) -> _Block:
        """Measures a block of rows. Logits of the exact dtype are overwritten."""
        shifted_RV = logits_RV if self._in_place else self._shifted_RV[: len(logits_RV)].copy_(logits_RV)
        if inverse_R1 is not None:
            shifted_RV.mul_(inverse_R1)
        if self._top_p < 1:
            from swarmnode.model.nucleus import FAR_BELOW, outside_nucleus

            shifted_RV.masked_fill_(outside_nucleus(shifted_RV, targets_R, self._top_p), FAR_BELOW)
        shifted_RV.sub_(shifted_RV.amax(-1, keepdim=True))
        chosen_R = shifted_RV.gather(-1, targets_R[:, None])[:, 0]
        exp_RV = torch.exp(shifted_RV, out=self._exp_RV[: len(logits_RV)])
        total_R1 = exp_RV.sum(-1, keepdim=True)
        # 0 * -inf is NaN on purpose: a row with any logit that is not finite has no entropy.
        product_RV = shifted_RV.mul_(exp_RV)
        mean_R1 = product_RV.sum(-1, keepdim=True).div_(total_R1)
        log_total_R = total_R1.log()[:, 0]
        return _Block(
            chosen_R - log_total_R, log_total_R - mean_R1[:, 0], exp_RV, product_RV, total_R1, mean_R1
        )


class _RecomputedHead(torch.autograd.Function):
    """Any head: its logits are computed twice, its own gradients summed over the chunks in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        hidden_ND: Tensor,
        targets_N: Tensor,
        inverse_N1: Tensor | None,
        top_p: float,
        entropy_gradient: bool,
        chunk_rows: int,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.top_p = head, top_p
        ctx.entropy_gradient, ctx.chunk_rows = entropy_gradient, chunk_rows
        ctx.save_for_backward(hidden_ND, targets_N, inverse_N1, *trained)
        ctx.set_materialize_grads(False)
        found = [
            _measure(
                head(hidden_ND[at]),
                targets_N[at],
                None if inverse_N1 is None else inverse_N1[at],
                top_p,
                False,
            )
            for at in _slices(len(hidden_ND), chunk_rows)
        ]
        empty = hidden_ND.new_empty(0, dtype=_exact(hidden_ND.dtype))
        logprobs, entropies = zip(*found, strict=True) if found else ((empty,), (empty,))
        entropy_N = torch.cat(entropies)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logprob_gradient_N: Tensor | None, entropy_gradient_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, targets_N, inverse_N1, *trained = ctx.saved_tensors
        hidden_gradient_ND = torch.zeros_like(hidden_ND)
        sums = [torch.zeros_like(p, dtype=_exact(p.dtype)) for p in trained]
        for at in _slices(len(hidden_ND), ctx.chunk_rows):
            with torch.enable_grad():
                hidden_CD = hidden_ND[at].detach().requires_grad_()
                inverse_C1 = None if inverse_N1 is None else inverse_N1[at]
                logits_CV = ctx.head(hidden_CD)
                measured = _measure(logits_CV, targets_N[at], inverse_C1, ctx.top_p, ctx.entropy_gradient)
            pairs = [
                (value_C, gradient_N[at])
                for value_C, gradient_N in zip(
                    measured, (logprob_gradient_N, entropy_gradient_N), strict=True
                )
                if gradient_N is not None
            ]
            if not pairs:
                continue
            outputs, gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, (hidden_CD, *trained), gradients, allow_unused=True)
            hidden_gradient_ND[at] = found[0]
            for total, part in zip(sums, found[1:], strict=True):
                if part is not None:
                    total.add_(part)
        gradients_of_trained = (total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return None, hidden_gradient_ND, None, None, None, None, None, *gradients_of_trained


def _measure(
    logits_NV: Tensor, targets_N: Tensor, inverse_N1: Tensor | None, top_p: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns (log-probabilities, entropies) by plain operations that autograd follows."""
    logits_NV = logits_NV.to(_exact(logits_NV.dtype))
    if inverse_N1 is not None:
        logits_NV = logits_NV * inverse_N1
    if top_p < 1:
        from swarmnode.model.nucleus import FAR_BELOW, outside_nucleus

        logits_NV = logits_NV.masked_fill(outside_nucleus(logits_NV, targets_N, top_p), FAR_BELOW)
    all_NV = logits_NV.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    chosen_N = all_NV.gather(-1, targets_N[:, None])[:, 0]
    return _nan_where_entropy_is(chosen_N, entropy_N), entropy_N


def _nan_where_entropy_is(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
    return logprobs_N.masked_fill(entropy_N.isnan(), torch.nan)


def _is_matrix(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns True if the head is W h + b and nothing else. Adapters and quantizers have types of their own,
    and some libraries replace `forward` on the instance."""
    return type(head) is nn.Linear and "forward" not in vars(head)


def _linear(inputs_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, out: Tensor) -> None:
    if bias_V is None:
        torch.mm(inputs_CD, weight_VD.t(), out=out)
    else:
        torch.addmm(bias_V, inputs_CD, weight_VD.t(), out=out)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of softmax and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inverse(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """Returns 1 / temperature per row, shape [N, 1]. None: there is nothing to scale."""
    exact = _exact(like.dtype)
    if isinstance(temperature, Tensor):
        return temperature.detach().to(like.device, exact).expand(len(like))[:, None].reciprocal()
    if temperature == 1.0:
        return None
    return torch.full((len(like), 1), 1.0 / temperature, dtype=exact, device=like.device)


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
