"""Kernels by name, and a set of one's own."""

from collections.abc import Iterator

import pytest
import torch

from swarmnode.cpu_kernels import CpuKernels, kernels, use_kernels
from swarmnode.errors import ConfigError
from swarmnode.model.dense_layer import gated
from swarmnode.settings.config_layers import load_config

OWN = CpuKernels(fits=lambda tensor: True, silu_mul=lambda gate, up: gate + up)
GATE, UP = torch.ones(2, 3), torch.full((2, 3), 2.0)


@pytest.fixture(autouse=True)
def kernels_as_before() -> Iterator[None]:
    yield
    use_kernels("auto")


def test_a_set_of_ones_own_is_named_by_its_import_path() -> None:
    assert use_kernels(f"{__name__}:OWN") is kernels() is OWN
    assert torch.equal(gated(GATE, UP), GATE + UP)


def test_without_kernels_torch_computes() -> None:
    assert not use_kernels("off").fits(GATE)
    assert torch.allclose(gated(GATE, UP), torch.nn.functional.silu(GATE) * UP)
    with pytest.raises(AssertionError, match="fits"):
        kernels().silu_mul(GATE, UP)


def test_what_is_no_set_of_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a Tensor, not a CpuKernels"):
        use_kernels(f"{__name__}:GATE")
    with pytest.raises(ConfigError, match=r"no such kernels; available: auto, off, native\."):
        load_config(environ={}, assignments=["policy.cpu_kernels=on"])
