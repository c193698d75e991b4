from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import EngineError
from swarmnode.training.packing import TrainingSample, micro_batches, to_samples
from swarmnode.types import RolloutGroup, Span, one_span

CPU = torch.device("cpu")
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=40)


def sample(prompt: int, completion: int) -> TrainingSample:
    return TrainingSample((3,) * prompt, (4,) * completion, 0.5, None, ())


@given(lengths, st.integers(16, 200))
def test_every_sample_travels_once_and_no_batch_exceeds_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    samples = [sample(*pair) for pair in lengths]
    batches = list(micro_batches(samples, budget, CPU))
    assert sorted(id(s) for b in batches for s in b.samples) == sorted(map(id, samples))
    assert all(b.input_ids_BT.numel() <= budget or len(b.samples) == 1 for b in batches)


def test_the_mask_covers_exactly_the_completion_with_its_end() -> None:
    one = TrainingSample((5, 6), (7, 1), 0.5, None, ())
    other = TrainingSample((5,), (7, 8, 9, 1), -0.5, None, ())
    (batch,) = micro_batches([one, other], 100, CPU)
    assert batch.completion_mask_BT.tolist() == [
        [False, False, True, True, False],
        [False, True, True, True, True],
    ]
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 1, 0], [5, 7, 8, 9, 1]]


def test_every_own_token_brings_its_log_probability_its_version_and_whether_its_keys_were_stale() -> None:
    resumed = TrainingSample(
        (5,), (7, 8, 1), 0.5, (-1.0, -2.0, -3.0), (Span(4, 0, 2), Span(6, 2, 3, "stale"))
    )
    strangers = TrainingSample((5,), (9, 1), 0.5, None, one_span(70, 2))
    own = TrainingSample((5,), (3,), -1.0, (-4.0,), one_span(6, 1))
    (batch,) = micro_batches([resumed, strangers, own], 100, CPU)
    assert [s.completion_ids for s in batch.samples] == [(3,), (9, 1), (7, 8, 1)], "shortest first"
    assert batch.own.mask_N.tolist() == [True, False, False, True, True, True]
    assert batch.own.logprobs_M.tolist() == [-4.0, -1.0, -2.0, -3.0]
    assert batch.own.versions_M.tolist() == [6, 4, 4, 6]
    assert batch.own.stale_M.tolist() == [False, False, False, True]


def test_a_batch_of_strangers_has_no_own_tokens() -> None:
    (batch,) = micro_batches([sample(1, 2)], 100, CPU)
    assert batch.own.mask_N.tolist() == [False, False]
    assert len(batch.own.logprobs_M) == len(batch.own.versions_M) == len(batch.own.stale_M) == 0


def test_a_group_of_equal_rewards_yields_no_samples(group: Callable[..., RolloutGroup]) -> None:
    assert to_samples(group([[7, 1], [8, 1]], [1.0, 1.0]), (2,)) is None


def test_the_end_token_is_trained(group: Callable[..., RolloutGroup]) -> None:
    samples = to_samples(group([[7, 1], [8, 1]], [1.0, 0.0]), (2,))
    assert samples is not None and [s.completion_ids for s in samples] == [(7, 1), (8, 1)]


def test_an_aborted_or_unscored_completion_is_not_trained_on(group: Callable[..., RolloutGroup]) -> None:
    unscored = to_samples(group([[7, 1], [8, 1], [9, 1]], [1.0, 0.0, None]), (2,))
    assert unscored is not None and len(unscored) == 2
    assert to_samples(group([[7], [8]], [1.0, 0.0], finish="abort"), (2,)) == []


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(EngineError, match="at least one prompt"):
        list(micro_batches([TrainingSample((), (4,), 0.5, None, ())], 100, CPU))
