"""Gradients of the likelihood of several lists of answers at the current policy, and their agreement.

teachers.py -> [Gradients] -> forward.py, one backward pass for many lists -> agreement
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import islice

import torch
from torch import Tensor

from swarmnode.chat import Prompt, read_prompt
from swarmnode.model.policy import Policy
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.teachers import Comparison

PROMPTS_RENDERED = 1024
"""The most prompts whose tokens are cached."""

NUMBERS_AT_ONCE = 1 << 26
"""Gradient values that one pass may hold separately: 256 MiB in float32."""


class Gradients:
    """Implements `Compare` of teachers.py for the adapter of one policy. Call it in the training thread,
    between steps."""

    def __init__(
        self,
        forward: Forward,
        policy: Policy,
        render: Callable[[Prompt], tuple[int, ...]],
        *,
        max_tokens: int,
    ) -> None:
        """`render`: returns the token ids of a prompt. `max_tokens`: the longest answer that our sampler
        allows; longer ones are ignored."""
        self._forward = forward
        self._policy = policy
        # Answers to one example are measured together, and finds again and again.
        self._render = lru_cache(PROMPTS_RENDERED)(render)
        self._max_tokens = max_tokens

    def __call__(self, finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[Comparison | None]:
        """Returns the agreement of each list with our finds.

        Compares task by task, because the gradient of one task is noise to another and the most surprising
        task would drown out the rest, then averages (`_weight`). A list whose tasks have no finds is compared
        with all finds at once. Raises ModelError if memory does not suffice for even the smallest batch."""
        with self._forward.alone:
            by_task = _by_task(finds)
            found = zip(by_task, self._gradients([*by_task.values()]), strict=True)
            known = {task: one_D for task, one_D in found if one_D is not None}
            if not known:
                return [None] * len(lists)
            # Added one by one: stacking would hold all of them twice.
            known[""] = reduce(torch.add, known.values()) / len(known)
            # For each list: its answers to each task with finds, or all of them if no task has any.
            of_list = [
                {task: one for task, one in _by_task(entries).items() if task in known} or {"": entries}
                for entries in lists
            ]
            parts = [(task, len(one)) for parts in of_list for task, one in parts.items()]
            found = self._gradients([one for parts in of_list for one in parts.values()])
            agreements = [
                (_weight(answers, len(by_task.get(task, finds))), _comparison(known[task], one_D))
                for (task, answers), one_D in zip(parts, found, strict=True)
            ]
        rest = iter(agreements)
        return [_mean([*islice(rest, len(parts))]) for parts in of_list]

    def _gradients(self, lists: Sequence[Sequence[Entry]]) -> Iterator[Tensor | None]:
        """Yields, for each list, the gradient of the mean negative log-likelihood per token, with as many
        lists per pass as fit. None: no answer could be read, or the gradient is not finite."""
        numbers = sum(parameter.numel() for parameter in self._policy.parameters)
        at_once = max(1, NUMBERS_AT_ONCE // numbers)
        for start in range(0, len(lists), at_once):
            some = [
                [self._sample(entry, number) for entry in one if len(entry.token_ids) <= self._max_tokens]
                for number, one in enumerate(lists[start : start + at_once])
            ]
            found: dict[int, Tensor] = {}
            samples = [sample for one in some for sample in one]
            for guard in self._forward.until_it_fits(max((sample.length for sample in samples), default=0)):
                with guard:
                    found = self._of_samples(samples)
            for number in range(len(some)):
                one_D = found.get(number)
                yield one_D if one_D is not None and bool(torch.isfinite(one_D).all()) else None

    def _of_samples(self, samples: Sequence[TrainingSample]) -> dict[int, Tensor]:
        """Returns the gradient of each list by its number."""
        tokens = Counter[int]()
        for sample in samples:
            tokens[sample.policy] += len(sample.learned)
        found: dict[int, Tensor] = {}
        for batch in self._forward.batches(samples, apart=True):
            with self._forward.apart(batch, self._policy) as copies:
                logprobs = self._forward.logprobs(batch).logprobs_N.split(batch.completion_lengths)
            parts = zip(batch.samples, logprobs, strict=True)
            loss = -torch.stack([one_N.sum() / tokens[sample.policy] for sample, one_N in parts]).sum()
            inputs = [one[parameter] for one in copies for parameter in self._policy.parameters]
            gradients = iter(torch.autograd.grad(loss, inputs))
            for number, _ in batch.tokens_of_policies:
                of_list = islice(gradients, len(self._policy.parameters))
                one_D = torch.cat([gradient.flatten().float() for gradient in of_list])
                found[number] = found[number] + one_D if number in found else one_D
        return found

    def _sample(self, entry: Entry, number: int) -> TrainingSample:
        prompt_ids = self._render(read_prompt(entry.prompt))
        return TrainingSample(prompt_ids, entry.token_ids, 0.0, None, (), number, given=entry.given)


def _by_task(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.task, []).append(entry)
    return dict(sorted(found.items()))


def _weight(answers: int, finds: int) -> float:
    """Returns the weight of a comparison of `answers` with `finds`: the inverse of its variance if all
    answers were alike. With a single find in a task, which is short by chance, all authors may score -0.8
    there."""
    return answers * finds / (answers + finds)


def _mean(weighed: Sequence[tuple[float, Comparison | None]]) -> Comparison | None:
    known = [(weight, one) for weight, one in weighed if one is not None]
    if not known:
        return None
    total = sum(weight for weight, _ in known)
    return Comparison(
        cosine=sum(weight * one.cosine for weight, one in known) / total,
        surprise=sum(weight * one.surprise for weight, one in known) / total,
    )


def _comparison(found_D: Tensor, one_D: Tensor | None) -> Comparison | None:
    if one_D is None:
        return None
    found, length = float(found_D.norm()), float(one_D.norm())
    if not found * length > 0:
        return None
    cosine = max(-1.0, min(1.0, float(found_D @ one_D) / (found * length)))
    return Comparison(cosine, math.log(length / found))
