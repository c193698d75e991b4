"""Packs completions with credit into the micro-batches of one optimizer step.

round.py -> [packing] -> model/layout.py, model/attention.py -> forward.py -> losses.py

If packed, the samples of a micro-batch follow each other in one row without pads, and samples with the same
prompt share its tokens: the prompt appears once, with each completion after it (see layout.py). A model that
computes something else that way gets rows padded on the right, each with its own prompt: positions count from
0, and under causal attention no real token ever sees a pad. Either way a sample has the same
log-probabilities as alone.

Text that an environment wrote into a completion stays in the row, as the policy read it there. It is not a
target, has no credit and counts in no mean: N counts only the tokens that are learned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import EngineError
from swarmnode.model.layout import PackedLayout, packed_layout
from swarmnode.types import RolloutGroup, Span, Stretch, sampled_places

MOST_KEYS_PER_TOKEN = 4
"""The most keys per token of the budget. Attention repeats the keys and values of a shared prompt for every
completion, and the backward pass needs them all. With Qwen3-0.6B's widths a token's activations are 20
thousand numbers per layer and a key with its value 2 thousand: a third more memory at worst. The bound only
affects large groups whose prompt is more than 3 times as long as their completions: their micro-batches hold
fewer tokens."""


@dataclass(frozen=True)
class TrainingSample:
    """One completion with its credit, in token ids of the local policy."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float
    behaviour_logprobs: tuple[float, ...] | None
    """Log-probabilities recorded when the tokens were sampled. None: a stranger sampled them, or they are
    replayed."""
    spans: tuple[Span, ...]
    """The policy version that sampled each run of tokens. A stranger's versions cannot be compared with
    ours."""
    policy: int = 0
    """The number of the node's policy that learns from it."""
    shaped: bool = False
    """Weight its tokens by `token_weights.shaped_weights`. Only without behaviour log-probabilities."""
    given: tuple[Stretch, ...] = ()
    """Completion tokens that are read but not learned, because an environment wrote them."""
    replayed: bool = False
    """A right answer of the book: the ratio against the policy before the round does not bound it."""

    @cached_property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @cached_property
    def learned(self) -> Sequence[int]:
        """Places of the completion tokens that are learned."""
        return sampled_places(len(self.completion_ids), self.given)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """M of the N learned tokens of a batch: those that our own engine sampled, in the batch's order."""

    mask_N: Tensor
    """True for each learned token that our own engine sampled."""
    logprobs_M: Tensor
    """Log-probabilities recorded when the tokens were sampled."""
    versions_M: Tensor
    """The policy version that sampled the token. On the CPU, for measurement only, like `stale_M`."""
    stale_M: Tensor
    """True if the token was sampled with keys and values of an older version."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that pass through the model together: packed [1, T], or right-padded [B, T]."""

    samples: tuple[TrainingSample, ...]
    """Samples in the order of the batch; those of one policy are contiguous."""
    input_ids_BT: Tensor
    predictors_N: Tensor
    """The flattened B*T positions that predict learned tokens: the one before each of them. The last token of
    a shared prompt appears once for every completion."""
    targets_N: Tensor
    """The predicted tokens, EOS included, sample after sample."""
    own: OwnTokens
    shaped_N: Tensor | None
    """True for tokens that count by `token_weights.shaped_weights`. None: there are none."""
    advantages_N: Tensor
    """The sample's advantage at each of its learned tokens."""
    completion_lengths: list[int]
    """Learned tokens per sample; they add up to N."""
    tokens_of_policies: tuple[tuple[int, int], ...]
    """(policy, number of the flattened B*T tokens it owns), in order; pads belong to their row's policy."""
    layout: PackedLayout | None
    """Places of the packed samples. None: the batch is padded."""

    def forward_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the decoder, or of the whole causal LM.

        For padded batches, positions are left to the model: they count from 0, and some families take none.
        """
        if self.layout is None:
            return {"input_ids": self.input_ids_BT, "use_cache": False}
        return self.layout.arguments(self.input_ids_BT)


def credited_samples(
    group: RolloutGroup,
    prompt_ids: tuple[int, ...],
    advantages: Sequence[float | None],
    *,
    policy: int = 0,
) -> list[TrainingSample]:
    """Returns the trainable completions of a group with these advantages. Leaves out aborted and empty ones,
    and those whose advantage is None; the rest of the group keeps its advantages."""
    return [
        TrainingSample(prompt_ids, c.token_ids, advantage, c.logprobs, c.spans, policy, given=c.given)
        for c, advantage in zip(group.completions, advantages, strict=True)
        if advantage is not None and c.sampled_tokens and c.finish != "abort"
    ]


def completion_tokens(samples: Sequence[TrainingSample]) -> int:
    """Returns the number of learned tokens: all completion tokens that no environment wrote.

    >>> completion_tokens([])
    0
    """
    return sum(len(sample.learned) for sample in samples)


def micro_batches(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    device: torch.device,
    *,
    packed: bool,
    round_up: bool = False,
) -> Iterator[MicroBatch]:
    """Yields batches of at most `max_tokens` tokens, padding included; a longer sample gets a batch of its
    own. `round_up`: appends `spare_tokens` pads to a packed row if there is room; nobody learns from them.

    `packed` needs a model that `prepare_for_packing` accepted. Samples of one policy with one prompt then
    stay together as far as they fit, and a prompt counts once per batch. The largest batches come first, so
    that a lack of memory shows at once. Raises EngineError for a sample without prompt or completion.
    """
    if any(not sample.prompt_ids or not sample.learned for sample in samples):
        raise EngineError("a training sample needs at least one prompt and one completion token")
    if not packed:
        for bin_ in first_fit_decreasing([sample.length for sample in samples], max_tokens, padded=True):
            yield _padded([samples[index] for index in bin_], device)
        return
    parts = [part for mates in _by_prompt(samples) for part in _parts(mates, max_tokens)]
    for bin_ in first_fit_decreasing([_size(part) for part in parts], max_tokens):
        chosen = [sample for index in bin_ for sample in parts[index]]
        yield _packed(chosen, device, max_tokens if round_up else 0)


def first_fit_decreasing(lengths: Sequence[int], capacity: int, *, padded: bool = False) -> list[list[int]]:
    """Returns the indices of `lengths` in bins: longest first, each in the first bin where it still fits.

    Uses at most 11/9 of the fewest bins plus 6/9 (Dosa 2007). If `padded`, an item fills a whole row as wide
    as the bin's longest. An item beyond the capacity gets a bin of its own. Equal lengths keep their order.

    >>> first_fit_decreasing([3, 7, 5, 2], capacity=10)
    [[1, 0], [2, 3]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # The room that one more item takes in each bin.
        takes = [lengths[bin_[0]] for bin_ in bins] if padded else [lengths[index]] * len(bins)
        found = next((n for n, left in enumerate(room) if takes[n] <= left), None)
        if found is None:
            bins.append([index])
            room.append(capacity - lengths[index])
        else:
            bins[found].append(index)
            room[found] -= takes[found]
    return bins


def _by_prompt(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Groups samples by policy and prompt, each group longest first, in the order in which prompts first
    appear."""
    found: dict[tuple[int, tuple[int, ...]], list[TrainingSample]] = {}
    for sample in samples:
        found.setdefault((sample.policy, sample.prompt_ids), []).append(sample)
    return [sorted(mates, key=lambda sample: -sample.length) for mates in found.values()]


def _parts(mates: Sequence[TrainingSample], max_tokens: int) -> Iterator[list[TrainingSample]]:
    """Yields all samples with one prompt, longest first, in as few parts as possible: each part repeats the
    prompt."""
    room = max_tokens - len(mates[0].prompt_ids)
    most = max(1, MOST_KEYS_PER_TOKEN * max_tokens // mates[0].length)
    for bin_ in first_fit_decreasing([len(sample.completion_ids) for sample in mates], room):
        # Evenly: a last part of one sample would have the prompt to itself.
        count = -(-len(bin_) // most)
        yield from ([mates[index] for index in bin_[number::count]] for number in range(count))


def _size(mates: Sequence[TrainingSample]) -> int:
    """Returns the share of a batch's token budget that samples with one prompt take; more than their number
    of tokens if they have many keys."""
    prompt = len(mates[0].prompt_ids)
    keys = sum(sample.length for sample in mates)
    return max(keys - (len(mates) - 1) * prompt, -(-keys // MOST_KEYS_PER_TOKEN))


def spare_tokens(tokens: int) -> int:
    """Returns the number of pads that make a row's length one of 16 between a power of two and the next.

    A number of rows that was not used recently is expensive in bfloat16: oneDNN prepares itself for it, half
    a millisecond per product, and freed memory does not fit, so the system hands out fresh pages: together a
    third of a step. At most 6 % of pads, 2 % on average, keep the number of such lengths small.

    >>> spare_tokens(2049), spare_tokens(2048), spare_tokens(1001), spare_tokens(9)
    (127, 0, 23, 0)
    """
    return -tokens % (1 << max(0, tokens.bit_length() - 5))


def _packed(samples: Sequence[TrainingSample], device: torch.device, room: int) -> MicroBatch:
    """Returns one row: each prompt, then the completions that share it, then pads if they fit into `room`
    tokens."""
    ordered: list[TrainingSample] = []
    row: list[int] = []
    lengths: list[int] = []
    prompts: list[int | None] = []
    predictors: list[int] = []
    per_policy: list[tuple[int, int]] = []
    for mates in sorted(_by_prompt(samples), key=lambda mates: mates[0].policy):
        begin = len(row)
        row += mates[0].prompt_ids
        last_of_prompt = len(row) - 1
        shared = None
        if len(mates) > 1:
            shared = len(lengths)
            lengths.append(len(row) - begin)
            prompts.append(None)
        for sample in mates:
            start = len(row) - 1
            predictors += [start + place if place else last_of_prompt for place in sample.learned]
            row += sample.completion_ids
            lengths.append(len(sample.completion_ids) if len(mates) > 1 else sample.length)
            prompts.append(shared)
        ordered += mates
        per_policy.append((mates[0].policy, len(row) - begin))
    if 0 < (spare := spare_tokens(len(row))) <= room - len(row):
        # As long as the first run, so that they fill rows of an existing box.
        pads = [min(lengths[0], spare - start) for start in range(0, spare, lengths[0])]
        row += [0] * spare
        lengths += pads
        prompts += [None] * len(pads)
        per_policy.append((per_policy[-1][0], spare))
    layout = packed_layout(lengths, device, prompts)
    ids_1T = torch.tensor([row], device=device)
    return _batch(ordered, ids_1T, predictors, per_policy, layout)


def _padded(samples: Sequence[TrainingSample], device: torch.device) -> MicroBatch:
    """Returns a batch with one row per sample, padded on the right."""
    # A stable sort: within a policy, longest first.
    samples = sorted(samples, key=lambda sample: sample.policy)
    width = max(sample.length for sample in samples)
    rows = [[*s.prompt_ids, *s.completion_ids, *[0] * (width - s.length)] for s in samples]
    predictors = [
        row * width + len(sample.prompt_ids) - 1 + place
        for row, sample in enumerate(samples)
        for place in sample.learned
    ]
    per_policy = [(sample.policy, width) for sample in samples]
    return _batch(samples, torch.tensor(rows, device=device), predictors, per_policy, None)


def _batch(
    samples: Sequence[TrainingSample],
    input_ids_BT: Tensor,
    predictors: Sequence[int],
    per_policy: Sequence[tuple[int, int]],
    layout: PackedLayout | None,
) -> MicroBatch:
    device = input_ids_BT.device
    counts = [len(sample.learned) for sample in samples]
    counts_B = torch.tensor(counts)
    advantages_B = torch.tensor([sample.advantage for sample in samples])
    return MicroBatch(
        samples=tuple(samples),
        input_ids_BT=input_ids_BT,
        predictors_N=torch.tensor(predictors, device=device),
        targets_N=torch.tensor(
            [s.completion_ids[place] for s in samples for place in s.learned], device=device
        ),
        own=_own_tokens(samples, counts_B, device),
        shaped_N=_shaped_tokens(samples, counts_B, device),
        advantages_N=advantages_B.repeat_interleave(counts_B).to(device),
        completion_lengths=counts,
        tokens_of_policies=tuple(
            (policy, sum(tokens for _, tokens in runs))
            for policy, runs in groupby(per_policy, key=lambda pair: pair[0])
        ),
        layout=layout,
    )


def _shaped_tokens(
    samples: Sequence[TrainingSample], counts_B: Tensor, device: torch.device
) -> Tensor | None:
    if not any(sample.shaped for sample in samples):
        return None
    return torch.tensor([sample.shaped for sample in samples]).repeat_interleave(counts_B).to(device)


def _own_tokens(samples: Sequence[TrainingSample], counts_B: Tensor, device: torch.device) -> OwnTokens:
    is_own = torch.tensor([sample.behaviour_logprobs is not None for sample in samples])
    own = [sample for sample in samples if sample.behaviour_logprobs is not None]
    logprobs = [
        row[place] for sample in own for row in (sample.behaviour_logprobs or (),) for place in sample.learned
    ]
    spans = [span for sample in own for span in sample.spans]
    span_lengths = torch.tensor(
        [_learned_in(span, sample) for sample in own for span in sample.spans], dtype=torch.long
    )
    versions = torch.tensor([span.version for span in spans], dtype=torch.long)
    stale = torch.tensor([span.kv == "stale" for span in spans], dtype=torch.bool)
    return OwnTokens(
        mask_N=is_own.repeat_interleave(counts_B).to(device),
        logprobs_M=torch.tensor(logprobs, device=device),
        versions_M=versions.repeat_interleave(span_lengths),
        stale_M=stale.repeat_interleave(span_lengths),
    )


def _learned_in(span: Span, sample: TrainingSample) -> int:
    """Returns the number of tokens of a span that are learned."""
    given = sum(max(0, min(span.end, end) - max(span.start, start)) for start, end in sample.given)
    return span.end - span.start - given
