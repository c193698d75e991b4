"""Checks the tensors that peers send to a stage, completely and before anything changes.

StageWorker (hidden states, gradients) -> [TensorChecks] -> what the stage computes with, or Rejected
StageWorker (a pass) -> [TensorChecks.within_memory] -> its result, or Rejected
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.stages.micro_batches import StageInput
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.model.budget import is_out_of_memory


class TensorChecks:
    """Checks the numbers that peers send to one stage. Their shapes have already been checked, before the
    bytes were read (hop_checks.py)."""

    def __init__(self, model: StageModel) -> None:
        self._model = model

    def input(self, item: StageInput) -> StageInput:
        """Return the input on the stage's device and in its dtype. Raises Rejected: not_finite, and
        wrong_shape for token ids outside the model's vocabulary."""
        ids, vocabulary = item.values, self._model.vocabulary
        if not ids.is_floating_point():
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise Rejected(Refusal.WRONG_SHAPE, f"a token id beyond the vocabulary of {vocabulary}")
            return replace(item, values=ids.to(self._model.device))
        return replace(item, values=self.checked(item.values, "what came in").requires_grad_())

    def checked(self, values: Tensor, what: str) -> Tensor:
        """Return the values without a graph, on the stage's device and in its dtype. Raises Rejected:
        not_finite."""
        own = values.detach().to(self._model.device, self._model.settings.dtype)
        self.finite(own, what)
        return own

    def finite(self, values: Tensor, what: str) -> None:
        """Raises Rejected: not_finite, unless all values are finite."""
        if not bool(torch.isfinite(values).all()):
            raise Rejected(Refusal.NOT_FINITE, what)

    @contextmanager
    def within_memory(self) -> Generator[None]:
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
