"""Tensors survive the way there and back within the stated errors, and what cannot be honest is refused."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.codec import INT8_BLOCK, INT8_STEPS, decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName, TensorHeader
from swarmnode.extensions.pipeline.wire.refusals import Refusal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS: list[CodecName] = ["none", "fp16", "int8"]


def there_and_back(tensor: Tensor, codec: CodecName, block: int = INT8_BLOCK) -> Tensor:
    sent = encode(tensor, codec, block=block)
    return decode(sent.header, bytearray(sent.payload.data))


def hidden(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_shape_and_dtype_come_back(codec: CodecName, dtype: torch.dtype):
    for shape in ((7,), (3, 5), (2, 3, 70)):
        back = there_and_back(hidden(*shape, dtype=dtype), codec)
        assert (back.shape, back.dtype) == (shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_changes_no_bit(dtype: torch.dtype):
    tensor = hidden(2, 3, 33, dtype=dtype)
    assert torch.equal(there_and_back(tensor, "none"), tensor)


def test_none_copies_nothing_at_either_end():
    tensor = hidden(4, 8)
    sent = encode(tensor, "none")
    received = bytearray(sent.payload.data)
    back = decode(sent.header, received)
    tensor[0, 0] = 5.0
    received[4:8] = b"\x00\x00\x80\x3f"
    assert torch.frombuffer(sent.payload.data, dtype=torch.float32)[0] == 5.0
    assert back[0, 1] == 1.0


def test_a_strided_tensor_and_one_with_a_gradient_travel_too():
    tensor = hidden(5, 6).requires_grad_().T
    assert torch.equal(there_and_back(tensor, "none"), tensor)


def test_fp16_keeps_eleven_bits_down_to_its_smallest_numbers():
    tensor = hidden(4, 4096) * torch.logspace(-9, 4, 4096)
    error = (there_and_back(tensor, "fp16") - tensor).abs()
    assert bool((error <= (tensor.abs() / 2048).clamp(min=2.0**-25)).all())


def test_fp16_clamps_what_it_cannot_hold():
    back = there_and_back(torch.tensor([1e6, -3e38, 2.0]), "fp16")
    assert back.tolist() == [65504.0, -65504.0, 2.0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 700),
    block=st.sampled_from([1, 3, 64, 256, 4096]),
    exponent=st.integers(-25, 37),
    seed=st.integers(0, 2**32 - 1),
)
def test_int8_errs_by_half_a_step_of_its_block(size: int, block: int, exponent: int, seed: int):
    tensor = (hidden(size, seed=seed) * 10.0**exponent).clamp(-3e38, 3e38)
    back = there_and_back(tensor, "int8", block)
    for start in range(0, size, block):
        part = tensor[start : start + block].double()
        step = float(part.abs().max()) / INT8_STEPS
        error = (back[start : start + block].double() - part).abs().max()
        assert float(error) <= 0.5001 * step


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_holds_the_largest_numbers_of_a_dtype(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    back = there_and_back(torch.tensor([largest, -largest, 0.0], dtype=dtype), "int8")
    assert bool(back.isfinite().all())
    assert back[0] == -back[1]
    assert float(back[0]) == pytest.approx(largest, rel=0.01)


def test_int8_turns_zeros_and_what_is_hardly_more_into_zeros():
    sent = encode(torch.tensor([0.0, 1e-38, -1e-40]), "int8")
    assert bytes(sent.payload.data) == bytes(4 + 3)
    assert decode(sent.header, bytearray(sent.payload.data)).tolist() == [0.0, 0.0, 0.0]


def test_an_outlier_costs_only_its_own_block():
    tensor = hidden(2 * INT8_BLOCK)
    tensor[0] = 1e4
    error = (there_and_back(tensor, "int8") - tensor).abs()
    assert float(error[1:INT8_BLOCK].max()) > 0.5
    assert float(error[INT8_BLOCK:].max()) < 0.02


def test_pieces_of_a_large_tensor_are_coded_as_it_would_be_alone():
    tensor = hidden(3, 50_000)
    expected = torch.cat([there_and_back(row, "int8", 50) for row in tensor])
    assert torch.equal(there_and_back(tensor, "int8", 50).view(-1), expected)


@pytest.mark.parametrize(("codec", "size_bytes"), [("none", 400), ("fp16", 200), ("int8", 100 + 4 * 2)])
def test_the_header_says_how_many_bytes_follow(codec: CodecName, size_bytes: int):
    sent = encode(hidden(10, 10), codec)
    assert sent.header.payload_bytes == len(sent.payload.data) == size_bytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_a_hole_is_not_sent(codec: CodecName, poison: float):
    tensor = hidden(5, 5)
    tensor[3, 3] = poison
    with pytest.raises(Rejected, match=Refusal.NOT_FINITE):
        encode(tensor, codec)


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_a_hole_is_not_taken(codec: CodecName, poison: float):
    sent = encode(hidden(5, 5), codec)
    data = bytearray(sent.payload.data)
    torch.frombuffer(data, dtype=torch.float32 if codec == "none" else torch.float16)[7] = poison
    with pytest.raises(Rejected, match=Refusal.NOT_FINITE):
        decode(sent.header, data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, "a hundredth of the largest"])
def test_a_scale_that_makes_holes_is_not_taken(scale: float | str, dtype: torch.dtype):
    if isinstance(scale, str):
        scale = torch.finfo(dtype).max / 100
    sent = encode(hidden(300, dtype=dtype), "int8")
    data = bytearray(sent.payload.data)
    torch.frombuffer(data, dtype=torch.float32, count=2)[1] = scale
    with pytest.raises(Rejected, match=Refusal.NOT_FINITE):
        decode(sent.header, data)


def test_a_step_that_no_encoder_makes_is_not_taken():
    sent = encode(hidden(300), "int8")
    data = bytearray(sent.payload.data)
    data[-1] = 0x80
    with pytest.raises(Rejected, match=Refusal.MALFORMED):
        decode(sent.header, data)


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_of_another_length_is_not_taken(codec: CodecName):
    sent = encode(hidden(300), codec)
    with pytest.raises(Rejected, match=Refusal.MALFORMED):
        decode(sent.header, bytearray(sent.payload.data) + b"\x00")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(min_size=21, max_size=21), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_whatever_int8_bytes_come_only_finite_numbers_get_through(data: bytes, dtype: str):
    header = msgspec.convert(["int8", dtype, [13], 8], TensorHeader)
    try:
        values = decode(header, bytearray(data))
    except Rejected:
        return
    assert bool(values.isfinite().all())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(1, 1, 1, 1),
    ],
)
def test_what_does_not_travel_is_an_error_of_the_caller(tensor: Tensor):
    with pytest.raises(ValueError, match="does not travel"):
        encode(tensor, "none")
