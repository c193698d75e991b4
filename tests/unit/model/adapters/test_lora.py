"""The arithmetic of a LoRA linear: against plain autograd, in every type, and what it keeps of the
forward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swarmnode.model.adapters.lora import LoraWeights, Segment, lora_linear, lora_linear_segments

K, N, TOKENS = 12, 20, 14
SEGMENTS = (Segment(0, 5, 1), Segment(5, 7, -1), Segment(7, 7, 2), Segment(7, 11, 0), Segment(11, 14, 1))
"""Adapter 1 twice, the base alone for two tokens, adapter 2 without any."""


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def adapters_of(ranks: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[LoraWeights]:
    return [
        LoraWeights(parameter(r, K, dtype=dtype), parameter(N, r, dtype=dtype), 0.5 + i)
        for i, r in enumerate(ranks)
    ]


def base(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(N, K, dtype=torch.float64).to(dtype), torch.randn(N, dtype=torch.float64).to(dtype)


def by_the_book(x: Tensor, weight: Tensor, bias: Tensor | None, adapter: LoraWeights) -> Tensor:
    return F.linear(x, weight, bias) + adapter.scaling * (x @ adapter.a_RK.t() @ adapter.b_NR.t())


def by_the_book_segments(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: list[LoraWeights], segments: tuple[Segment, ...]
) -> Tensor:
    flat, parts = x.reshape(-1, K), []
    for segment in segments:
        rows = flat[segment.start : segment.end]
        alone = segment.adapter < 0
        parts.append(
            F.linear(rows, weight, bias)
            if alone
            else by_the_book(rows, weight, bias, adapters[segment.adapter])
        )
    return torch.cat(parts).view(*x.shape[:-1], N)


def gradients(y: Tensor, of: list[Tensor]) -> list[Tensor | None]:
    torch.manual_seed(9)
    direction = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad(y, of, direction, allow_unused=True))


def far(ours: Tensor, exact: Tensor) -> float:
    """Distance relative to the size of what it should be."""
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).norm() / exact.norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(TOKENS,), (2, 7), (2, 1, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_one_adapter_is_the_closed_form_forward_and_backward(shape: tuple[int, ...], biased: bool) -> None:
    x, (weight, bias), (adapter,) = parameter(*shape, K), base(), adapters_of((4,))
    inputs = [x, adapter.a_RK, adapter.b_NR]
    ours = lora_linear(x, weight, bias if biased else None, adapter)
    exact = by_the_book(x, weight, bias if biased else None, adapter)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, inputs), gradients(exact, inputs), rtol=1e-12, atol=1e-12)


def test_gradcheck_agrees_for_one_adapter_and_for_several() -> None:
    x, (weight, bias), adapters = parameter(TOKENS, K), base(), adapters_of((4, 2, 3))
    weights = [w for adapter in adapters for w in (adapter.a_RK, adapter.b_NR)]

    def one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear(x, weight, bias, LoraWeights(a, b, 0.7))

    def several(x: Tensor, *flat: Tensor) -> Tensor:
        with_flat = [LoraWeights(flat[2 * i], flat[2 * i + 1], 0.5 + i) for i in range(3)]
        return lora_linear_segments(x, weight, bias, with_flat, SEGMENTS)

    assert torch.autograd.gradcheck(one, (x, *weights[:2]))
    assert torch.autograd.gradcheck(several, (x, *weights))


def test_each_segment_goes_through_its_own_adapter_whatever_the_ranks() -> None:
    x, (weight, bias), adapters = parameter(2, 7, K), base(), adapters_of((4, 2, 3))
    exact = by_the_book_segments(x, weight, bias, adapters, SEGMENTS)
    of = [x, *(w for adapter in adapters[:2] for w in (adapter.a_RK, adapter.b_NR))]
    exact_gradients = gradients(exact, of)
    ours = lora_linear_segments(x, weight, bias, adapters, SEGMENTS)
    torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(gradients(ours, of), exact_gradients, rtol=1e-7, atol=1e-7)


def test_an_adapter_without_tokens_gets_no_gradient_at_all() -> None:
    x, (weight, bias), adapters = parameter(TOKENS, K), base(), adapters_of((4, 2, 3))
    lora_linear_segments(x, weight, bias, adapters, SEGMENTS).sum().backward()
    assert [a.a_RK.grad is None for a in adapters] == [False, False, True]
    assert [a.b_NR.grad is None for a in adapters] == [False, False, True]


def test_no_tokens_and_no_adapters_are_fine() -> None:
    (weight, bias), adapters = base(), adapters_of((4,))
    assert lora_linear(torch.zeros(3, 0, K, dtype=torch.float64), weight, bias, adapters[0]).shape == (
        3,
        0,
        N,
    )
    x = parameter(TOKENS, K)
    y = lora_linear_segments(x, weight, bias, adapters, (Segment(0, TOKENS, -1),))
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    torch.testing.assert_close(gradients(y, [x]), gradients(F.linear(x, weight, bias), [x]))


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 1e-2),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float32, 2e-3),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_types_of_results_and_their_distance_to_float64(
    dtype: torch.dtype, adapter_dtype: torch.dtype, bound: float, several: bool
) -> None:
    x, (weight, bias), adapters = (
        parameter(TOKENS, K, dtype=dtype),
        base(dtype),
        adapters_of((4, 2), adapter_dtype),
    )
    segments = (Segment(0, 6, 0), Segment(6, TOKENS, 1)) if several else (Segment(0, TOKENS, 0),)
    doubles = [
        LoraWeights(
            a.a_RK.detach().double().requires_grad_(), a.b_NR.detach().double().requires_grad_(), a.scaling
        )
        for a in adapters
    ]
    x_exact = x.detach().double().requires_grad_()
    exact = by_the_book_segments(x_exact, weight.double(), bias.double(), doubles, segments)
    ours = (
        lora_linear_segments(x, weight, bias, adapters, segments)
        if several
        else lora_linear(x, weight, bias, adapters[0])
    )
    used = 2 if several else 1
    of = [x, *(w for a in adapters[:used] for w in (a.a_RK, a.b_NR))]
    of_exact = [x_exact, *(w for a in doubles[:used] for w in (a.a_RK, a.b_NR))]
    found = gradients(ours, of)
    assert ours.dtype == dtype
    assert [g.dtype for g in found if g is not None] == [dtype] + [adapter_dtype] * 2 * used
    assert far(ours, exact) < bound
    for gradient, exact_gradient in zip(found, gradients(exact, of_exact), strict=True):
        assert gradient is not None and exact_gradient is not None
        assert far(gradient, exact_gradient) < bound


def test_a_wide_bfloat16_layer_takes_the_other_order_of_work_to_the_same_gradients() -> None:
    x = (0.1 * torch.randn(32, 512)).bfloat16().requires_grad_()
    weight, a, b = (0.05 * torch.randn(shape) for shape in ((512, 512), (4, 512), (512, 4)))
    adapter = LoraWeights(a.requires_grad_(), b.requires_grad_(), 2.0)
    ours = gradients(lora_linear(x, weight.bfloat16(), None, adapter), [x, a, b])
    exact_x = x.detach().float().requires_grad_()
    exact = gradients(by_the_book(exact_x, weight, None, adapter), [exact_x, a, b])
    assert all(far(g, e) < 2e-2 for g, e in zip(ours, exact, strict=True) if g is not None and e is not None)


def kept(call: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps for the backward of `call`."""
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return shapes


def test_only_x_and_s_are_kept_besides_the_parameters() -> None:
    x, (weight, bias), adapters = parameter(TOKENS, K), base(), adapters_of((4, 2, 3))
    parameters = [tuple(w.shape) for a in adapters for w in (a.a_RK, a.b_NR)] + [tuple(weight.shape)]
    one = kept(lambda: lora_linear(x, weight, bias, adapters[0]))
    several = kept(lambda: lora_linear_segments(x, weight, bias, adapters, SEGMENTS))
    assert [shape for shape in one if shape not in parameters] == [(TOKENS, K), (TOKENS, 4)]
    assert [shape for shape in several if shape not in parameters] == [(TOKENS, K), (TOKENS, 4)]


def test_x_itself_is_kept_not_a_copy() -> None:
    x, (weight, bias), (adapter,) = parameter(2, 7, K), base(), adapters_of((4,))
    y = lora_linear(x, weight, bias, adapter)
    assert y.grad_fn is not None
    assert x.data_ptr() in {t.data_ptr() for t in y.grad_fn.saved_tensors}  # pyright: ignore


def test_what_needs_no_gradient_gets_none() -> None:
    (weight, bias), (adapter,) = base(), adapters_of((4,))
    x = torch.randn(TOKENS, K, dtype=torch.float64)
    lora_linear(x, weight, bias, adapter).sum().backward()
    assert x.grad is None and adapter.a_RK.grad is not None and adapter.b_NR.grad is not None
    frozen = LoraWeights(adapter.a_RK.detach(), adapter.b_NR.detach(), 1.0)
    x.requires_grad_()
    y = lora_linear(x, weight, bias, frozen)
    torch.testing.assert_close(gradients(y, [x]), gradients(by_the_book(x, weight, bias, frozen), [x]))
    with torch.no_grad():
        assert not lora_linear(x, weight, bias, adapter).requires_grad


@pytest.mark.parametrize("several", [False, True])
def test_a_base_that_wants_a_gradient_is_refused_rather_than_left_without(several: bool) -> None:
    x, (weight, bias), adapters = parameter(TOKENS, K), base(), adapters_of((4, 2, 3))
    for trained in (weight.clone().requires_grad_(), weight):
        b = bias if trained.requires_grad else bias.clone().requires_grad_()
        y = (
            lora_linear_segments(x, trained, b, adapters, SEGMENTS)
            if several
            else lora_linear(x, trained, b, adapters[0])
        )
        with pytest.raises(RuntimeError, match="frozen base"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_to_the_same_gradients(reentrant: bool) -> None:
    x, (weight, bias), adapters = parameter(TOKENS, K), base(), adapters_of((4, 2, 3))
    of = [x, adapters[0].a_RK, adapters[1].b_NR]

    def layer(x: Tensor) -> Tensor:
        return lora_linear_segments(x, weight, bias, adapters, SEGMENTS).sin()

    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        for tensor in of:
            tensor.grad = None
        run(x).sum().backward()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        found.append([tensor.grad for tensor in of])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x, (weight, bias), (adapter,) = parameter(TOKENS, K), base(), adapters_of((4,))
    (first,) = torch.autograd.grad(lora_linear(x, weight, bias, adapter).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
