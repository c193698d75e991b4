"""Bytes of a state that come from peers."""

import pytest

from swarmnode.errors import CheckpointError
from swarmnode.extensions.pipeline.stages.packed_state import unpack_state


def test_bytes_that_are_no_safetensors_file_are_refused() -> None:
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        unpack_state(b"\xff" * 100)


@pytest.mark.parametrize("shape", ["[0,9223372036854775808]", "[0,4611686018427387904,4611686018427387904]"])
def test_a_shape_that_torch_has_no_number_for_is_refused_as_any_other_damage(shape: str) -> None:
    header = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'.encode()
    data = len(header).to_bytes(8, "little") + header
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        unpack_state(data)
