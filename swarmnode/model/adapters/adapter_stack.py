"""The adapters of one linear layer in one piece of memory, as a kernel wants them: address + index * stride.

lora_patch.py (with a kernel only) -> [adapter_stack] -> lora.py (StackedGemm)

The parameters become views into the stack, so the optimizer's in-place steps move both and nothing is copied
in training. PEFT knows nothing of it: `.to()`, `add_adapter` and a change of scaling are noticed at the next
use.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.model.adapters.lora import LoraGemm, LoraWeights, StackedGemm


class AdapterStack:
    """a_ARK and b_ANR of a layer's adapters; lower ranks are padded with zeros that no optimizer reaches."""

    def __init__(self, gemm: LoraGemm) -> None:
        self._gemm = gemm
        self._stacked: StackedGemm | None = None
        self._scalings: tuple[float, ...] = ()

    def of(self, adapters: Sequence[LoraWeights]) -> StackedGemm | None:
        """Returns the kernel with these adapters stacked. None: their types or devices differ.

        Two or more adapters: the `.data` of their parameters moves into the stack. One: the stack is a view
        of it.
        """
        if len({(w.dtype, w.device) for adapter in adapters for w in (adapter.a_RK, adapter.b_NR)}) != 1:
            return None
        scalings = tuple(adapter.scaling for adapter in adapters)
        if self._stacked is None or scalings != self._scalings or not _holds(self._stacked, adapters):
            # Made under inference mode, the memory could not be trained in later.
            with torch.inference_mode(False), torch.no_grad():
                self._stacked, self._scalings = _stack(self._gemm, adapters), scalings
        return self._stacked


def _holds(stacked: StackedGemm, adapters: Sequence[LoraWeights]) -> bool:
    """Returns True if each parameter is still at its place in the stack."""
    a_ARK, b_ANR = stacked.a_ARK, stacked.b_ANR
    return len(adapters) == len(a_ARK) and all(
        adapter.a_RK.data_ptr() == a_ARK.data_ptr() + i * a_ARK.stride(0) * a_ARK.element_size()
        and adapter.b_NR.data_ptr() == b_ANR.data_ptr() + i * b_ANR.stride(0) * b_ANR.element_size()
        and adapter.a_RK.dtype == a_ARK.dtype
        for i, adapter in enumerate(adapters)
    )


def _stack(gemm: LoraGemm, adapters: Sequence[LoraWeights]) -> StackedGemm:
    first = adapters[0]
    scaling_A = torch.tensor([adapter.scaling for adapter in adapters], device=first.a_RK.device)
    if len(adapters) == 1:
        return StackedGemm(gemm, first.a_RK.detach()[None], first.b_NR.detach()[None], scaling_A)
    rank = max(adapter.a_RK.shape[0] for adapter in adapters)
    a_ARK = first.a_RK.new_zeros(len(adapters), rank, first.a_RK.shape[1])
    b_ANR = first.b_NR.new_zeros(len(adapters), first.b_NR.shape[0], rank)
    for i, adapter in enumerate(adapters):
        own = adapter.a_RK.shape[0]
        _move(adapter.a_RK, a_ARK[i, :own])
        _move(adapter.b_NR, b_ANR[i, :, :own])
    return StackedGemm(gemm, a_ARK, b_ANR, scaling_A)


def _move(parameter: Tensor, place: Tensor) -> None:
    place.copy_(parameter.detach())
    # Through `.data`: the parameter keeps its identity, which the optimizer's state hangs on.
    parameter.data = place
