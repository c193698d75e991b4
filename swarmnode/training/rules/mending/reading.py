"""Reads how likely others' texts are to our policy, and where it would rather continue with a later token.

mending.py -> rows -> [Reader] -> forward.py -> readings

A cut is promising if the token after it is likely at the place where the cut begins. The distribution at that
place gives this for all later tokens at once, so one forward pass covers all cuts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from swarmnode.training.forward import Forward
from swarmnode.training.packing import MicroBatch, TrainingSample
from swarmnode.training.rules.mending.cuts import Reading, ReadingRequest, places_to_look_at

LOGITS_AT_ONCE = 1 << 24
"""Logits over the vocabulary in one chunk: 64 MiB in float32."""


class Reader:
    """Reads rows with the current state of one policy, adapter included. Call it in the training thread."""

    def __init__(self, forward: Forward, policy: int) -> None:
        """`policy`: its number among the policies on the base of `forward`."""
        self._forward = forward
        self._policy = policy

    def __call__(self, rows: Sequence[ReadingRequest]) -> list[Reading]:
        """Returns the readings of the rows, in order. Raises ModelError if memory does not suffice for even
        the smallest batch."""
        if not rows:
            return []
        samples = [self._sample(row) for row in rows]
        longest = max(sample.length for sample in samples)
        looks = {id(sample): row.looks for sample, row in zip(samples, rows, strict=True)}
        found: dict[int, Reading] = {}
        with self._forward.alone:
            for guard in self._forward.until_it_fits(longest):
                with guard:
                    found = self._read(samples, looks)
        return [found[id(sample)] for sample in samples]

    def _sample(self, row: ReadingRequest) -> TrainingSample:
        return TrainingSample(row.prompt_ids, row.token_ids, 0.0, None, (), self._policy)

    @torch.no_grad()
    def _read(
        self, samples: Sequence[TrainingSample], looks: Mapping[int, Collection[int] | None]
    ) -> dict[int, Reading]:
        """Returns the readings by id(sample)."""
        found: dict[int, Reading] = {}
        for batch in self._forward.batches(samples):
            of_samples = [looks[id(sample)] for sample in batch.samples]
            with self._forward.policies_of(batch):
                # With a nucleus, a row's reading would depend on whether another row is looked into.
                if self._forward.top_p == 1 and all(one is None for one in of_samples):
                    rows = self._forward.logprobs(batch).logprobs_N.split(batch.completion_lengths)
                    readings = [Reading(row.tolist()) for row in rows]
                else:
                    readings = _with_looks(batch, self._forward.distributions(batch), of_samples)
            found.update(zip(map(id, batch.samples), readings, strict=True))
        return found


def _with_looks(
    batch: MicroBatch,
    distributions: Callable[[Tensor], Tensor],
    looks: Sequence[Collection[int] | None],
) -> list[Reading]:
    """Returns the readings of a batch's samples, with the log-probabilities of later tokens at each place
    that is looked at."""
    device = batch.targets_N.device
    every_N = torch.arange(len(batch.targets_N), device=device)
    logprobs_N = _gathered(distributions, every_N, batch.targets_N[:, None])[:, 0]
    starts = [0, *accumulate(batch.completion_lengths)]
    rows = [row.tolist() for row in logprobs_N.split(batch.completion_lengths)]
    asked = [
        (number, place)
        for number, (row, look) in enumerate(zip(rows, looks, strict=True))
        if look is not None
        for place in places_to_look_at(row, look)
    ]
    behind = [batch.samples[number].completion_ids[place + 1 :] for number, place in asked]
    width = max(map(len, behind), default=0)
    # Padded to one width; the padding is never read.
    wanted_RK = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in behind], device=device)
    places_R = torch.tensor([starts[number] + place for number, place in asked], device=device)
    values = _gathered(distributions, places_R, wanted_RK).tolist() if asked else []
    after_cut: list[dict[int, list[float]]] = [{} for _ in rows]
    for (number, place), ids, row in zip(asked, behind, values, strict=True):
        after_cut[number][place] = row[: len(ids)]
    return [Reading(row, after) for row, after in zip(rows, after_cut, strict=True)]


def _gathered(distributions: Callable[[Tensor], Tensor], places_R: Tensor, tokens_RK: Tensor) -> Tensor:
    """Returns log-probabilities of K tokens at each of R places, with few rows of the vocabulary at once. [R,
    K]"""
    width = distributions(places_R[:1]).shape[1]
    step = max(1, LOGITS_AT_ONCE // width)
    parts = zip(places_R.split(step), tokens_RK.split(step), strict=True)
    return torch.cat([distributions(places).gather(1, tokens) for places, tokens in parts])
