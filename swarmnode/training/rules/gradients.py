"""Agreement of lessons: gradients of the likelihood of several lists of answers, at the policy of now.

teachers.py -> [Gradients] -> forward.py, one backward pass a list -> cosines
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.model.policy import Policy
from swarmnode.training.forward import Forward
from swarmnode.training.packing import TrainingSample
from swarmnode.training.rules.book import Entry


class Gradients:
    """`Cosines` of teachers.py, over the adapter of one policy. Call it in the thread that trains, between
    its steps."""

    def __init__(
        self, forward: Forward, policy: Policy, render: Callable[[str], tuple[int, ...]], *, max_tokens: int
    ) -> None:
        """`render`: token ids of a prompt. `max_tokens`: longest answer that our sampler allows; longer ones
        are not looked at."""
        self._forward = forward
        self._policy = policy
        self._render = render
        self._max_tokens = max_tokens

    def __call__(self, finds: Sequence[Entry], lists: Sequence[Sequence[Entry]]) -> list[float | None]:
        """The cosine of each list with the finds of its tasks: the mean over its answers of that of their
        task, as what one task asks for is noise to another, and the one that surprises most would drown the
        rest. With all finds at once where there are none of its tasks.
        Raises ModelError where no memory is left to try."""
        with self._forward.alone():
            known = self._by_task(finds)
            return [self._agreement(known, one) for one in lists]

    def _agreement(self, known: Mapping[str, Tensor], entries: Sequence[Entry]) -> float | None:
        found_in = [entry for entry in entries if entry.task in known]
        if not found_in:
            return _cosine(torch.stack([*known.values()]).sum(0), self._gradient(entries)) if known else None
        counts = Counter(entry.task for entry in found_in)
        cosines = {task: _cosine(known[task], one_D) for task, one_D in self._by_task(found_in).items()}
        counted = [(counts[task], cosine) for task, cosine in cosines.items() if cosine is not None]
        answers = sum(count for count, _ in counted)
        return sum(count * cosine for count, cosine in counted) / answers if answers else None

    def _by_task(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        tasks = sorted({entry.task for entry in entries})
        found = {task: self._gradient([one for one in entries if one.task == task]) for task in tasks}
        return {task: one_D for task, one_D in found.items() if one_D is not None}

    def _gradient(self, entries: Sequence[Entry]) -> Tensor | None:
        """Returns the gradient of the mean negative log-likelihood of a token. None: nothing can be read, or
        it is not finite."""
        samples = [self._sample(entry) for entry in entries if len(entry.token_ids) <= self._max_tokens]
        tokens = sum(len(sample.learned) for sample in samples)
        if tokens == 0:
            return None
        for guard in self._forward.until_it_fits(max(sample.length for sample in samples)):
            with guard:
                self._forget()
                self._add(samples, tokens)
        parts = [
            torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in self._policy.parameters
        ]
        self._forget()
        gradient_D = torch.cat([part.flatten().float() for part in parts])
        return gradient_D if bool(torch.isfinite(gradient_D).all()) else None

    def _add(self, samples: Sequence[TrainingSample], tokens: int) -> None:
        for batch in self._forward.batches(samples):
            with self._forward.policies_of(batch):
                (-self._forward.logprobs(batch).logprobs_N.sum() / tokens).backward()

    def _forget(self) -> None:
        for parameter in self._policy.parameters:
            parameter.grad = None

    def _sample(self, entry: Entry) -> TrainingSample:
        prompt_ids = self._render(entry.prompt)
        number = self._policy.number
        return TrainingSample(prompt_ids, entry.token_ids, 0.0, None, (), number, given=entry.given)


def _cosine(one_D: Tensor | None, other_D: Tensor | None) -> float | None:
    if one_D is None or other_D is None:
        return None
    lengths = float(one_D.norm() * other_D.norm())
    return max(-1.0, min(1.0, float(one_D @ other_D) / lengths)) if lengths > 0 else None
