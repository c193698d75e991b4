"""Work that runs out of memory is repeated in smaller micro-batches, and nothing of what failed is kept."""

from collections.abc import Iterator, Sequence
from weakref import ReferenceType, ref

import pytest
import torch

from swarmnode.errors import ModelError
from swarmnode.model.policy import Policy
from swarmnode.settings.config import TrainingConfig
from swarmnode.training.forward import Forward
from swarmnode.training.packing import MicroBatch, TrainingSample
from swarmnode.training.trainer import rehearse

LONGEST = 50


@pytest.fixture
def forward(policy: Policy) -> Forward:
    return Forward(policy, TrainingConfig(micro_batch_tokens=400), temperature=1.0)


def ran_out() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory")


def test_the_largest_batch_is_tried_and_leaves_no_gradient(
    forward: Forward, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    batches = forward.batches

    def counted(samples: Sequence[TrainingSample]) -> Iterator[MicroBatch]:
        for batch in batches(samples):
            seen.append(sum(sample.length for sample in batch.samples))
            if len(seen) == 1:
                raise ran_out()
            yield batch

    monkeypatch.setattr(forward, "batches", counted)
    rehearse(forward, policy, LONGEST)
    assert max(seen[1:]) > 200 - LONGEST and sum(seen[1:]) == 400 and forward.micro_batch_tokens == 200
    assert all(parameter.grad is None for parameter in policy.parameters)


def test_work_that_fits_is_done_once(forward: Forward) -> None:
    tried = 0
    for guard in forward.until_it_fits(LONGEST):
        with guard:
            tried += 1
    assert (tried, forward.micro_batch_tokens) == (1, 400)


def test_work_is_repeated_in_halves_until_it_fits(forward: Forward) -> None:
    tried: list[int] = []
    for guard in forward.until_it_fits(LONGEST):
        with guard:
            tried.append(forward.micro_batch_tokens)
            if forward.micro_batch_tokens > 100:
                raise ran_out()
    assert tried == [400, 200, 100]


def test_where_no_micro_batch_can_be_smaller_the_error_says_what_to_do_and_what_failed(
    forward: Forward,
) -> None:
    tried: list[tuple[int, bool]] = []
    with pytest.raises(ModelError, match="smaller --model") as caught:
        for guard in forward.until_it_fits(300):
            with guard:
                tried.append((forward.micro_batch_tokens, forward.budget.checkpointing))
                raise ran_out()
    assert tried == [(400, False), (300, False), (300, True)]
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), KeyboardInterrupt()])
def test_any_other_error_passes_and_nothing_is_repeated(forward: Forward, error: BaseException) -> None:
    tried = 0
    with pytest.raises(type(error)):
        for guard in forward.until_it_fits(LONGEST):
            with guard:
                tried += 1
                raise error
    assert (tried, forward.micro_batch_tokens) == (1, 400)


def test_the_tensors_of_work_that_failed_are_gone_when_it_begins_again(forward: Forward) -> None:
    seen: list[ReferenceType[torch.Tensor]] = []

    def work() -> None:
        activations = torch.zeros(8)
        seen.append(ref(activations))
        if len(seen) < 3:
            raise ran_out()

    alive: list[int] = []
    for guard in forward.until_it_fits(LONGEST):
        alive.append(sum(one() is not None for one in seen))
        with guard:
            work()
    assert alive == [0, 0, 0]
