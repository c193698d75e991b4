"""The norm of the embedded engine is the one of torch."""

import pytest
import torch
import torch.nn.functional as F

from swarmnode.rollout.decode.matrix import RmsNorm

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_the_one_of_torch_and_changes_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 48, generator=generator) * torch.logspace(-4, 2, 5)[:, None]).to(dtype)
    scale = torch.rand(48, generator=generator).to(dtype)
    before = x.clone()
    norm = RmsNorm(1e-5, CPU)
    found = norm(x, norm.placed(scale))
    assert found.dtype == dtype
    assert torch.equal(x, before)
    # Formed in float32 and rounded once, so it is the nearest number there is.
    expected = F.rms_norm(x.float(), (48,), scale.float(), 1e-5).to(dtype)
    torch.testing.assert_close(found, expected)


def test_a_row_of_zeros_stays_one() -> None:
    norm = RmsNorm(1e-6, CPU)
    assert torch.equal(norm(torch.zeros(2, 8), torch.ones(8)), torch.zeros(2, 8))
    assert norm.per_rms(torch.zeros(2, 3, 8)).flatten().tolist() == pytest.approx([1000.0] * 6)
