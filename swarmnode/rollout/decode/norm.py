"""Root-mean-square norms: x / sqrt(mean(x^2) + eps), times a scale for each dimension.

decoder.py -> [norm]

On a GPU `F.rms_norm` is one kernel, and so is ours on a CPU. Where that cannot be had, torch's is ten
operations, each with memory of its own: for a step of few tokens the same in half as many takes three
quarters of the time, for long prompts a tenth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.native.passes import rms_norm
from swarmnode.native.tensors import fits


class RmsNorm:
    """Norms over the last dimension, where tensors lie on `device`."""

    def __init__(self, eps: float, device: torch.device) -> None:
        self._eps = eps
        self._eps_tensor = torch.tensor(eps, device=device)
        self._on_cpu = device.type == "cpu"

    def placed(self, scale: Tensor) -> Tensor:
        """A scale as `__call__` takes it: in float32 on a CPU; on a GPU in the type that the norm is to be
        formed in."""
        return scale.float() if self._on_cpu else scale

    def __call__(self, x_ND: Tensor, scale_D: Tensor) -> Tensor:
        """The normed x, of its type; formed in float32."""
        if not self._on_cpu:
            if scale_D.dtype != x_ND.dtype:
                return F.rms_norm(x_ND.to(scale_D.dtype), x_ND.shape[-1:], scale_D, self._eps).to(x_ND.dtype)
            return F.rms_norm(x_ND, x_ND.shape[-1:], scale_D, self._eps)
        if fits(x_ND):
            return rms_norm(x_ND, scale_D, self._eps)
        exact = x_ND.float()
        per_rms = self.per_rms(exact)
        normed = exact * per_rms if exact is x_ND else exact.mul_(per_rms)
        return normed.mul_(scale_D).to(x_ND.dtype)

    def per_rms(self, x: Tensor) -> Tensor:
        """1 / sqrt(mean(x^2) + eps) of float32 numbers: [..., D] -> [..., 1]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
