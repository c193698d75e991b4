"""The gate of an MLP: activation(gate) * up, of the product with both.

decoder.py -> [activation] -> native/passes.py, or torch
"""

import torch.nn.functional as F
from torch import Tensor

from swarmnode.native.passes import gelu_tanh_mul, silu_mul
from swarmnode.native.tensors import fits


def gated(gate_up_ND: Tensor, activation: str) -> Tensor:
    """The gated half of [N, gate and up]; `activation` is one of `family.ACTIVATIONS`."""
    gate, up = gate_up_ND.chunk(2, dim=-1)
    if activation == "silu":
        return silu_mul(gate, up) if fits(gate_up_ND) else F.silu(gate).mul_(up)
    if fits(gate_up_ND):
        return gelu_tanh_mul(gate, up)
    return F.gelu(gate, approximate="tanh").mul_(up)
