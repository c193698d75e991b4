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
from swarmnode.types import RolloutGroup, Span


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One completion with its credit, in token ids of the local policy."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float
    behaviour_logprobs: tuple[float, ...] | None
    """Log-probabilities recorded when the tokens were sampled. None: a stranger sampled them."""
    spans: tuple[Span, ...]
    """Which policy version sampled which tokens. A stranger's versions cannot be compared with ours."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """M of the N completion tokens of a batch, those that our own engine sampled, in row-major order."""

    mask_N: Tensor
    """True where a completion token is one of them."""
    logprobs_M: Tensor
    """As recorded when they were sampled."""
    versions_M: Tensor
    """The policy version that sampled the token. On the CPU, only measured with; `stale_M` too."""
    stale_M: Tensor
    """True where the token was sampled with keys and values of an older version."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of similar length as one right-padded batch of B rows and T columns."""

    samples: tuple[TrainingSample, ...]
    input_ids_BT: Tensor
    completion_mask_BT: Tensor
    """True where the token belongs to a completion, EOS included."""
    advantages_B: Tensor
    own: OwnTokens

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
        TrainingSample(prompt_ids, completion.token_ids, advantage, completion.logprobs, completion.spans)
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
    return MicroBatch(
        tuple(samples),
        input_ids.to(device),
        mask.to(device),
        advantages.to(device),
        _own_tokens(samples, device),
    )


def _own_tokens(samples: Sequence[TrainingSample], device: torch.device) -> OwnTokens:
    lengths = torch.tensor([len(sample.completion_ids) for sample in samples])
    is_own = torch.tensor([sample.behaviour_logprobs is not None for sample in samples])
    logprobs = [value for sample in samples for value in sample.behaviour_logprobs or ()]
    spans = [span for sample in samples if sample.behaviour_logprobs is not None for span in sample.spans]
    span_lengths = torch.tensor([span.end - span.start for span in spans], dtype=torch.long)
    versions = torch.tensor([span.version for span in spans], dtype=torch.long)
    stale = torch.tensor([span.kv == "stale" for span in spans], dtype=torch.bool)
    return OwnTokens(
        mask_N=is_own.repeat_interleave(lengths).to(device),
        logprobs_M=torch.tensor(logprobs, device=device),
        versions_M=versions.repeat_interleave(span_lengths),
        stale_M=stale.repeat_interleave(span_lengths),
    )
