"""One member's arithmetic: sends micro-batches forward through its stage, and their gradients backward.

relay.py, iteration_driver.py (in the worker thread of stage_queue.py) -> [StageWorker] -> stage_model.py

Pure arithmetic and bookkeeping for one thread: no sockets, no clock. Each agent has one micro-batch here at a
time, and their number never exceeds what memory was planned for. relay.py and iteration_driver.py decide
which agents these are, and make sure that each attempt comes once and later attempts come later.

Of several attempts at one micro-batch, only the first committed one counts here. Gradients are provisional
until `commit`, which says that our answer was accepted. An answer that was refused must not count, because
another member's answer did. Everything that a peer sends is checked completely before anything changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.stages.micro_batches import (
    GradientAccumulator,
    GradientSum,
    MicroBatchAttempt,
    StageInput,
    is_same_input,
)
from swarmnode.extensions.pipeline.stages.packed_state import (
    matching_moments,
    matching_tensors,
)
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.stages.tensor_checks import check_finite, within_memory
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.training.checkpoints.checkpoint import optimizer_tensors
from swarmnode.training.losses import LossOutput

Activations = Literal["kept", "recomputed"]
""""kept": the backward pass finds all activations. "recomputed": it finds only the stage's input and runs the
forward pass again. This costs a third more work, and saves all but one hidden state per micro-batch in
flight."""


@dataclass(slots=True)
class _Work:
    """The newest micro-batch of an agent."""

    item: StageInput
    output_BTD: Tensor
    """Output of our own layers. Until its backward pass it has its graph, if activations are kept."""


class StageWorker:
    """The stage's layers, and the micro-batches in flight.

    Tensors passed in or returned are kept for a while without a copy: do not write to them.

    >>> worker = StageWorker(stage, slots=3, max_tokens=4096)                            # doctest: +SKIP
    >>> attempt = MicroBatchAttempt(agent=0, iteration=0, wave=0)                        # doctest: +SKIP
    >>> hidden_BTD = worker.forward(StageInput(attempt, received_BTD, tokens=100))       # doctest: +SKIP
    >>> for_sender_BTD = worker.backward(attempt, gradient_BTD)                          # doctest: +SKIP
    >>> worker.commit(attempt)                               # The sender has taken it.  # doctest: +SKIP
    """

    def __init__(
        self,
        model: StageModel,
        *,
        slots: int,
        max_tokens: int,
        activations: Activations = "kept",
        iteration: int = 0,
    ) -> None:
        """`slots`: micro-batches that memory was planned for. `max_tokens`: largest size of one, including
        padding."""
        self.model = model
        self.iteration = iteration
        self.version = iteration
        """Optimizer steps in the weights: less than `iteration` while the gradients of a step are
        averaged."""
        self.max_tokens = max_tokens
        self._slots = slots
        self._activations = activations
        self._parameters = model.trainable()
        self._work: dict[int, _Work] = {}
        self._sum = GradientAccumulator(slots)

    @property
    def counted(self) -> frozenset[tuple[int, int, int]]:
        """Micro-batches whose gradients are committed in this iteration."""
        return self._sum.micro_batches

    def release(self, agent: int) -> None:
        """Drop the agent's micro-batch, if it has one here."""
        self._work.pop(agent, None)

    def forward(self, item: StageInput) -> Tensor:
        """Return the output of our own layers, [B, T, D], without its graph. A later attempt of an agent
        replaces its earlier one.

        A later attempt with exactly the same input is not computed again. Raises Rejected: no_slot if memory
        was not planned for another agent, no_memory; unknown_work for another iteration; not_finite.
        """
        attempt = item.attempt
        if attempt.iteration != self.iteration:
            raise Rejected(
                Refusal.UNKNOWN_WORK, f"iteration {attempt.iteration}, here it is {self.iteration}"
            )
        if attempt.agent not in self._work and len(self._work) >= self._slots:
            raise Rejected(Refusal.NO_SLOT, f"{self._slots} of {self._slots} are taken")
        item, former = self._checked(item), self._work.get(attempt.agent)
        if former is not None and is_same_input(former.item, item):
            # Use the former input, where the graph of its output begins.
            item, output_BTD = replace(former.item, attempt=attempt), former.output_BTD
        else:
            with within_memory(), torch.set_grad_enabled(self._activations == "kept"):
                output_BTD = self._run(item)
            check_finite(output_BTD, "what the own layers made of it")
        self._work[attempt.agent] = _Work(item, output_BTD)
        return output_BTD.detach()

    def backward(self, attempt: MicroBatchAttempt, gradient_BTD: Tensor) -> Tensor | None:
        """Return the gradient [B, T, D] for the sender, or None at the start of the path. The gradients of
        our own parameters wait for `commit` or `discard`.

        `gradient_BTD`: with respect to the result of `forward`. Raises Rejected: unknown_work; and, after
        dropping the micro-batch: not_finite (our own gradients), no_memory.
        """
        work = self._found(attempt)
        gradient_BTD = self._own(gradient_BTD, "a gradient that came in")
        output_BTD = work.output_BTD
        inputs = [work.item.values] if work.item.values.requires_grad else []
        try:
            with within_memory(), torch.enable_grad():
                if not output_BTD.requires_grad:
                    # Nothing was kept, or an earlier attempt has used up the graph.
                    output_BTD = self._run(work.item)
                own, answers = self._gradients(output_BTD, gradient_BTD, inputs, attempt, "layers")
        except Rejected:
            self.release(attempt.agent)
            raise
        if not self._sum.holds(attempt, "layers"):
            self._sum.keep(own, attempt, tokens=work.item.tokens)
        work.output_BTD = work.output_BTD.detach()
        return answers[0] if answers else None

    def commit(self, attempt: MicroBatchAttempt) -> None:
        """Count the gradients of this attempt, whose answer the sender has accepted, unless another attempt
        counts."""
        self._sum.commit(attempt)

    def discard(self, attempt: MicroBatchAttempt) -> None:
        """Drop the gradients of this attempt, whose answer the sender refused."""
        self._sum.discard(attempt)

    def loss(
        self, attempt: MicroBatchAttempt, hidden_BTD: Tensor, objective: Callable[[Tensor], LossOutput]
    ) -> tuple[float, Tensor]:
        """Return the loss of hidden states that came back from the last stage, and its gradient with respect
        to them. The gradients of norm and head are added to the sums.

        `objective` gets the hidden states with a graph, and divides by the size of the whole step. Only on
        the data stage, between `forward` and `backward` of the attempt. Raises Rejected: unknown_work; and,
        after dropping the micro-batch: not_finite (the gradient of the loss), no_memory.
        """
        self._found(attempt)
        hidden_BTD = self._own(hidden_BTD, "what came back").requires_grad_()
        try:
            with within_memory(), torch.enable_grad():
                loss = objective(hidden_BTD).loss
                own, answers = self._gradients(loss, None, [hidden_BTD], attempt, "head")
        except Rejected:
            self.release(attempt.agent)
            raise
        if not self._sum.holds(attempt, "head"):
            self._sum.add(own, attempt, "head", tokens=0)
        return loss.item(), answers[0]

    def take_gradients(self) -> GradientSum:
        """Close the iteration and return its sums. Later messages of the iteration are refused, and
        micro-batches in flight are dropped."""
        self._work.clear()
        taken, self._sum = self._sum.sums(), GradientAccumulator(self._slots)
        self.iteration += 1
        return taken

    def apply(
        self, gradients: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, max_norm: float
    ) -> float | None:
        """Take one step of the optimizer of `model.trainable()`. Returns the gradient norm before it is
        clipped to `max_norm`.

        Returns None, without a step, if there are no gradients (Adam would move on momentum alone). Gradients
        may come from peers: raises Rejected, before anything has changed, for wrong_shape (wrong names
        included) and not_finite.
        """
        self.version = self.iteration
        if not gradients:
            return None
        for name, gradient in gradients.items():
            if name not in self._parameters:
                raise Rejected(Refusal.WRONG_SHAPE, f"{name} is not trained here")
            if gradient.shape != self._parameters[name].shape:
                raise Rejected(Refusal.WRONG_SHAPE, f"{list(gradient.shape)} for {name}")
            check_finite(gradient, name)
        for name, parameter in self._parameters.items():
            # Use the parameter's own layout: the gradient of a LoRA B comes transposed, and fused Adam reads
            # memory in order.
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm)
        if finite := bool(torch.isfinite(norm)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not finite:
            raise Rejected(Refusal.NOT_FINITE, "the norm of all")
        return norm.item()

    def state(self, optimizer: torch.optim.Optimizer | None = None) -> HeldState:
        """Return the trained parameters by global name, with Adam's moments if `optimizer` is given.

        Without moments, equal replicas of a stage have equal digests.
        """
        moments = {} if optimizer is None else optimizer_tensors(optimizer, self._parameters)
        return HeldState.of(self.model.part, self.version, {**self._parameters, **moments})

    def load_state(
        self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Load the tensors of our stage from these (`packed_state.unpack_state`). Those of other stages are
        ignored.

        `optimizer`: the optimizer of `model.trainable().values()`, to load its moments too. Micro-batches in
        flight and gradient sums are dropped, because they belong to other weights. Raises CheckpointError,
        with nothing changed, if a tensor is missing, has another shape or is not finite.
        """
        own = matching_tensors(tensors, self._parameters)
        moments = {} if optimizer is None else matching_moments(tensors, self._parameters)
        self._work.clear()
        self._sum = GradientAccumulator(self._slots)
        with torch.no_grad():
            for name, tensor in own.items():
                self._parameters[name].copy_(tensor)
        if optimizer is not None:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _checked(self, item: StageInput) -> StageInput:
        """Return the input on the stage's device and in its dtype. Raises Rejected: not_finite, and
        wrong_shape for token ids outside the model's vocabulary."""
        ids, vocabulary = item.values, self.model.vocabulary
        if not ids.is_floating_point():
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise Rejected(Refusal.WRONG_SHAPE, f"a token id beyond the vocabulary of {vocabulary}")
            return replace(item, values=ids.to(self.model.device))
        return replace(item, values=self._own(item.values, "what came in").requires_grad_())

    def _own(self, values: Tensor, what: str) -> Tensor:
        """Return the values without a graph, on the stage's device and in its dtype. Raises Rejected:
        not_finite."""
        own = values.detach().to(self.model.device, self.model.settings.dtype)
        check_finite(own, what)
        return own

    def _run(self, item: StageInput) -> Tensor:
        starts = not item.values.is_floating_point()
        hidden_BTD = self.model.embed(item.values) if starts else item.values
        return self.model.forward(hidden_BTD, item.layout)

    def _found(self, attempt: MicroBatchAttempt) -> _Work:
        work = self._work.get(attempt.agent)
        if work is None or work.item.attempt != attempt:
            raise Rejected(Refusal.UNKNOWN_WORK, f"{attempt} is not here")
        return work

    def _gradients(
        self,
        output: Tensor,
        gradient: Tensor | None,
        inputs: Sequence[Tensor],
        attempt: MicroBatchAttempt,
        part: str,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Return (gradients of the parameters by name, gradients of the inputs), all finite. Parameters whose
        gradients are already included are left out."""
        named = {} if self._sum.holds(attempt, part) else self._parameters
        wanted = [*inputs, *named.values()]
        if not wanted or not output.requires_grad:
            return {}, tuple(torch.zeros_like(tensor) for tensor in inputs)
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        # One check of the largest number covers all gradients: a check of each would cost 15 % of a pass.
        largest = get_total_norm([x for x in found if x is not None], norm_type=math.inf)
        check_finite(largest, f"a gradient of the own {part}")
        own = zip(named, found[len(inputs) :], strict=True)
        answers = zip(inputs, found, strict=False)
        return (
            {name: tensor for name, tensor in own if tensor is not None},
            tuple(torch.zeros_like(x) if tensor is None else tensor for x, tensor in answers),
        )
