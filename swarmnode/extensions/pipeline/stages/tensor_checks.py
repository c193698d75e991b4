"""Checks of the tensors that peers send to a stage, made completely before anything changes.

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
    """Checks what peers send to one stage."""

    def __init__(self, model: StageModel, *, max_tokens: int) -> None:
        """`max_tokens`: bound of one micro-batch, pads included."""
        self._model = model
        self._max_tokens = max_tokens

    def input(self, item: StageInput) -> StageInput:
        """Return the input on the device and in the type of the stage. Raises Rejected: wrong_shape,
        too_large, not_finite."""
        self._shape(item)
        if not item.values.is_floating_point():
            return replace(item, values=item.values.to(self._model.device))
        own_BTD = self.own_type(item.values)
        self.finite(own_BTD, "what came in")
        return replace(item, values=own_BTD.requires_grad_())

    def gradient(self, gradient_BTD: Tensor, output_BTD: Tensor) -> Tensor:
        """Return a gradient with respect to an output, checked. Raises Rejected: wrong_shape, not_finite."""
        if gradient_BTD.shape != output_BTD.shape or not gradient_BTD.is_floating_point():
            raise Rejected(Refusal.WRONG_SHAPE, f"a gradient {gradient_BTD.dtype} {list(gradient_BTD.shape)}")
        own = self.own_type(gradient_BTD)
        self.finite(own, "a gradient that came in")
        return own

    def _shape(self, item: StageInput) -> None:
        """Raises Rejected unless these are token ids, which only the data stage takes, or hidden states."""
        model, values, shape = self._model, item.values, item.values.shape
        are_ids = model.part.has_ends and values.dtype == torch.long
        if len(shape) != (2 if are_ids else 3) or not (are_ids or values.is_floating_point()):
            raise Rejected(Refusal.WRONG_SHAPE, f"{values.dtype} {list(shape)}")
        if not are_ids and shape[2] != model.hidden_size:
            raise Rejected(Refusal.WRONG_SHAPE, f"width {shape[2]}, here it is {model.hidden_size}")
        tokens = shape[0] * shape[1]
        if not 0 < tokens <= self._max_tokens:
            raise Rejected(Refusal.TOO_LARGE, f"{tokens} tokens, at most {self._max_tokens}")
        if not 0 < item.tokens <= tokens:
            raise Rejected(Refusal.WRONG_SHAPE, f"{item.tokens} of {tokens} tokens are learned from")
        if item.layout is not None and not model.packs:
            raise Rejected(Refusal.WRONG_SHAPE, "this model takes no packed rows")
        if item.layout is not None and (shape[0] != 1 or sum(item.layout.lengths) != tokens):
            packed = sum(item.layout.lengths)
            raise Rejected(Refusal.WRONG_SHAPE, f"{packed} packed tokens in {list(shape)}")
        if are_ids and not 0 <= int(values.min()) <= int(values.max()) < model.vocabulary:
            raise Rejected(Refusal.WRONG_SHAPE, f"a token id beyond the vocabulary of {model.vocabulary}")

    def own_type(self, values: Tensor) -> Tensor:
        """Return the values without graph, on the device and in the type of the stage."""
        return values.detach().to(self._model.device, self._model.settings.dtype)

    def finite(self, values: Tensor, what: str) -> None:
        """Raises Rejected: not_finite, unless all values are finite."""
        if not bool(torch.isfinite(values).all()):
            raise Rejected(Refusal.NOT_FINITE, what)

    @contextmanager
    def within_memory(self) -> Generator[None]:
        """Raises Rejected: no_memory, in place of torch's out-of-memory errors."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).partition("\n")[0]
        else:
            return
        # Outside of the handler: what the pass has left on the stack need not wait for this one to be read.
        raise Rejected(Refusal.NO_MEMORY, said)
