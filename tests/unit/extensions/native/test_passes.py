"""Each pass of the C kernels is plain torch in float64, rounded once."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.extensions.native import compiler, passes

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler on this machine")

EPS = 1e-6
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
WIDTHS = pytest.mark.parametrize("width", [1, 7, 32, 33, 255])
SCALES = pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
ROWS = 5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """The kernels compute in float32 and round the result: half of 2^-8 in bfloat16."""
    rtol, atol = (2**-8, 1e-5) if found.dtype is torch.bfloat16 else (1e-5, 2e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol, equal_nan=True)


def gradient(of: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    """By autograd, in float64."""
    wide = x.double().requires_grad_()
    return torch.autograd.grad(of(wide), wide, dy.double())[0]


def norm_of(x: Tensor, scale: Tensor | None = None) -> Tensor:
    x = x.double()
    xhat = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return xhat if scale is None else xhat * scale.double()


def scale_of(width: int, dtype: torch.dtype) -> Tensor:
    """As models have it: a parameter of the type of the model."""
    return (1 + 0.3 * random(width, seed=7)).to(dtype).requires_grad_()


@TYPES
@WIDTHS
def test_a_norm_divides_by_the_root_mean_square_and_scales(width: int, dtype: torch.dtype) -> None:
    x, scale = 3 * random(ROWS, width, dtype=dtype), scale_of(width, dtype)
    assert_rounded_once(passes.rms_norm(x, scale, EPS), norm_of(x, scale))


@TYPES
@WIDTHS
@SCALES
def test_a_kept_norm_also_gives_what_its_gradient_needs(width: int, dtype: torch.dtype, scaled: bool) -> None:
    x = random(2, ROWS, width, dtype=dtype)
    scale = scale_of(width, dtype) if scaled else None
    xhat, rstd, y = passes.rms_norm_kept(x, scale, EPS)
    assert_rounded_once(xhat, norm_of(x))
    assert_rounded_once(y, norm_of(x, scale))
    assert (y is xhat) == (not scaled)
    assert rstd.dtype is torch.float32 and rstd.shape == (2, ROWS, 1)
    assert_rounded_once(rstd, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())


@TYPES
@WIDTHS
@SCALES
@pytest.mark.parametrize("with_more", [False, True], ids=["alone", "more"])
def test_the_gradient_of_a_norm_is_that_of_autograd(
    width: int, dtype: torch.dtype, scaled: bool, with_more: bool
) -> None:
    x, dy, more = (random(ROWS, width, seed=seed, dtype=dtype) for seed in range(3))
    scale = scale_of(width, dtype) if scaled else None
    exact = gradient(lambda wide: norm_of(wide, scale), x, dy) + (more.double() if with_more else 0)
    xhat, rstd, _ = passes.rms_norm_kept(x, scale, EPS)
    found = passes.rms_norm_gradient(dy, xhat, rstd, scale, more if with_more else None)
    if dtype is torch.float32:
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        # xhat was rounded too, and the gradient subtracts a part along it.
        wide_dy, wide_xhat = dy.double() * (1 if scale is None else scale.double()), xhat.double()
        mean = (wide_dy * wide_xhat).mean(-1, keepdim=True)
        own = (wide_dy - wide_xhat * mean) * rstd.double()
        assert_rounded_once(found, own + (more.double() if with_more else 0))
        assert (found.double() - exact).abs().max() <= 0.02 * (rstd.double() * wide_dy.abs()).max() + 0.01


def test_tensors_that_do_not_lie_in_one_piece_are_taken_all_the_same() -> None:
    x, dy, more = (random(33, ROWS, seed=seed).t() for seed in range(3))
    scale = random(66)[::2]
    assert_rounded_once(passes.rms_norm(x, scale, EPS), norm_of(x, scale))
    xhat, rstd, y = passes.rms_norm_kept(x, scale, EPS)
    assert_rounded_once(y, norm_of(x, scale))
    found = passes.rms_norm_gradient(dy, xhat, rstd, scale, more)
    assert torch.equal(
        found, passes.rms_norm_gradient(dy.contiguous(), xhat, rstd, scale.contiguous(), more.contiguous())
    )


@TYPES
def test_a_row_of_zeros_stays_zeros_and_a_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x = random(4, 33, dtype=dtype)
    x[0] = 0
    x[2, 5] = torch.nan
    y = passes.rms_norm(x, torch.ones(33), EPS)
    assert bool((y[0] == 0).all()) and bool(y[2].isnan().all())
    assert_rounded_once(y[[1, 3]], norm_of(x[[1, 3]]))


@TYPES
@WIDTHS
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "halves of one"])
def test_the_gate_is_silu(width: int, dtype: torch.dtype, fused: bool) -> None:
    both = 4 * random(ROWS, 2 * width, dtype=dtype)
    gate, up = both.split(width, 1) if fused else (part.contiguous() for part in both.split(width, 1))
    assert_rounded_once(passes.silu_mul(gate, up), F.silu(gate.double()) * up.double())


@TYPES
@WIDTHS
@pytest.mark.parametrize("scale", [0.1, 4.0, 1e3])
def test_another_gate_is_gelu_by_a_tanh(width: int, dtype: torch.dtype, scale: float) -> None:
    gate, up = (scale * random(ROWS, 2 * width, dtype=dtype)).split(width, 1)
    exact = F.gelu(gate.double(), approximate="tanh") * up.double()
    assert_rounded_once(passes.gelu_tanh_mul(gate, up), exact)


@TYPES
@WIDTHS
def test_the_gradients_of_the_gate_are_those_of_autograd(width: int, dtype: torch.dtype) -> None:
    gate, up, dactive = (4 * random(ROWS, width, seed=seed, dtype=dtype) for seed in range(3))
    dactive_before = dactive.clone()
    active, dgate, dup = passes.silu_mul_gradient(gate, up, dactive)
    assert_rounded_once(active, F.silu(gate.double()) * up.double())
    assert_rounded_once(dgate, gradient(lambda wide: F.silu(wide) * up.double(), gate, dactive_before))
    assert_rounded_once(dup, F.silu(gate.double()) * dactive_before.double())
    assert dup.data_ptr() == dactive.data_ptr()


@TYPES
@pytest.mark.parametrize("width", [1, 40], ids=["one by one", "in vectors"])
@pytest.mark.parametrize(
    "value", [0.0, 20.0, 87.0, 88.0, 89.0, 1e3, 1e4, -20.0, -87.0, -87.95, -88.0, -89.0, -1e3, -1e4, 1e-30]
)
def test_a_gate_may_be_as_large_as_it_likes(value: float, width: int, dtype: torch.dtype) -> None:
    gate, one = torch.full((1, width), value).to(dtype), torch.ones(1, width, dtype=dtype)
    exact = F.silu(gate.double())
    assert_rounded_once(passes.silu_mul(gate, one), exact)
    active, dgate, dup = passes.silu_mul_gradient(gate, one, one.clone())
    assert_rounded_once(active, exact)
    assert_rounded_once(dgate, gradient(F.silu, gate, one))
    assert_rounded_once(dup, exact)


@TYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gate_that_is_no_finite_number_gives_none_and_its_neighbours_do_not_care(
    value: float, dtype: torch.dtype
) -> None:
    gate, up = random(3, 33, dtype=dtype), random(3, 33, seed=1, dtype=dtype)
    gate[1, 7] = value
    others = torch.ones(3, 33, dtype=torch.bool)
    others[1, 7] = False
    exact = F.silu(gate.double()) * up.double()
    for found in (passes.silu_mul(gate, up), passes.silu_mul_gradient(gate, up, up.clone())[0]):
        assert torch.equal(found.isfinite(), others)
        assert value == -torch.inf or torch.equal(found.isnan(), exact.isnan())
        assert_rounded_once(found[others], exact[others])
    _, dgate, _ = passes.silu_mul_gradient(gate, up, torch.ones_like(up))
    assert torch.equal(dgate.isfinite(), others)


@TYPES
def test_what_an_up_or_a_gradient_has_that_is_no_finite_number_stays_so(dtype: torch.dtype) -> None:
    gate, up = torch.ones(1, 33, dtype=dtype), torch.ones(1, 33, dtype=dtype)
    up[0, 3], up[0, 4], up[0, 32] = torch.nan, torch.inf, -torch.inf
    found = passes.silu_mul(gate, up).float()
    assert bool(found[0, 3].isnan()) and found[0, 4] == torch.inf and found[0, 32] == -torch.inf
    assert int(found.isfinite().sum()) == 30
    _, dgate, dup = passes.silu_mul_gradient(gate, torch.ones_like(up), up.clone())
    assert int(dgate.isfinite().sum()) == int(dup.isfinite().sum()) == 30


def rotated(x: Tensor, scale: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers does it."""
    x = x.double() if scale is None else norm_of(x, scale)
    first, second = x.chunk(2, -1)
    return x * cos.double()[:, None] + torch.cat([-second, first], -1) * sin.double()[:, None]


def angles(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of two different halves: a kernel that reads the wrong one is found."""
    turn = 3 * random(tokens, size, seed=11)
    return turn.cos().to(dtype), turn.sin().to(dtype)


HEADS = pytest.mark.parametrize(("heads", "size"), [(2, 64), (1, 128), (3, 10), (2, 2), (4, 40)])


@TYPES
@SCALES
@HEADS
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "inside a product"])
def test_heads_are_normed_and_rotated(
    heads: int, size: int, scaled: bool, dtype: torch.dtype, fused: bool
) -> None:
    x = random(ROWS, heads + 2, size, dtype=dtype)[:, 1 : 1 + heads]
    x = x if fused else x.contiguous()
    scale = scale_of(size, dtype) if scaled else None
    cos, sin = angles(ROWS, size, dtype)
    found = passes.rotate_heads(x, scale, EPS, cos, sin)
    assert_rounded_once(found, rotated(x, scale, cos, sin))


@TYPES
@SCALES
@HEADS
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "inside a product"])
def test_the_gradient_of_heads_is_that_of_autograd(
    heads: int, size: int, scaled: bool, dtype: torch.dtype, fused: bool
) -> None:
    x, dy = (random(ROWS, heads + 2, size, seed=seed, dtype=dtype)[:, 1 : 1 + heads] for seed in (0, 1))
    x = x if fused else x.contiguous()
    scale = scale_of(size, dtype) if scaled else None
    cos, sin = angles(ROWS, size, dtype)
    found = passes.rotate_heads_gradient(dy, x, scale, EPS, cos, sin)
    assert_rounded_once(found, gradient(lambda wide: rotated(wide, scale, cos, sin), x, dy))


@TYPES
def test_without_a_norm_the_gradient_of_heads_does_not_depend_on_them(dtype: torch.dtype) -> None:
    dy, (cos, sin) = random(ROWS, 2, 10, dtype=dtype), angles(ROWS, 10, dtype)
    exact = gradient(lambda wide: rotated(wide, None, cos, sin), dy, dy)
    for heads in (None, dy, 1e6 * random(ROWS, 2, 10, seed=3, dtype=dtype)):
        assert_rounded_once(passes.rotate_heads_gradient(dy, heads, None, 0.0, cos, sin), exact)


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-7, 3.0, 1e-30, 1e30])
def test_every_bfloat16_is_rounded_to_the_nearest_and_ties_to_even_as_torch_does(factor: float) -> None:
    """Products of two bfloat16 are exact in float32: all of them but those with 1 have digits to be rounded,
    half of the digits of many are ties."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = torch.zeros(1, 2**16, 2, dtype=torch.bfloat16)
    x[0, :, 0] = bits.view(torch.bfloat16)
    cos = torch.tensor([[factor, factor]]).to(torch.bfloat16)
    found = passes.rotate_heads(x, None, EPS, cos, torch.zeros_like(cos))[0, :, 0]
    expected = (x[0, :, 0].float() * cos[0, 0].float()).to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert int(found.isnan().sum()) == 254 and int(found.isinf().sum()) >= 2


@TYPES
def test_no_rows_are_no_work(dtype: torch.dtype) -> None:
    none, heads, scale = torch.empty(0, 33, dtype=dtype), torch.empty(0, 2, 10, dtype=dtype), torch.ones(33)
    cos = torch.empty(0, 10, dtype=dtype)
    assert passes.rms_norm(none, scale, EPS).shape == (0, 33)
    xhat, rstd, y = passes.rms_norm_kept(none, scale, EPS)
    assert (xhat.shape, rstd.shape, y.shape) == ((0, 33), (0, 1), (0, 33))
    assert passes.rms_norm_gradient(none, xhat, rstd, scale, none).shape == (0, 33)
    assert passes.silu_mul(none, none).shape == (0, 33)
    assert [found.shape for found in passes.silu_mul_gradient(none, none, none)] == [(0, 33)] * 3
    assert passes.rotate_heads(heads, scale[:10], EPS, cos, cos).shape == (0, 2, 10)
    assert passes.rotate_heads_gradient(heads, heads, scale[:10], EPS, cos, cos).shape == (0, 2, 10)


def test_only_float32_and_bfloat16_on_a_cpu_fit() -> None:
    assert all(passes.fits(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert not any(passes.fits(torch.ones(1).to(dtype)) for dtype in (torch.float64, torch.float16))
    assert not passes.fits(torch.ones(1, device="meta"))
    with compiler.turned_off():
        assert not passes.fits(torch.ones(1))


def test_what_would_be_read_from_elsewhere_is_refused() -> None:
    x, half, scale = random(4, 10), random(4, 10, dtype=torch.bfloat16), torch.ones(10)
    heads, (cos, sin) = random(4, 2, 10), angles(4, 10, torch.float32)
    xhat, rstd, _ = passes.rms_norm_kept(x, scale, EPS)
    defects: list[Callable[[], object]] = [
        lambda: passes.rms_norm(x, scale[:9], EPS),
        lambda: passes.rms_norm_gradient(x, xhat[:3], rstd, scale),
        lambda: passes.rms_norm_gradient(x, xhat.bfloat16(), rstd, scale),
        lambda: passes.rms_norm_gradient(x, xhat, rstd[:3], scale),
        lambda: passes.rms_norm_gradient(x, xhat, rstd, scale, half),
        lambda: passes.silu_mul(x, half),
        lambda: passes.silu_mul(x, x[:3]),
        lambda: passes.silu_mul(x, random(4, 20)[:, :10]),
        lambda: passes.silu_mul(random(10, 4).t(), random(10, 4).t()),
        lambda: passes.silu_mul_gradient(x, x, x[:3]),
        lambda: passes.silu_mul_gradient(random(4, 20)[:, :10], x, x),
        lambda: passes.rotate_heads(heads[..., :9].contiguous(), None, EPS, cos, sin),
        lambda: passes.rotate_heads(heads[..., :8], None, EPS, cos[:, :8], sin[:, :8]),
        lambda: passes.rotate_heads(heads, None, EPS, cos[:3], sin),
        lambda: passes.rotate_heads(heads, None, EPS, cos, sin.bfloat16()),
        lambda: passes.rotate_heads(heads, scale[:9], EPS, cos, sin),
        lambda: passes.rotate_heads_gradient(heads, heads[:3], scale, EPS, cos, sin),
        lambda: passes.rotate_heads_gradient(heads, heads.bfloat16(), scale, EPS, cos, sin),
    ]
    for defect in defects:
        with pytest.raises(ValueError, match=r"not|apart|no pairs"):
            defect()


def test_what_is_left_of_a_very_negative_gate_is_right_to_the_last_bits() -> None:
    gate = torch.linspace(-85, -10, 301)[None]
    exact = gate.double() * torch.sigmoid(gate.double())
    found = passes.silu_mul(gate, torch.ones_like(gate)).double()
    torch.testing.assert_close(found, exact, rtol=5e-7, atol=0)
