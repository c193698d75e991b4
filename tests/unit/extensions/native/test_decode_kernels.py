"""A decode step by the C kernels is the one by torch's operations."""

from collections.abc import Sequence

import pytest
import torch

from swarmnode.cpu_kernels import Streams
from swarmnode.extensions.native import compiler
from swarmnode.extensions.native import decode_kernels as decode
from swarmnode.rollout.decode import cached_attention as attention
from swarmnode.rollout.decode.cached_attention import (
    CacheAttention,
    KernelAttention,
    PromptAttention,
    Scratch,
    cache_attention,
)
from swarmnode.rollout.decode.decoder import Heads, Rotary, shared_by_heads
from swarmnode.rollout.decode.matrix import RmsNorm
from swarmnode.rollout.decode.sampler import RUN, Sampler
from swarmnode.rollout.decode.slots import Band, cache_size
from swarmnode.rollout.decode.weights import Shape
from swarmnode.rollout.engine import SamplingParams

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler on this machine")

CPU = torch.device("cpu")
TICK = 100
LAYERS = 2
WIDTHS = (16, 40, 128)
POSITIONS = ((0, 15, 7), (39, 16, 15), (64, 63, 31, 100))
"""In the bands, first and last columns of each and both sides of what is summed up at once among them."""

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
NORMS = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
SIZES = pytest.mark.parametrize(
    ("group", "size"), [(1, 64), (2, 64), (4, 64), (3, 32), (1, 128), (4, 128), (2, 16), (3, 40), (1, 6)]
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of(group: int, size: int, **scores: float | None) -> Heads:
    shape = Shape(LAYERS, 2 * group, 2, size, 2 * group * size, 8, 5, 1e-6, **scores)
    return Heads(shape, RmsNorm(1e-6, CPU), CPU)


def rotary(size: int) -> Rotary:
    made = Rotary(10.0 ** -torch.linspace(0, 3, size // 2), 1.0)
    made.reserve(max(WIDTHS))
    return made


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # In bfloat16 the operations round the shares of the values, a product of two of its numbers is exact.
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


def filled_bands(heads: Heads, dtype: torch.dtype) -> list[Band]:
    bands: list[Band] = []
    for width, positions in zip(WIDTHS, POSITIONS, strict=True):
        band = Band(heads.shape, width, 8, dtype, CPU)
        cache = random(*cache_size(heads.shape, len(positions), width), seed=width).to(dtype)
        band.add(list(range(len(positions))), [TICK - position for position in positions], cache)
        bands.append(band)
    return bands


@TYPES
@NORMS
@SIZES
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 3)], ids=["narrow", "odd", "all"])
def test_attention_over_the_cache_is_the_one_of_torch(
    dtype: torch.dtype, normed: bool, group: int, size: int, which: slice
) -> None:
    heads = heads_of(group, size)
    scale = random(group + 1, size, seed=9).abs() if normed else None
    positions = torch.tensor([position for own in POSITIONS[which] for position in own])
    rotation = rotary(size).at(positions)
    ours, theirs = filled_bands(heads, dtype)[which], filled_bands(heads, dtype)[which]
    by_kernel = KernelAttention(heads, ours, positions, rotation)
    by_torch = CacheAttention(heads, theirs, TICK, positions, rotation, Scratch(CPU))
    for layer in range(LAYERS):
        fused = random(len(positions), heads.layout.fused, seed=layer).to(dtype)
        found = by_kernel(layer, fused.clone(), scale)
        with compiler.turned_off():
            expected = by_torch(layer, fused.clone(), scale)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **tolerance(dtype))
    for band, same in zip(ours, theirs, strict=True):
        # Keys are formed in float32 by both and rounded once; all else is copied or untouched.
        torch.testing.assert_close(band.cache, same.cache, atol=1e-5, rtol=1e-2)
        torch.testing.assert_close(band.cache[1::2], same.cache[1::2], atol=0, rtol=0)


@TYPES
@pytest.mark.parametrize("window", [None, 1, 9, 16, 40, 500])
@pytest.mark.parametrize("cap", [None, 0.4, 30.0])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (3, 32), (2, 40)])
def test_a_window_a_cap_and_a_scale_are_those_of_torch(
    dtype: torch.dtype, window: int | None, cap: float | None, group: int, size: int
) -> None:
    heads = heads_of(group, size, score_scale=0.3, score_cap=cap)
    positions = torch.tensor([position for own in POSITIONS for position in own])
    rotation = rotary(size).at(positions)
    bands = filled_bands(heads, dtype)
    by_kernel = KernelAttention(heads, bands, positions, rotation, window)
    by_torch = CacheAttention(
        heads, filled_bands(heads, dtype), TICK, positions, rotation, Scratch(CPU), window
    )
    fused = random(len(positions), heads.layout.fused).to(dtype)
    found = by_kernel(1, fused.clone(), None)
    with compiler.turned_off():
        expected = by_torch(1, fused.clone(), None)
    # The plain one, a row and a head at a time.
    row, own = 4, POSITIONS[1][1]
    keys, values = (bands[1].cache[table, 1, 0].float() for table in (2, 3))
    query = heads.split(fused[row : row + 1], None, shared_by_heads(rotation[row : row + 1]))[0].flatten()[
        :size
    ]
    first = 0 if window is None else max(0, own + 1 - window)
    scores = 0.3 * keys[first : own + 1] @ query
    shares = (scores if cap is None else cap * torch.tanh(scores / cap)).softmax(-1)
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    plain = (shares @ values[first : own + 1]).to(dtype)
    torch.testing.assert_close(found[row, :size], plain, **tolerance(dtype))


@TYPES
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("cap", [None, 0.4])
def test_prompts_through_a_window_and_under_a_cap_are_the_plain_ones(
    dtype: torch.dtype, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 50)  # so few that there are several pieces
    prompts, width, group, size = 3, 21, 2, 16
    heads = heads_of(group, size, score_scale=0.3, score_cap=cap)
    fused = random(prompts * width, heads.layout.fused).to(dtype)
    cache = torch.empty(cache_size(heads.shape, prompts, width), dtype=dtype)
    rotation = rotary(size).until(width)
    found = PromptAttention(heads, rotation, cache, window)(0, fused.clone(), None)
    queries = heads.split(fused, None, shared_by_heads(rotation))[0].to(dtype).float()[1, :, 1, 0]
    scores = 0.3 * queries @ cache[0, 1, 1].float().T
    column = torch.arange(width)
    hidden = (column > column[:, None]) | (column <= column[:, None] - (window or width))
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    plain = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ cache[1, 1, 1].float()
    start = group * size  # the second key head's first query, of the second prompt
    own = found[width : 2 * width, start : start + size]
    torch.testing.assert_close(own, plain.to(dtype), **tolerance(dtype))


@TYPES
@NORMS
@SIZES
def test_attention_over_prompts_is_the_one_of_torch(
    dtype: torch.dtype, normed: bool, group: int, size: int
) -> None:
    prompts, width = 3, 21
    heads = heads_of(group, size)
    scale = random(group + 1, size, seed=9).abs() if normed else None
    fused = random(prompts * width, heads.layout.fused).to(dtype)
    caches = [torch.empty(cache_size(heads.shape, prompts, width), dtype=dtype) for _ in range(2)]
    ours, theirs = (PromptAttention(heads, rotary(size).until(width), cache) for cache in caches)
    found = ours(1, fused.clone(), scale)
    with compiler.turned_off():
        expected = theirs(1, fused.clone(), scale)
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    torch.testing.assert_close(caches[0][2], caches[1][2], atol=1e-5, rtol=1e-2)
    assert torch.equal(caches[0][3], caches[1][3])


def test_the_kernel_is_used_where_there_is_one_for_the_type() -> None:
    heads = heads_of(2, 16)
    for dtype, kind in ((torch.bfloat16, KernelAttention), (torch.float16, CacheAttention)):
        bands = filled_bands(heads, dtype)[:1]
        positions = torch.tensor(POSITIONS[0])
        made = cache_attention(heads, bands, TICK, positions, rotary(16).at(positions), Scratch(CPU))
        assert isinstance(made, kind)
    with compiler.turned_off():
        bands = filled_bands(heads, torch.bfloat16)[:1]
        made = cache_attention(heads, bands, TICK, positions, rotary(16).at(positions), Scratch(CPU))
    assert isinstance(made, CacheAttention)


@pytest.mark.parametrize("positions", [(0, 16, 3), (-1, 2, 3)])
def test_a_position_outside_of_the_cache_is_refused(positions: Sequence[int]) -> None:
    heads = heads_of(1, 64)
    cache, rotation = torch.zeros(cache_size(heads.shape, 3, 16)), torch.zeros(3, 64)
    with pytest.raises(ValueError, match="are not in a cache"):
        decode.CachedRows(heads.layout, cache, torch.tensor(positions), rotation)


@pytest.mark.parametrize(("window", "cap"), [(0, None), (-3, None), (None, 0.0), (None, -1.0)])
def test_a_window_or_a_cap_through_which_nothing_is_seen_is_refused(
    window: int | None, cap: float | None
) -> None:
    heads = heads_of(1, 64, score_cap=cap)
    cache, rotation = torch.zeros(cache_size(heads.shape, 3, 16)), torch.zeros(3, 64)
    with pytest.raises(ValueError, match="nothing is seen"):
        decode.CachedRows(heads.layout, cache, torch.tensor([1, 2, 3]), rotation, window)


def test_more_rows_than_places_are_refused() -> None:
    heads = heads_of(1, 64)
    cache, rotation = torch.zeros(cache_size(heads.shape, 2, 16)), torch.zeros(3, 64)
    with pytest.raises(ValueError, match="are not in a cache"):
        decode.CachedRows(heads.layout, cache, torch.zeros(3, dtype=torch.int64), rotation)


def test_tensors_of_other_sizes_types_and_strides_are_refused() -> None:
    heads = heads_of(1, 64)
    cache = torch.zeros(cache_size(heads.shape, 3, 16))
    rows = decode.CachedRows(heads.layout, cache, torch.tensor([1, 2, 3]), torch.zeros(3, 64))
    fused, attended = torch.zeros(3, heads.layout.fused), torch.zeros(3, 128)
    rows.attend(LAYERS - 1, fused, None, attended)
    wide = torch.zeros(3, 2 * heads.layout.fused)
    for wrong in (fused[:2], fused.bfloat16(), wide[:, : heads.layout.fused]):
        with pytest.raises(ValueError, match="not"):
            rows.attend(0, wrong, None, attended)
    with pytest.raises(ValueError, match="not"):
        rows.attend(0, fused, None, attended[:, :64])
    with pytest.raises(ValueError, match="not"):
        rows.attend(0, fused, torch.ones(2, 32), attended)
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match="no tables"):
            rows.attend(layer, fused, None, attended)


# Sampling


def sampled(
    logits: torch.Tensor, params: Sequence[SamplingParams], steps: int = 6
) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = Sampler(logits.shape[1], len(params) + 2, CPU)
    sampler.write(torch.arange(len(params)), params, list(range(len(params))))
    drawn = [sampler.sample(logits) for _ in range(steps)]
    return torch.stack([tokens for tokens, _ in drawn]), torch.stack([logprobs for _, logprobs in drawn])


@pytest.mark.parametrize("vocab", [1, 5, RUN - 1, RUN, 3 * RUN + 7, 20_000])
@pytest.mark.parametrize("temperatures", [(1.0,), (0.0,), (0.7, 0.0, 1.0, 1.9)])
def test_the_same_tokens_are_sampled_as_by_torch(vocab: int, temperatures: Sequence[float]) -> None:
    rows = 12
    params = [SamplingParams(1, temperatures[row % len(temperatures)], seed=row) for row in range(rows)]
    logits = random(rows, vocab) * 3
    tokens, logprobs = sampled(logits, params)
    with compiler.turned_off():
        assert torch.equal(tokens, sampled(logits, params)[0])
    # Nearer to the truth than torch's way, which takes the logarithm of a rounded probability.
    scaled = logits.double() / torch.tensor([[setting.temperature or 1.0] for setting in params])
    exact = scaled.log_softmax(-1).expand(len(tokens), -1, -1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=0)


def test_rows_of_logits_may_be_one_row_or_lie_apart() -> None:
    params = [SamplingParams(1, seed=row) for row in range(5)]
    row, table = random(1, 90), random(5, 200)
    for logits in (row.expand(5, -1), table[:, :90], table[:, ::2]):
        assert torch.equal(sampled(logits, params)[0], sampled(logits.contiguous(), params)[0])


def test_impossible_tokens_are_never_sampled_and_the_only_one_always() -> None:
    logits = torch.full((3, 130), float("-inf"))
    logits[:, 77] = -5.0
    tokens, logprobs = sampled(logits, [SamplingParams(1, 0.5 * row, seed=row) for row in range(3)])
    assert tokens.unique().tolist() == [77]
    assert logprobs.abs().max() < 1e-6


@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), float("inf")])
def test_a_row_of_broken_logits_has_no_probability(broken: float) -> None:
    """Which the engine refuses to go on with; its neighbours are not touched."""
    logits = random(3, 70)
    healthy = sampled(logits, [SamplingParams(1, seed=row) for row in range(3)])[0]
    logits[1, 30] = broken
    tokens, logprobs = sampled(logits, [SamplingParams(1, seed=row) for row in range(3)])
    assert logprobs[:, 1].isnan().all()
    assert ((tokens >= 0) & (tokens < 70)).all()
    assert torch.equal(tokens[:, ::2], healthy[:, ::2])


def test_a_filter_between_two_steps_does_not_move_a_stream() -> None:
    """With a filter in any row torch samples for all of them."""
    logits = random(2, 40)
    plain, mixed = Sampler(40, 2, CPU), Sampler(40, 2, CPU)
    for sampler, other in ((plain, SamplingParams(1)), (mixed, SamplingParams(1, top_p=0.5))):
        sampler.write(torch.tensor([0, 1]), [SamplingParams(1, seed=4), other], [2, 2])
    for _ in range(4):
        assert int(plain.sample(logits)[0][0]) == int(mixed.sample(logits)[0][0])


def test_words_that_are_not_there_are_not_read() -> None:
    words, offsets = torch.ones(2, 20, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64)
    logits, setting = torch.zeros(1, 5), torch.ones(1)
    tokens, _ = decode.sample(logits, setting, setting, Streams(words, 8, (1, 3), 2**-31, offsets))
    assert tokens.tolist() == [0]
    assert offsets.flatten().tolist() == [1, 3]
    for windows in (16, 7, 0):
        with pytest.raises(ValueError, match="no"):
            decode.sample(logits, setting, setting, Streams(words, windows, (1, 3), 2**-31, offsets))
