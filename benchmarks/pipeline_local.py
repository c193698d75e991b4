"""The whole pipeline inside one process: the reference that members over the network are tested against.

packing (MicroBatch) -> [LocalPipeline] -> gradients per stage
                              |
                stage_worker.py, along a path; objectives.py on the data stage

What members do over the network is done here by calls. With nothing skipped its gradients are those of a
single machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.errors import ModelError
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, Objective, batch_logprobs
from swarmnode.extensions.pipeline.stages.loading import WeightFolder
from swarmnode.extensions.pipeline.stages.micro_batches import (
    GradientSum,
    MicroBatchAttempt,
    StageInput,
    StagePath,
)
from swarmnode.extensions.pipeline.stages.stage_model import (
    StageModel,
    StagePart,
    StageSettings,
    build_stage,
)
from swarmnode.extensions.pipeline.stages.stage_worker import Activations, StageWorker
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.model.base_model import read_config
from swarmnode.model.head import TokenLogprobs
from swarmnode.training.packing import MicroBatch

MAX_TOKENS = 1 << 20
"""Most tokens of a micro-batch within one process: nobody here is a stranger."""


def load_stage(
    folder: Path,
    part: StagePart,
    settings: StageSettings,
    *,
    packs: bool | None = None,
    weights: WeightFolder | None = None,
) -> StageModel:
    """A stage of the model in `folder`, as `WholeModel.stage` makes it.

    `packs`: the result of `try_cut` for this model; None: call it now. `weights`: the folder, if it is open
    already. Raises ModelError if the model's family cannot be cut, or if files are missing or do not fit.
    """
    config = read_config(str(folder), str(folder))
    weights = weights or WeightFolder.open(folder)
    return build_stage(config, part, weights.read, settings, try_cut(config) if packs is None else packs)


class LocalPipeline:
    """All stages, each with the worker that a member would have."""

    def __init__(self, workers: Sequence[StageWorker]) -> None:
        """`workers` in the order of their stages, the data stage's first."""
        self.workers = tuple(workers)
        self._data = workers[0]
        self._waves = 0

    @classmethod
    def load(
        cls,
        folder: Path,
        ends: Sequence[int],
        settings: StageSettings,
        *,
        activations: Activations = "kept",
        packs: bool | None = None,
    ) -> "LocalPipeline":
        """The model in `folder`, cut behind the layers `ends`; the last of them is the number of layers.

        `packs`: as for `load_stage`. Raises ModelError where the model cannot be cut, or not so.
        """
        config = read_config(str(folder), str(folder))
        layers = int(config.get_text_config().num_hidden_layers)
        if list(ends) != sorted(ends) or not ends or ends[-1] != layers:
            raise ModelError(f"stages that end at {list(ends)} are no partition of {layers} layers")
        weights, packs = WeightFolder.open(folder), try_cut(config) if packs is None else packs
        parts = [
            StagePart(first, end, has_ends=number == 0)
            for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        stages = [load_stage(folder, part, settings, packs=packs, weights=weights) for part in parts]
        return cls([StageWorker(s, slots=1, max_tokens=MAX_TOKENS, activations=activations) for s in stages])

    @property
    def packs(self) -> bool:
        """True if micro-batches may be packed."""
        return self._data.model.packs

    @property
    def full_path(self) -> StagePath:
        return tuple(range(len(self.workers)))

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, path: StagePath) -> TokenLogprobs:
        """Returns log-probabilities of the completion tokens along a path, without gradient."""
        hidden_BTD = self._data.model.embed(batch.input_ids_BT)
        for worker in self._along(path):
            hidden_BTD = worker.model.forward(hidden_BTD, batch.layout)
        return batch_logprobs(self._data.model, hidden_BTD, batch)

    def accumulate(self, inputs: LossInputs, objective: Objective) -> float:
        """One micro-batch along its path and back: every stage on it adds up its gradients. Returns the loss.

        Raises ModelError for a path that this pipeline does not have, and Rejected as the workers do.
        """
        workers = self._along(inputs.path)
        attempt = MicroBatchAttempt(0, self._data.iteration, self._waves)
        self._waves += 1
        try:
            return self._there_and_back(workers, attempt, inputs, objective)
        finally:
            for worker in workers:
                worker.release(attempt.agent)

    def take_gradients(self) -> list[GradientSum]:
        """Returns the gradients of every stage, in their order, and ends the iteration."""
        self._waves = 0
        return [worker.take_gradients() for worker in self.workers]

    def _there_and_back(
        self,
        workers: Sequence[StageWorker],
        attempt: MicroBatchAttempt,
        inputs: LossInputs,
        objective: Objective,
    ) -> float:
        item = StageInput(attempt, inputs.batch.input_ids_BT, inputs.tokens, inputs.batch.layout)
        for worker in workers:
            item = replace(item, values=worker.forward(item))
        gradient_BTD: Tensor | None
        loss, gradient_BTD = self._data.loss(
            attempt, item.values, lambda hidden_BTD: objective(self._data.model, hidden_BTD, inputs)
        )
        for worker in reversed(workers):
            assert gradient_BTD is not None  # Only the data stage, first of every path, gives none.
            gradient_BTD = worker.backward(attempt, gradient_BTD)
            worker.commit(attempt)
        return loss

    def _along(self, path: StagePath) -> list[StageWorker]:
        known = len(self.workers)
        if path[:1] != (0,) or len(set(path)) != len(path) or not all(0 <= n < known for n in path):
            raise ModelError(
                f"{path} is no path through {known} stages",
                hint="it begins at stage 0 and visits no stage twice",
            )
        return [self.workers[number] for number in path]


def _item(attempt: MicroBatchAttempt, batch: MicroBatch, values: Tensor) -> StageInput:
    return StageInput(attempt, values, len(batch.targets_N), batch.layout)
