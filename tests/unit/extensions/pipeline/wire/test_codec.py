"""Tensors survive the way there and back within the stated errors, and what cannot be honest is refused."""

import pytest
import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.codec import decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName
from swarmnode.extensions.pipeline.wire.refusals import Refusal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS: list[CodecName] = ["none", "fp16"]


def there_and_back(tensor: Tensor, codec: CodecName) -> Tensor:
    sent = encode(tensor, codec)
    return decode(sent.header, bytearray(sent.payload))


def hidden(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_shape_and_dtype_of_what_was_sent_come_back(codec: CodecName, dtype: torch.dtype):
    for shape in ((7,), (3, 5), (2, 3, 70)):
        back = there_and_back(hidden(*shape, dtype=dtype), codec)
        sent = torch.float16 if codec == "fp16" else dtype
        assert (back.shape, back.dtype) == (shape, sent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_changes_no_bit(dtype: torch.dtype):
    tensor = hidden(2, 3, 33, dtype=dtype)
    assert torch.equal(there_and_back(tensor, "none"), tensor)


def test_none_copies_nothing_at_either_end():
    tensor = hidden(4, 8)
    sent = encode(tensor, "none")
    received = bytearray(sent.payload)
    back = decode(sent.header, received)
    tensor[0, 0] = 5.0
    received[4:8] = b"\x00\x00\x80\x3f"
    assert torch.frombuffer(sent.payload, dtype=torch.float32)[0] == 5.0
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


@pytest.mark.parametrize(("codec", "size_bytes"), [("none", 400), ("fp16", 200)])
def test_the_header_says_how_many_bytes_follow(codec: CodecName, size_bytes: int):
    sent = encode(hidden(10, 10), codec)
    assert sent.header.payload_bytes == len(sent.payload) == size_bytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_a_hole_is_not_sent(codec: CodecName, poison: float):
    tensor = hidden(5, 5)
    tensor[3, 3] = poison
    with pytest.raises(Rejected, match=Refusal.NOT_FINITE):
        encode(tensor, codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_with_a_hole_is_not_taken(codec: CodecName, poison: float):
    sent = encode(hidden(5, 5), codec)
    data = bytearray(sent.payload)
    torch.frombuffer(data, dtype=torch.float32 if codec == "none" else torch.float16)[7] = poison
    with pytest.raises(Rejected, match=Refusal.NOT_FINITE):
        decode(sent.header, data)


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_of_another_length_is_not_taken(codec: CodecName):
    sent = encode(hidden(300), codec)
    with pytest.raises(Rejected, match=Refusal.MALFORMED):
        decode(sent.header, bytearray(sent.payload) + b"\x00")


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
