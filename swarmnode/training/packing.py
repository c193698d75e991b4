"""From completions with credit to the micro-batches of one optimizer step.

advantage -> [packing] -> logprob -> loss

Rows are padded on the right and positions count from 0, so under causal attention no real token ever sees a
pad and a row's log-probabilities are those it would have alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.training.advantage import group_advantages
from swarmnode.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One completion with its credit, in token ids of the local policy."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float
    behaviour_logprobs: tuple[float, ...] | None
    """Log-probabilities recorded when the tokens were sampled. None: a stranger sampled them."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of similar length as one right-padded batch of B rows and T columns."""

    samples: tuple[TrainingSample, ...]
    input_ids_BT: Tensor
    completion_mask_BT: Tensor
    """True where the token belongs to a completion, EOS included."""
    advantages_B: Tensor

    @property
    def completion_lengths(self) -> list[int]:
        """Completion tokens per row, in order."""
        return [len(sample.completion_ids) for sample in self.samples]


def to_samples(group: RolloutGroup, prompt_ids: tuple[int, ...]) -> list[TrainingSample] | None:
    """Trainable completions of a group, or None when the group has no gradient (all rewards equal).

    Aborted, empty and unscored completions are left out; their group-mates keep their advantages.
    """
    advantages = group_advantages(group.rewards)
    if advantages is None:
        return None
    return [
        TrainingSample(prompt_ids, completion.token_ids, advantage, completion.logprobs)
        for completion, advantage in zip(group.completions, advantages, strict=True)
        if advantage is not None and completion.token_ids and completion.finish != "abort"
    ]


def micro_batches(
    samples: Sequence[TrainingSample], max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Batches of at most `max_tokens` tokens, padding included; a single longer sample travels alone."""
    row: list[TrainingSample] = []
    for sample in sorted(samples, key=lambda s: s.length):
        if not sample.prompt_ids or not sample.completion_ids:
            raise EngineError("a training sample needs at least one prompt and one completion token")
        if row and sample.length * (len(row) + 1) > max_tokens:
            yield _pad(row, device)
            row = []
        row.append(sample)
    if row:
        yield _pad(row, device)


def _pad(samples: Sequence[TrainingSample], device: torch.device) -> MicroBatch:
    width = max(sample.length for sample in samples)
    input_ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        input_ids[row, : sample.length] = torch.tensor(sample.prompt_ids + sample.completion_ids)
        mask[row, len(sample.prompt_ids) : sample.length] = True
    advantages = torch.tensor([sample.advantage for sample in samples])
    return MicroBatch(tuple(samples), input_ids.to(device), mask.to(device), advantages.to(device))
