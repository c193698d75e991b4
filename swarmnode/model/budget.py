"""The number of tokens that go through the model at once, and its reduction if memory runs out."""

from dataclasses import dataclass, replace
from typing import Literal

from swarmnode.machine.memory_plan import (
    ModelCard,
    Workload,
    activation_bytes,
    in_flight_bytes,
    logprob_bytes,
    size_text,
    with_tokens,
)

HEADROOM = 0.15
"""Share of free memory that is left unused, for fragments between blocks and for other programs."""
LEAST_TOKENS = 64
"""Tokens below which a smaller micro-batch no longer saves a significant amount."""
MOST_TOKENS = {"cpu": 8192, "cuda": 16384, "mps": 8192}
"""Tokens above which larger micro-batches stop paying, by device. On a CPU (one thread, AMX, 3 million
parameters) training on 4100 tokens takes 672, 616 and 597 ms in micro-batches of 1024, 2048 and 5000 in
float32, 440, 365 and 306 in bfloat16. A card is busy at a few thousand tokens; more room makes packing
fuller."""
CPU_TOKENS = 2048
"""Tokens that suffice on a CPU for a large model, whose products dominate the time."""
CPU_BYTES = 2**30
"""The most bytes of a micro-batch with more than CPU_TOKENS on a CPU."""
UNKNOWN_TOKENS = 4096
"""Tokens of a micro-batch if the cost of a token is unknown."""


OUT_OF_MEMORY = (
    "out of memory",  # CUDA and MPS
    "can't allocate memory: you tried to allocate",  # torch on Linux
    "not enough memory: you tried to allocate",  # torch on Windows and macOS
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of torch's errors when memory runs out: on CUDA the error has its own type, elsewhere it is a plain
RuntimeError."""


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Bytes of one micro-batch, linear in its tokens."""

    per_token: float
    per_token_checkpointed: float
    """Bytes per token if layers are recomputed in the backward pass."""
    fixed: float
    """Bytes independent of the number of tokens: a chunk of logits."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The tokens of one micro-batch, and the reason for that number."""

    tokens: int
    checkpointing: bool
    reason: str
    """One sentence for the log."""
    fits: bool = True
    """False if by the arithmetic not even one sequence of full length fits."""


def token_cost(card: ModelCard, work: Workload) -> TokenCost:
    """Returns the cost of a micro-batch of `card`; `work.micro_batch_tokens` is ignored."""
    plain, checkpointed = (
        activation_bytes(card, with_tokens(work, 1, checkpointing=on))
        + in_flight_bytes(card, with_tokens(work, 1, checkpointing=on))
        for on in (False, True)
    )
    return TokenCost(plain, checkpointed, logprob_bytes(card, MOST_TOKENS["cuda"]))


def token_budget(
    free_bytes: float | None,
    cost: TokenCost | None,
    longest_sequence: int,
    *,
    device: str,
    wanted: int | None = None,
    checkpointing: Literal["auto", "on", "off"] = "auto",
) -> TokenBudget:
    """Returns the micro-batch that fits into `free_bytes` (None: unknown) on a `device` ("cpu", "cuda",
    "mps").

    `longest_sequence` is the lower bound, because a sequence is never cut. With checkpointing "auto", layers
    are recomputed in the backward pass only if that sequence would not fit otherwise: it takes a third more
    time. A requested number of tokens (`wanted`) is used unchanged; a longer sequence gets a micro-batch of
    its own.

    >>> token_budget(10_000_000, TokenCost(1000, 100, 0), 512, device="cuda").tokens
    8448
    >>> tight = token_budget(100_000, TokenCost(1000, 100, 0), 512, device="cuda")
    >>> tight.tokens, tight.checkpointing
    (832, True)
    """
    most = MOST_TOKENS.get(device, CPU_TOKENS)
    if device == "cpu":
        most = CPU_TOKENS if cost is None else min(most, max(CPU_TOKENS, int(CPU_BYTES / cost.per_token)))
    most = max(most, longest_sequence)
    if free_bytes is None or cost is None:
        tokens = wanted or max(min(most, UNKNOWN_TOKENS), longest_sequence)
        why = "as set" if wanted else "this model's memory needs are unknown"
        return TokenBudget(tokens, checkpointing == "on", f"{tokens} tokens: {why}")
    room = free_bytes * (1 - HEADROOM) - cost.fixed
    needed = max(wanted or 0, longest_sequence)
    on = checkpointing == "on" or (checkpointing == "auto" and room < needed * cost.per_token)
    per_token = cost.per_token_checkpointed if on else cost.per_token
    fitting = int(room / per_token) // LEAST_TOKENS * LEAST_TOKENS
    tokens = wanted or min(max(fitting, longest_sequence), most)
    fits = room >= max(tokens, longest_sequence) * per_token
    return TokenBudget(tokens, on, _reason(tokens, on, fits, per_token, free_bytes, wanted is not None), fits)


def _reason(tokens: int, on: bool, fits: bool, per_token: float, free_bytes: float, is_set: bool) -> str:
    how = ", layers recomputed" if on else ""
    room = f"{per_token / 1024:.1f} KiB each, {size_text(free_bytes)} free for them"
    verdict = "" if fits else ": too little by the arithmetic"
    return f"{tokens} tokens{how}: {'as set, ' if is_set else ''}{room}{verdict}"


def smaller(budget: TokenBudget, longest_sequence: int) -> TokenBudget | None:
    """Returns the budget to try after an out-of-memory error. None: nothing is left to try.

    `longest_sequence` is the longest of the step that failed: a micro-batch of one sequence cannot be halved,
    so at that size layers are recomputed, and after that nothing is left.

    >>> first = TokenBudget(1024, checkpointing=False, reason="")
    >>> second = smaller(first, longest_sequence=600)
    >>> second.tokens, second.checkpointing
    (600, False)
    >>> third = smaller(second, longest_sequence=600)
    >>> third.tokens, third.checkpointing, smaller(third, longest_sequence=600)
    (600, True, None)
    """
    least = max(longest_sequence, LEAST_TOKENS)
    if budget.tokens > least:
        tokens = max(budget.tokens // 2, least)
        return replace(budget, tokens=tokens, reason=f"{tokens} tokens: {budget.tokens} ran out of memory")
    if not budget.checkpointing:
        reason = f"{budget.tokens} tokens, layers recomputed: without that they ran out of memory"
        return replace(budget, checkpointing=True, reason=reason)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a smaller micro-batch may help. torch has a dedicated error only for accelerators.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
