"""How many tokens at once, and what happens when they were too many."""

import doctest

import pytest
import torch

from swarmnode.machine.hardware import GIB
from swarmnode.machine.memory_plan import ModelCard, Workload, plan_memory, with_tokens
from swarmnode.model import budget as budget_module
from swarmnode.model.budget import (
    CPU_BYTES,
    CPU_TOKENS,
    HEADROOM,
    MOST_TOKENS,
    TokenBudget,
    TokenCost,
    is_out_of_memory,
    smaller,
    token_budget,
    token_cost,
)

COST = TokenCost(per_token=1000, per_token_checkpointed=100, fixed=50_000)
CARD = ModelCard("m", 2e9, 10, 1000, 4000, 10, 2, 100, 50_000)
WORK = Workload(rank=10, slots=1, sequence_tokens=1, micro_batch_tokens=1)


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(budget_module).failed == 0


@pytest.mark.parametrize("free", [3_000_000, 10_000_000])
def test_a_micro_batch_leaves_some_memory_alone(free: int) -> None:
    budget = token_budget(free, COST, 512, device="cuda")
    room = free * (1 - HEADROOM)
    assert room - 64 * COST.per_token < budget.tokens * COST.per_token + COST.fixed <= room
    assert budget.fits and not budget.checkpointing


@pytest.mark.parametrize("device", MOST_TOKENS)
def test_with_memory_to_burn_a_micro_batch_is_as_large_as_pays(device: str) -> None:
    assert token_budget(1e15, COST, 512, device=device).tokens == MOST_TOKENS[device]
    assert token_budget(1e15, COST, 50_000, device=device).tokens == 50_000


def test_a_large_model_on_a_cpu_takes_no_more_memory_than_helps_it() -> None:
    def tokens(bytes_per_token: float) -> int:
        cost = TokenCost(bytes_per_token, bytes_per_token, 0)
        return token_budget(1e15, cost, 512, device="cpu").tokens

    assert tokens(CPU_BYTES / 5000) == 5000
    assert tokens(CPU_BYTES / 100) == CPU_TOKENS


def test_layers_are_recomputed_only_where_the_longest_sequence_would_not_fit_otherwise() -> None:
    free = (512 * COST.per_token + COST.fixed) / (1 - HEADROOM)
    assert not token_budget(free + 1, COST, 512, device="cuda").checkpointing
    tight = token_budget(free - 1000, COST, 512, device="cuda")
    assert tight.checkpointing and tight.fits and "recomputed" in tight.reason
    off = token_budget(free - 1000, COST, 512, device="cuda", checkpointing="off")
    assert (off.checkpointing, off.fits, off.tokens) == (False, False, 512)
    assert token_budget(1e15, COST, 512, device="cuda", checkpointing="on").checkpointing


def test_what_is_set_is_taken_and_still_measured_against_the_memory() -> None:
    assert token_budget(1e15, COST, 512, device="cpu", wanted=100_000).tokens == 100_000
    tight = token_budget(200_000, COST, 16, device="cpu", wanted=512)
    assert (tight.tokens, tight.checkpointing) == (512, True)
    assert tight.reason.startswith("512 tokens, layers recomputed: as set")


def test_a_sequence_that_is_longer_than_the_micro_batch_that_is_set_has_to_fit_too() -> None:
    free = (4096 * COST.per_token + COST.fixed) / (1 - HEADROOM)
    plain, tight = (token_budget(free + more, COST, 4096, device="cuda", wanted=512) for more in (1, -1000))
    assert (plain.tokens, plain.checkpointing, plain.fits) == (512, False, True)
    assert (tight.tokens, tight.checkpointing, tight.fits) == (512, True, True)
    assert not token_budget(free / 20, COST, 4096, device="cuda", wanted=512).fits


def test_a_model_that_nobody_knows_gets_the_usual_micro_batch_and_a_reason() -> None:
    budget = token_budget(8 * GIB, None, 512, device="cuda")
    assert (budget.tokens, budget.reason) == (4096, "4096 tokens: this model's memory needs are unknown")
    assert token_budget(None, COST, 9000, device="cuda").tokens == 9000


def test_a_negative_rest_is_said_to_be_nothing() -> None:
    budget = token_budget(-5e9, COST, 512, device="cpu")
    assert not budget.fits and "0.0 MiB free" in budget.reason and "too little" in budget.reason


@pytest.mark.parametrize("on", [False, True])
def test_the_cost_of_a_token_is_that_of_the_plan(on: bool) -> None:
    cost = token_cost(CARD, WORK)
    per_token = cost.per_token_checkpointed if on else cost.per_token
    assert plan_memory(CARD, with_tokens(WORK, 640, checkpointing=on)).activations == 640 * per_token


def test_after_running_out_of_memory_less_is_tried_until_nothing_is_left() -> None:
    tried: list[tuple[int, bool]] = []
    budget: TokenBudget | None = TokenBudget(4096, checkpointing=False, reason="")
    while budget is not None:
        tried.append((budget.tokens, budget.checkpointing))
        budget = smaller(budget, longest_sequence=700)
    assert tried == [(4096, False), (2048, False), (1024, False), (700, False), (700, True)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_every_way_to_run_out_of_memory_is_known(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_torch_on_this_cpu_says_it_in_the_words_we_look_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)
