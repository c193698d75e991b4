"""The head's arithmetic against autograd in float64, and what it costs: matrix products and bytes."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnode.model import head as head_module
from swarmnode.model.head import LogitsBudget, TokenLogprobs, head_logprobs, logits_logprobs

N, D, V = 13, 6, 29
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.6])
KINDS = pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])


def make_head(*, trained: bool = False, dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, V, bias=bias, dtype=dtype).requires_grad_(trained)


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(hidden states that are far from uniform, targets)."""
    torch.manual_seed(1)
    return (4 * torch.randn(N, D, dtype=torch.float64)).to(dtype).requires_grad_(), torch.randint(V, (N,))


def naive(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor, temperature: float) -> TokenLogprobs:
    all_NV = (head(hidden_ND) / temperature).log_softmax(-1)
    return TokenLogprobs(all_NV[torch.arange(len(targets_N)), targets_N], -(all_NV.exp() * all_NV).sum(-1))


def weighted(found: TokenLogprobs) -> Tensor:
    """A loss in which every token counts differently."""
    weights_N = torch.linspace(-1, 2, len(found.logprobs_N), dtype=torch.float64)
    return (found.logprobs_N * weights_N).sum()


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


class CountedProducts(TorchDispatchMode):
    """Counts matrix products with more than one row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"mm", "addmm"} and args[-2].shape[0] > 1:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self._count(made.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(work: Callable[[], object]) -> int:
    with LiveBytes() as memory:
        work()
    return memory.peak


@KINDS
@TEMPERATURES
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_autograd(trained: bool, temperature: float, bias: bool) -> None:
    head = make_head(trained=trained, bias=bias)
    hidden_ND, targets_N = make_inputs()
    inputs = (hidden_ND, *head.parameters()) if trained else (hidden_ND,)
    expected = naive(head, hidden_ND, targets_N, temperature)
    found = head_logprobs(head, hidden_ND, targets_N, temperature, chunk_rows=5)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.entropy_N, expected.entropy_N, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        gradients(weighted(found), *inputs),
        gradients(weighted(expected), *inputs),
        atol=1e-12,
        rtol=0,
    )


@KINDS
def test_the_entropy_has_no_gradient(trained: bool) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()
    found = head_logprobs(head, hidden_ND, targets_N, 0.7)
    assert found.logprobs_N.requires_grad and not found.entropy_N.requires_grad


@KINDS
def test_gradients_agree_with_finite_differences(trained: bool) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()

    def logprobs(hidden_ND: Tensor) -> Tensor:
        return head_logprobs(head, hidden_ND, targets_N, 0.8, chunk_rows=4).logprobs_N

    assert torch.autograd.gradcheck(logprobs, (hidden_ND,))


@KINDS
@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 12, 13, 100])
def test_chunks_change_nothing(trained: bool, chunk_rows: int) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()
    inputs = (hidden_ND, *head.parameters()) if trained else (hidden_ND,)

    def run(rows: int | None) -> tuple[Tensor, ...]:
        found = head_logprobs(head, hidden_ND, targets_N, 0.6, chunk_rows=rows)
        return found.logprobs_N, found.entropy_N, *gradients(weighted(found), *inputs)

    torch.testing.assert_close(run(chunk_rows), run(None), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_of_the_softmax_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    head, (hidden_ND, targets_N) = make_head(dtype=dtype), make_inputs(dtype)

    def run() -> tuple[Tensor, ...]:
        found = head_logprobs(head, hidden_ND, targets_N, 0.9, chunk_rows=7)
        return found.logprobs_N, *gradients(weighted(found), hidden_ND)

    whole = run()
    monkeypatch.setattr(head_module, "CPU_BUDGET", LogitsBudget(chunk_bytes=2**20, block_bytes=4 * V * 2))
    torch.testing.assert_close(run(), whole, atol=1e-5, rtol=0)


@KINDS
def test_a_bf16_head_is_as_exact_as_its_logits(trained: bool) -> None:
    """Softmax and outputs are float32: the error is that of the product in bf16 and of the stored vector."""
    head, (hidden_ND, targets_N) = (
        make_head(dtype=torch.bfloat16, trained=trained),
        make_inputs(torch.bfloat16),
    )
    found = head_logprobs(head, hidden_ND, targets_N, 0.7, chunk_rows=5)
    assert found.logprobs_N.dtype == found.entropy_N.dtype == torch.float32
    same_logits = logits_logprobs(head(hidden_ND), targets_N, 0.7)
    torch.testing.assert_close(found.logprobs_N, same_logits.logprobs_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy_N, same_logits.entropy_N, atol=1e-5, rtol=0)
    (gradient_ND,) = gradients(weighted(found), hidden_ND)
    exact_ND = hidden_ND.detach().double().requires_grad_()
    exact = naive(make_head(dtype=torch.bfloat16).double(), exact_ND, targets_N, 0.7)
    (expected_ND,) = gradients(weighted(exact), exact_ND)
    assert gradient_ND.dtype == torch.bfloat16
    assert (gradient_ND.double() - expected_ND).norm() < 0.02 * expected_ND.norm()


def test_gradients_of_a_trained_bf16_head_are_summed_in_float32() -> None:
    """Summed in bf16, the small parts of later chunks would be rounded away."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    hidden_ND, targets_N = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.long)
    head_logprobs(head, hidden_ND, targets_N, chunk_rows=1).logprobs_N.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.tolist() == [[512.0], [-512.0]]


def test_a_frozen_head_costs_two_products() -> None:
    head, (hidden_ND, targets_N) = make_head(), make_inputs()
    with CountedProducts() as count:
        weighted(head_logprobs(head, hidden_ND, targets_N)).backward()
    assert count.seen.total() == 2


@KINDS
def test_without_a_gradient_there_is_one_product(trained: bool) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()
    with CountedProducts() as count, torch.no_grad():
        found = head_logprobs(head, hidden_ND, targets_N)
    assert count.seen.total() == 1
    assert not found.logprobs_N.requires_grad


def test_memory_depends_on_the_chunk_and_not_on_tokens_times_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, width, vocabulary = 512, 8, 8192
    monkeypatch.setattr(head_module, "CPU_BUDGET", LogitsBudget(chunk_bytes=1, block_bytes=1))
    logits_bytes = 4 * rows * vocabulary
    head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    hidden_ND, targets_N = torch.randn(rows, width, requires_grad=True), torch.zeros(rows, dtype=torch.long)

    def ours(chunk_rows: int) -> None:
        found = head_logprobs(head, hidden_ND, targets_N, chunk_rows=chunk_rows)
        found.logprobs_N.sum().backward()

    assert (
        peak_bytes(lambda: naive(head, hidden_ND, targets_N, 1.0).logprobs_N.sum().backward()) > logits_bytes
    )
    assert peak_bytes(lambda: ours(32)) < logits_bytes / 8
    # One buffer as wide as the vocabulary, and blocks of a row here.
    assert peak_bytes(lambda: ours(64)) - peak_bytes(lambda: ours(32)) == pytest.approx(
        logits_bytes / 16, rel=0.01
    )


def test_a_recomputed_head_keeps_no_logits_for_the_backward_pass() -> None:
    rows, width, vocabulary = 512, 8, 8192
    head = nn.Linear(width, vocabulary, bias=False)
    hidden_ND, targets_N = torch.randn(rows, width, requires_grad=True), torch.zeros(rows, dtype=torch.long)

    def work() -> None:
        head_logprobs(head, hidden_ND, targets_N, chunk_rows=16).logprobs_N.sum().backward()

    assert peak_bytes(work) < 4 * rows * vocabulary / 4


@KINDS
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_is_nan_and_leaves_the_others_alone(trained: bool, poison: float) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()
    clean = head_logprobs(head, hidden_ND, targets_N)
    (clean_ND,) = gradients(weighted(clean), hidden_ND)
    poisoned_ND = hidden_ND.detach().clone()
    poisoned_ND[4] = poison
    poisoned_ND.requires_grad_()
    found = head_logprobs(head, poisoned_ND, targets_N)
    others = torch.arange(N) != 4
    assert found.logprobs_N[4].isnan()
    assert found.entropy_N[4].isnan()
    torch.testing.assert_close(found.logprobs_N[others], clean.logprobs_N[others])
    (found_ND,) = gradients(weighted(found), poisoned_ND)
    torch.testing.assert_close(found_ND[others], clean_ND[others])


@KINDS
def test_one_logit_of_minus_infinity_is_enough(trained: bool) -> None:
    head, (hidden_ND, targets_N) = make_head(trained=trained), make_inputs()
    with torch.no_grad():
        head.weight[3] = 0
        head.weight[3, 0] = 1
        hidden_ND[:, 0] = 0
        hidden_ND[2, 0] = -1e308
        head.weight[:3, 0] = head.weight[4:, 0] = 0
        head.weight[3, 0] = 1e10
    found = head_logprobs(head, hidden_ND, targets_N)
    assert found.logprobs_N.isnan().nonzero().tolist() == [[2]]
    assert found.entropy_N.isnan().nonzero().tolist() == [[2]]


def test_large_logits_do_not_overflow() -> None:
    head, (hidden_ND, targets_N) = make_head(dtype=torch.float32), make_inputs(torch.float32)
    found = head_logprobs(head, hidden_ND * 1e6, targets_N)
    assert found.logprobs_N.isfinite().all()
    assert found.entropy_N.isfinite().all()


@KINDS
def test_no_tokens_give_no_values_and_no_gradient(trained: bool) -> None:
    head = make_head(trained=trained)
    hidden_ND = torch.empty(0, D, dtype=torch.float64, requires_grad=True)
    found = head_logprobs(head, hidden_ND, torch.empty(0, dtype=torch.long))
    assert found.logprobs_N.shape == found.entropy_N.shape == (0,)
    (gradient_ND,) = gradients(found.logprobs_N.sum(), hidden_ND)
    assert gradient_ND.shape == (0, D)


def test_a_head_with_an_adapter_is_run_as_it_is() -> None:
    base, (hidden_ND, targets_N) = make_head(bias=False), make_inputs()
    head = LoraLinear(base, "default", config=LoraConfig(r=2), r=2).double()
    torch.manual_seed(2)
    nn.init.normal_(head.lora_B["default"].weight)
    trained = [p for p in head.parameters() if p.requires_grad]
    assert len(trained) == 2
    expected = naive(head, hidden_ND, targets_N, 0.7)
    found = head_logprobs(head, hidden_ND, targets_N, 0.7, chunk_rows=5)
    torch.testing.assert_close(found.logprobs_N, expected.logprobs_N)
    torch.testing.assert_close(
        gradients(weighted(found), hidden_ND, *trained),
        gradients(weighted(expected), hidden_ND, *trained),
    )


def test_a_head_whose_forward_is_replaced_is_run_as_it_is() -> None:
    head, (hidden_ND, targets_N) = make_head(), make_inputs()
    plain = head_logprobs(head, hidden_ND, targets_N)
    original = head.forward
    head.forward = lambda hidden_ND: 2 * original(hidden_ND)
    found = head_logprobs(head, hidden_ND, targets_N)
    torch.testing.assert_close(found.logprobs_N, naive(head, hidden_ND, targets_N, 1.0).logprobs_N)
    assert not torch.allclose(found.logprobs_N, plain.logprobs_N)
