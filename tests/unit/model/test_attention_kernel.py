"""Packed attention by the C kernel: what torch computes, and what float64 says, forward and backward."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.cpu_kernels import Sequences
from swarmnode.extensions.native import compiler
from swarmnode.model import attention
from swarmnode.model.attention import (
    MOST_KEYS,
    AttentionSettings,
    by_boxes,
    by_flash,
    packed_attention,
)
from swarmnode.model.layout import PackedLayout, packed_layout
from tests.unit.model.flash_by_hand import flash_by_hand

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler on this machine")


def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, window: int | None, scale: float | None
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention.by_kernel(query, key, value, layout, window, scale)


CPU = torch.device("cpu")
MIXED = [7, 1, 19, 7, 3, 12, 1, 9]
"""Tokens of the runs of a row."""
SHARED = [None, 0, 0, None, None, 4, 3, 4]
ALONE: list[int | None] = [None] * len(MIXED)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
PROMPTS = pytest.mark.parametrize("prompts", [ALONE, SHARED], ids=["alone", "shared"])


def row_of(
    tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """Queries, keys and values."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, count, size, generator=draw).to(dtype) for count in (heads, groups, groups)]


def exactly(layout: PackedLayout, window: int | None, scale: float, grouped: bool) -> Attend:
    """The definition."""
    asked = AttentionSettings(scale, window, grouped)
    return lambda *row: by_flash(*row, layout, asked, kernel=flash_by_hand)


def with_gradients(attend: Attend, row: Sequence[Tensor]) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    leaves = [tensor.detach().requires_grad_() for tensor in row]
    found = attend(*leaves)
    towards = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found).cos()
    gradients = torch.autograd.grad(found, leaves, towards.to(found.dtype))
    return [found.detach(), *gradients]


def assert_exact(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Arithmetic is in float32. In bfloat16 the output is rounded before the backward pass reads it again.
    What cancels out in a gradient is of the size of the others."""
    norm = max(float(wide.norm()) for wide in exact)
    most = max(float(wide.abs().max()) for wide in exact)
    for one, wide in zip(found, exact, strict=True):
        assert one.shape == wide.shape and wide.dtype is torch.float64
        bound = 5e-3 if one.dtype is torch.bfloat16 else 2e-6
        assert (one.double() - wide).norm() <= bound * norm
        assert (one.double() - wide).abs().max() <= 4 * bound * most


def assert_kernel_is_exact(
    lengths: Sequence[int],
    prompts: Sequence[int | None] | None,
    *,
    heads: int = 4,
    groups: int = 2,
    size: int = 8,
    window: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    row = row_of(sum(lengths), heads, groups, size, dtype)
    layout = packed_layout(lengths, CPU, prompts)
    found = with_gradients(lambda *row: by_kernel(*row, layout, window, scale), row)
    assert all(one.dtype is dtype for one in found)
    definition = exactly(layout, window, size**-0.5 if scale is None else scale, heads != groups)
    assert_exact(found, with_gradients(definition, [tensor.double() for tensor in row]))


@TYPES
@PROMPTS
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (4, 1)])
def test_output_and_gradients_are_exact(
    heads: int, groups: int, window: int | None, prompts: list[int | None], dtype: torch.dtype
) -> None:
    assert_kernel_is_exact(MIXED, prompts, heads=heads, groups=groups, window=window, dtype=dtype)


@TYPES
@pytest.mark.parametrize("size", [8, 31, 32, 40, 64, 128])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_may_be_of_any_size_and_scores_of_any_scale(
    size: int, scale: float | None, dtype: torch.dtype
) -> None:
    assert_kernel_is_exact(MIXED, SHARED, size=size, scale=scale, window=20, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 97])
@pytest.mark.parametrize("window", [None, 3, 32, 33])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_sequence_may_end_anywhere_in_a_block_and_begin_anywhere_behind_a_prompt(
    length: int, window: int | None, heads: int
) -> None:
    assert_kernel_is_exact([length], None, heads=heads, groups=1, window=window)
    assert_kernel_is_exact([length, 1, 5], [None, 0, 0], heads=heads, groups=1, window=window)
    assert_kernel_is_exact([1, length, 2], [None, 0, None], heads=heads, groups=1, window=window)


@pytest.mark.parametrize("window", [None, 300])
def test_the_longest_sequences_are_as_exact_as_short_ones(window: int | None) -> None:
    assert_kernel_is_exact([500, MOST_KEYS - 500, 3, 1], [None, 0, 0, None], size=32, window=window)


@PROMPTS
@pytest.mark.parametrize("window", [None, 4])
def test_the_attention_of_a_model_is_the_one_of_torch(prompts: list[int | None], window: int | None) -> None:
    """Asked for in the same way, by the kernel and by SDPA."""
    layout = packed_layout(MIXED, CPU, prompts)
    asked = AttentionSettings(None, window, grouped=True)
    row = row_of(sum(MIXED), 4, 2, 16)
    by_ours = with_gradients(lambda *row: by_boxes(*row, layout, asked), row)
    with compiler.turned_off():
        by_torch = with_gradients(lambda *row: by_boxes(*row, layout, asked), row)
    for found, expected in zip(by_ours, by_torch, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Types of the rows that the kernel computed."""
    calls: list[torch.dtype] = []

    def call(query: Tensor, *others: Any) -> Tensor:
        calls.append(query.dtype)
        return on_the_kernel(query, *others)

    on_the_kernel = attention.by_kernel
    monkeypatch.setattr(attention, "by_kernel", call)
    return calls


def test_only_what_the_kernel_does_sooner_than_torch_is_left_to_it(
    kernel_calls: list[torch.dtype],
) -> None:
    def calls_of(dtype: torch.dtype, longest: int = 40, value_size: int = 8) -> list[torch.dtype]:
        kernel_calls.clear()
        query, key, value = row_of(longest + 2, 2, 1, 8, dtype)
        value = value[..., :1].expand(-1, -1, value_size).contiguous()
        layout = packed_layout([longest - 1, 1, 2], CPU, [None, 0, None])
        assert by_boxes(query, key, value, layout, AttentionSettings(None, None, True)).numel()
        return kernel_calls

    single, half = torch.float32, torch.bfloat16
    assert calls_of(single) == calls_of(single, MOST_KEYS) == [single]
    assert calls_of(single, MOST_KEYS + 1) == []
    assert calls_of(single, value_size=4) == calls_of(torch.float64) == []
    assert calls_of(half) == [half]
    with compiler.turned_off():
        assert calls_of(single) == []


Views = Callable[[Tensor], Tensor]
"""A row [T, H, E] as a part of something else."""
VIEWS: dict[str, Views] = {
    "heads first": lambda row: row.transpose(0, 1).contiguous().transpose(0, 1),
    "in a product": lambda row: torch.cat([row + 1, row, row - 1], 1)[:, row.shape[1] : 2 * row.shape[1]],
    "numbers first": lambda row: row.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every second": lambda row: row.repeat_interleave(2, 2)[..., ::2],
}


@TYPES
@pytest.mark.parametrize("view", list(VIEWS.values()), ids=list(VIEWS))
def test_tensors_may_lie_as_they_like(view: Views, dtype: torch.dtype) -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    row = row_of(sum(MIXED), 4, 2, 40, dtype)
    plain = with_gradients(lambda *row: by_kernel(*row, layout, None, None), row)
    for changed in range(3):
        views = [view(tensor) if number == changed else tensor for number, tensor in enumerate(row)]
        assert not views[changed].is_contiguous()
        for found, expected in zip(
            with_gradients(lambda *row: by_kernel(*row, layout, None, None), views), plain, strict=True
        ):
            assert torch.equal(found, expected)


@TYPES
def test_a_gradient_may_lie_as_it_likes(dtype: torch.dtype) -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    row = [tensor.requires_grad_() for tensor in row_of(sum(MIXED), 4, 2, 8, dtype)]
    towards = row_of(sum(MIXED), 4, 4, 8, dtype, seed=1)[0]
    found = by_kernel(*row, layout, None, None)
    plain = torch.autograd.grad(found, row, towards, retain_graph=True)
    for view in VIEWS.values():
        assert all(map(torch.equal, torch.autograd.grad(found, row, view(towards), retain_graph=True), plain))
    # As `sum` makes it: one number for all.
    ones, plain_ones = torch.ones((), dtype=dtype).expand_as(found), torch.ones_like(found)
    of_ones = torch.autograd.grad(found, row, plain_ones, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(found, row, ones), of_ones))


def test_rows_as_transformers_and_our_layers_hand_them_over_give_the_same(
    kernel_calls: list[torch.dtype],
) -> None:
    """[1, H, T, E]: theirs are contiguous after the rotation, ours are views of [T, H, E]."""
    layout = packed_layout(MIXED, CPU, SHARED)
    row = row_of(sum(MIXED), 4, 2, 16)

    def attend(*row: Tensor) -> Tensor:
        return packed_attention(None, SimpleNamespace(), *row, None, packed_layout=layout)[0]

    ours = attend(*(tensor[None].transpose(1, 2) for tensor in row))
    theirs = attend(*(tensor[None].transpose(1, 2).contiguous() for tensor in row))
    assert torch.equal(ours, theirs) and len(kernel_calls) == 2
    assert torch.equal(ours[0], by_kernel(*row, layout, None, None))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none_and_changes_no_other(frozen: int) -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    row = row_of(sum(MIXED), 4, 2, 8)
    expected = with_gradients(lambda *row: by_kernel(*row, layout, None, None), row)[1:]
    leaves = [tensor.clone().requires_grad_(number != frozen) for number, tensor in enumerate(row)]
    found = by_kernel(*leaves, layout, None, None)
    found.backward(torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found).cos().float())
    assert leaves[frozen].grad is None
    for number, leaf in enumerate(leaves):
        assert number == frozen or torch.equal(leaf.grad, expected[number])


@TYPES
@pytest.mark.parametrize(("run", "seeing"), [(0, {0, 1, 2}), (2, {2}), (4, {4, 5, 7}), (6, {6}), (3, {3, 6})])
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_no_sequence_sees_another_whatever_is_in_it(
    run: int, seeing: set[int], value: float, dtype: torch.dtype
) -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    row = row_of(sum(MIXED), 4, 2, 40, dtype)
    before = with_gradients(lambda *row: by_kernel(*row, layout, 5, None), row)
    start = sum(MIXED[:run])
    for tensor in row:
        tensor[start : start + MIXED[run]] += value
    after = with_gradients(lambda *row: by_kernel(*row, layout, 5, None), row)
    # Gradients flow back: of a prompt from its completions. Groups are what does not touch.
    touched = next(group for group in ({0, 1, 2}, {3, 6}, {4, 5, 7}) if run in group)
    for which, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = {
            index
            for index, (one, other) in enumerate(zip(old.split(MIXED), new.split(MIXED), strict=True))
            if not torch.equal(one, other)
        }
        assert changed == seeing if which == 0 and value == 1.0 else changed <= touched, which


def test_no_token_sees_a_later_one_or_one_before_its_window() -> None:
    layout = packed_layout([40, 30], CPU, [None, 0])
    query, key, value = row_of(70, 2, 1, 8)
    before = by_kernel(query, key, value, layout, 6, None)
    key[50], value[50] = 9.0, 9.0
    changed = (by_kernel(query, key, value, layout, 6, None) != before).any(2).any(1)
    assert changed.nonzero()[:, 0].tolist() == list(range(50, 56))
    key[38], value[38] = 9.0, 9.0
    changed = (by_kernel(query, key, value, layout, 6, None) != before).any(2).any(1)
    assert changed.nonzero()[:, 0].tolist() == [38, 39, 40, 41, 42, 43, *range(50, 56)]


@TYPES
@pytest.mark.parametrize("size", [1e2, 1e4, 1e-20])
def test_scores_may_be_as_large_as_they_like(size: float, dtype: torch.dtype) -> None:
    """Shares of 0 and 1: nothing overflows, and a query that sees one key only gets its value."""
    layout = packed_layout(MIXED, CPU, SHARED)
    query, key, value = row_of(sum(MIXED), 4, 2, 16, dtype)
    row = [query * size, key, value]
    found = with_gradients(lambda *row: by_kernel(*row, layout, None, None), row)
    assert all(bool(one.isfinite().all()) for one in found)
    exact = exactly(layout, None, 0.25, True)(*(tensor.double() for tensor in row))
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-2, atol=2e-2)
    assert torch.equal(found[0][0, ::2], value[0])


def test_the_same_row_gives_the_same_bits_every_time() -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    row = row_of(sum(MIXED), 4, 2, 64)
    first, second = (with_gradients(lambda *row: by_kernel(*row, layout, None, None), row) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_would_be_read_from_elsewhere_is_refused() -> None:
    layout = packed_layout(MIXED, CPU, SHARED)
    query, key, value = row_of(sum(MIXED), 4, 2, 8)
    for row in (
        (query[:-1], key[:-1], value[:-1]),
        (query, key[:-1], value),
        (query, key, value[..., :4]),
        (query, key[:, :1], value),
        (query[:, :3], key, value),
        (query, key.bfloat16(), value),
        (query, key, value.bfloat16()),
        (query[..., :4], key, value),
    ):
        with pytest.raises(ValueError, match=r"not|for"):
            by_kernel(*row, layout, None, None)


def test_sequences_that_leave_the_row_are_refused() -> None:
    def sequences(queries: list[int], keys: list[int], tokens: list[int], longest: int = 5) -> Sequences:
        return Sequences(torch.tensor(queries), torch.tensor(keys), torch.tensor(tokens), longest, tokens=5)

    assert sequences([0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, 4])
    for queries, keys, tokens, longest in (
        ([0, 2, 6], [0, 2, 7], [0, 1, 0, 1, 2, 3, 4], 5),
        ([0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, 5], 5),
        ([0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, -1], 5),
        ([0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3], 5),
        ([0, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, 4], 4),
        ([0, 2, 5], [0, 1, 6], [0, 0, 1, 2, 3, 4], 5),
        ([0, 6, 5], [0, 6, 6], [0, 1, 0, 1, 2, 3], 6),
        ([1, 2, 5], [0, 2, 7], [0, 1, 0, 1, 2, 3, 4], 5),
    ):
        with pytest.raises(ValueError, match=r"not in a row|strided"):
            sequences(queries, keys, tokens, longest)


@st.composite
def rows_of_runs(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    prompts: list[int | None] = []
    for run in range(len(lengths)):
        begun = [before for before in range(run) if prompts[before] is None]
        prompts.append(draw(st.sampled_from([None, *begun])))
    return lengths, prompts


@settings(max_examples=60)
@given(
    runs=rows_of_runs(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 1), (3, 1), (2, 2), (4, 2), (6, 2)]),
    size=st.integers(1, 70),
    window=st.none() | st.integers(1, 80),
    scale=st.none() | st.floats(0.01, 1.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_row_is_attended_to_exactly(
    runs: tuple[list[int], list[int | None]],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    scale: float | None,
    dtype: torch.dtype,
) -> None:
    lengths, prompts = runs
    assert_kernel_is_exact(
        lengths, prompts, heads=heads[0], groups=heads[1], size=size, window=window, scale=scale, dtype=dtype
    )
