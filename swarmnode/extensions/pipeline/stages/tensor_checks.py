"""Checks the tensors that peers send to a stage, completely and before anything changes.

stage_worker.py, stage_caches.py (hidden states, gradients) -> [check_finite] -> what the stage computes with,
    or Rejected
stage_worker.py (a pass) -> [within_memory] -> its result, or Rejected

Their shapes have already been checked, before the bytes were read (hop_checks.py).
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.model.budget import is_out_of_memory


def check_finite(values: Tensor, what: str) -> None:
    """Raises Rejected: not_finite, unless all values are finite."""
    if not bool(torch.isfinite(values).all()):
        raise Rejected(Refusal.NOT_FINITE, what)


@contextmanager
def within_memory() -> Generator[None]:
    """Raises Rejected: no_memory, instead of torch's out-of-memory errors."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
    else:
        return
    # Raise outside the handler, so that objects of the failed pass on the stack can be freed at once.
    raise Rejected(Refusal.NO_MEMORY, said)
