from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarmnode.errors import EngineError
from swarmnode.model.adapters.lora_patch import RoutedTokens
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.packable import prepare_for_packing
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig, TrainingConfig
from swarmnode.training.packing import (
    MOST_KEYS_PER_TOKEN,
    MicroBatch,
    TrainingSample,
    first_fit_decreasing,
    micro_batches,
    spare_tokens,
)
from swarmnode.training.round import SampleRules, lesson_samples
from swarmnode.training.rules.lessons import GroupLesson
from swarmnode.types import RolloutGroup, Span, one_span

CPU = torch.device("cpu")
seeded = settings(deadline=None, derandomize=True, max_examples=60)
pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=40)
sizes = st.lists(st.integers(1, 60), max_size=60)
both_layouts = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def sample(prompt: int, completion: int, policy: int = 0) -> TrainingSample:
    """Samples with equally long prompts have the same one."""
    return TrainingSample((3,) * prompt, (4,) * completion, 0.5, None, (), policy)


def prompts_of(samples: Sequence[TrainingSample]) -> set[tuple[int, tuple[int, ...]]]:
    return {(sample.policy, sample.prompt_ids) for sample in samples}


def unique_tokens(samples: Sequence[TrainingSample]) -> int:
    prompts = sum(len(prompt) for _, prompt in prompts_of(samples))
    return prompts + sum(len(sample.completion_ids) for sample in samples)


def next_fit(lengths: Sequence[int], capacity: int) -> int:
    bins, room = 0, 0
    for length in lengths:
        if not bins or length > room:
            bins, room = bins + 1, capacity
        room -= length
    return bins


@seeded
@given(sizes, st.integers(20, 100))
def test_every_length_gets_into_one_bin_and_only_a_longer_one_exceeds_it(
    lengths: list[int], capacity: int
) -> None:
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= capacity or len(bin_) == 1 for bin_ in bins)


@seeded
@given(sizes, st.integers(20, 100))
def test_padded_bins_count_their_padding(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(lengths, capacity, padded=True)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(max(lengths[i] for i in b) * len(b) <= capacity or len(b) == 1 for b in bins)


@seeded
@given(sizes, st.integers(60, 200))
def test_there_are_no_more_bins_than_next_fit_makes_of_the_same_order(
    lengths: list[int], capacity: int
) -> None:
    assert len(first_fit_decreasing(lengths, capacity)) <= next_fit(sorted(lengths, reverse=True), capacity)


@seeded
@given(st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=12), st.randoms())
def test_full_bins_taken_apart_are_packed_again_within_dosas_bound(
    cuts: list[list[int]], random: Any
) -> None:
    """Pieces of k full bins fit into k bins, so k bounds the optimum from above."""
    pieces: list[int] = []
    for inner in cuts:
        ends = [0, *sorted(set(inner)), 100]
        pieces += [end - start for start, end in pairwise(ends)]
    random.shuffle(pieces)
    assert 9 * len(first_fit_decreasing(pieces, 100)) <= 11 * len(cuts) + 6


def test_packing_the_same_lengths_gives_the_same_bins() -> None:
    assert first_fit_decreasing([5, 9, 5, 3, 9, 1], 10) == [[1, 5], [4], [0, 2], [3]]
    assert first_fit_decreasing([5, 9, 5, 3, 9, 1], 10, padded=True) == [[1], [4], [0, 2], [3, 5]]


@both_layouts
@seeded
@given(lengths=pairs, budget=st.integers(16, 200), data=st.data())
def test_every_sample_travels_once_beside_those_of_its_policy(
    packed: bool, lengths: list[tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    samples = [sample(*pair, data.draw(st.integers(0, 2))) for pair in lengths]
    batches = list(micro_batches(samples, budget, CPU, packed=packed))
    assert sorted(id(s) for b in batches for s in b.samples) == sorted(map(id, samples))
    for batch in batches:
        tokens = batch.input_ids_BT.numel()
        assert tokens <= budget or len(batch.samples) == 1
        policies = [policy for policy, _ in batch.tokens_of_policies]
        assert policies == sorted({s.policy for s in batch.samples})
        assert sum(count for _, count in batch.tokens_of_policies) == tokens
        if packed:
            assert tokens == unique_tokens(batch.samples), "no padding, and every prompt once"


@seeded
@given(lengths=pairs, budget=st.integers(64, 200), policies=st.integers(1, 3))
def test_a_rounded_row_has_few_lengths_and_never_more_than_its_budget(
    lengths: list[tuple[int, int]], budget: int, policies: int
) -> None:
    samples = [sample(*pair, number % policies) for number, pair in enumerate(lengths)]
    exact = micro_batches(samples, budget, CPU, packed=True)
    for batch, rounded in zip(
        exact, micro_batches(samples, budget, CPU, packed=True, round_up=True), strict=True
    ):
        tokens = batch.input_ids_BT.numel()
        fits = tokens + spare_tokens(tokens) <= budget
        assert rounded.input_ids_BT.numel() == tokens + (spare_tokens(tokens) if fits else 0)
        assert torch.equal(rounded.input_ids_BT[:, :tokens], batch.input_ids_BT)
        assert torch.equal(rounded.predictors_N, batch.predictors_N), "nobody learns from a pad"
        assert sum(count for _, count in rounded.tokens_of_policies) == rounded.input_ids_BT.numel()
        assert rounded.layout is not None
        assert sum(rounded.layout.lengths) == rounded.input_ids_BT.numel()


def test_rows_of_any_length_become_16_lengths_in_an_octave() -> None:
    for begin in (64, 1024, 4096):
        rounded = {tokens + spare_tokens(tokens) for tokens in range(begin, 2 * begin)}
        assert len(rounded) <= 17
        assert max(spare_tokens(tokens) / tokens for tokens in range(begin, 2 * begin)) <= 1 / 16


@both_layouts
def test_predictors_are_the_positions_before_the_completion_tokens(packed: bool) -> None:
    one = TrainingSample((5, 6), (7, 1), 0.5, None, ())
    other = TrainingSample((5,), (8, 9, 2, 1), -0.5, None, (), policy=3)
    (batch,) = micro_batches([other, one], 100, CPU, packed=packed)
    assert batch.samples == (one, other), "sorted by policy"
    assert batch.targets_N.tolist() == [7, 1, 8, 9, 2, 1]
    assert batch.advantages_N.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, -0.5]
    assert batch.completion_lengths == [2, 4]
    if packed:
        assert batch.input_ids_BT.tolist() == [[5, 6, 7, 1, 5, 8, 9, 2, 1]]
        assert batch.layout is not None
        assert batch.layout.position_ids_1T.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
        assert batch.predictors_N.tolist() == [1, 2, 4, 5, 6, 7]
        assert batch.tokens_of_policies == ((0, 4), (3, 5))
    else:
        assert batch.input_ids_BT.tolist() == [[5, 6, 7, 1, 0], [5, 8, 9, 2, 1]]
        assert batch.predictors_N.tolist() == [1, 2, 5, 6, 7, 8]
        assert batch.tokens_of_policies == ((0, 5), (3, 5))


def test_a_prompt_stands_once_and_its_completions_behind_it() -> None:
    short = TrainingSample((5, 6), (7, 1), 0.5, None, ())
    long = TrainingSample((5, 6), (8, 9, 1), -0.5, None, ())
    lone = TrainingSample((5,), (6, 7, 8), 2.0, None, ())
    of_another_policy = TrainingSample((5, 6), (1,), 3.0, None, (), policy=1)
    (batch,) = micro_batches([of_another_policy, short, lone, long], 100, CPU, packed=True)
    assert batch.samples == (long, short, lone, of_another_policy)
    assert batch.input_ids_BT.tolist() == [[5, 6, 8, 9, 1, 7, 1, 5, 6, 7, 8, 5, 6, 1]]
    assert batch.predictors_N.tolist() == [1, 2, 3, 1, 5, 7, 8, 9, 12]
    assert batch.targets_N.tolist() == [8, 9, 1, 7, 1, 6, 7, 8, 1]
    assert batch.tokens_of_policies == ((0, 11), (1, 3))
    assert batch.layout is not None
    assert batch.layout.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    assert batch.layout.prompts == (None, 0, 0, None, None) and batch.layout.lengths == (2, 3, 2, 4, 3)


@seeded
@given(pairs, st.integers(16, 200))
def test_a_group_that_fits_stays_together(lengths: list[tuple[int, int]], budget: int) -> None:
    samples = [sample(*pair) for pair in lengths]
    batches = list(micro_batches(samples, budget, CPU, packed=True))
    for _, prompt in prompts_of(samples):
        mates = [sample for sample in samples if sample.prompt_ids == prompt]
        if unique_tokens(mates) <= budget and sum(mate.length for mate in mates) <= 4 * budget:
            assert sum((0, prompt) in prompts_of(batch.samples) for batch in batches) == 1


@pytest.mark.parametrize(
    ("prompt", "completions", "budget", "parts"),
    [
        (10, [10] * 8, 90, 1),
        (10, [10] * 8, 89, 2),
        (10, [10] * 8, 50, 2),
        (10, [10] * 8, 49, 3),
        (10, [50, 5, 5], 30, 2),
    ],
)
def test_a_group_that_does_not_fit_is_cut_into_as_few_parts_as_can_be(
    prompt: int, completions: list[int], budget: int, parts: int
) -> None:
    samples = [sample(prompt, length) for length in completions]
    assert len(list(micro_batches(samples, budget, CPU, packed=True))) == parts


@seeded
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 9)), min_size=1, max_size=60), st.integers(16, 200)
)
def test_a_batch_never_repeats_more_keys_than_its_budget_allows(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    samples = [sample(-(-prompt // 50) * 50, completion) for prompt, completion in lengths]
    for batch in micro_batches(samples, budget, CPU, packed=True):
        keys = sum(sample.length for sample in batch.samples)
        assert keys <= MOST_KEYS_PER_TOKEN * budget or len(batch.samples) == 1


def test_groups_fill_a_batch_by_their_unique_tokens() -> None:
    samples = [sample(10, 5)] * 4 + [sample(11, 5)] * 4
    assert unique_tokens(samples) == 61
    assert len(list(micro_batches(samples, 61, CPU, packed=True))) == 1
    assert len(list(micro_batches(samples, 60, CPU, packed=True))) == 2


def test_two_groups_whose_keys_are_too_many_together_travel_apart() -> None:
    samples = [sample(40, 1)] * 8 + [sample(41, 1)] * 8
    assert unique_tokens(samples) < 100
    assert [len(b.samples) for b in micro_batches(samples, 100, CPU, packed=True)] == [8, 8]


def test_a_group_with_too_many_keys_is_cut_evenly() -> None:
    samples = [sample(90, 1)] * 10
    batches = list(micro_batches(samples, 100, CPU, packed=True))
    assert [len(batch.samples) for batch in batches] == [4, 3, 3]


@both_layouts
def test_every_own_token_brings_its_log_probability_its_version_and_whether_its_keys_were_stale(
    packed: bool,
) -> None:
    resumed = TrainingSample(
        (5,), (7, 8, 1), 0.5, (-1.0, -2.0, -3.0), (Span(4, 0, 2), Span(6, 2, 3, "stale"))
    )
    strangers = TrainingSample((5,), (9, 1), 0.5, None, one_span(70, 2))
    own = TrainingSample((5,), (3,), -1.0, (-4.0,), one_span(6, 1))
    (batch,) = micro_batches([own, resumed, strangers], 100, CPU, packed=packed)
    assert [s.completion_ids for s in batch.samples] == [(7, 8, 1), (9, 1), (3,)], "longest first"
    assert batch.own.mask_N.tolist() == [True, True, True, False, False, True]
    assert batch.own.logprobs_M.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert batch.own.versions_M.tolist() == [4, 4, 6, 6]
    assert batch.own.stale_M.tolist() == [False, False, True, False]


def test_a_batch_of_strangers_has_no_own_tokens() -> None:
    (batch,) = micro_batches([sample(1, 2)], 100, CPU, packed=True)
    assert batch.own.mask_N.tolist() == [False, False]
    assert len(batch.own.logprobs_M) == len(batch.own.versions_M) == len(batch.own.stale_M) == 0


def logprobs(model: Any, batch: MicroBatch) -> Tensor:
    """Of the batch's completion tokens, by the whole forward."""
    logits = model(**batch.forward_arguments()).logits.flatten(0, 1)[batch.predictors_N]
    return logits.log_softmax(-1).gather(-1, batch.targets_N[:, None])[:, 0]


def gradients(model: Any, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Of a loss that is summed over tokens, weighted by the advantages."""
    model.zero_grad()
    for batch in batches:
        (logprobs(model, batch) * batch.advantages_N).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def random_ids(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, 40, (length,)).tolist())


def varied() -> list[TrainingSample]:
    """Groups of 5 (for two policies), 3, 1, 1, 1 and 1."""
    torch.manual_seed(1)
    prompts = [random_ids(length) for length in (7, 12, 1, 3, 18, 2)]
    return [
        TrainingSample(
            prompts[prompt], random_ids(int(torch.randint(1, 16, ()))), (-0.75) ** index, None, (), policy
        )
        for index, (prompt, policy) in enumerate(
            [(0, 0), (1, 1), (0, 0), (0, 2), (2, 1), (1, 1), (0, 2), (3, 0), (1, 1), (4, 2), (0, 0), (5, 1)]
        )
    ]


SAMPLES = varied()


class Alone:
    """A model and the gradients of the samples one by one; a class, so that hypothesis prints it short."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, initializer_range=0.2,
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(config).double().eval()
        assert prepare_for_packing(self.model) is None
        rows = [batch for s in SAMPLES for batch in micro_batches([s], 1, CPU, packed=False)]
        self.gradients = gradients(self.model, rows)


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


@seeded
@given(
    budget=st.integers(1, 400),
    packed=st.booleans(),
    rounded=st.booleans(),
    parts=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_any_split_of_a_step_gives_the_gradient_of_its_samples_one_by_one(
    alone: Alone, budget: int, packed: bool, rounded: bool, parts: list[bool]
) -> None:
    batches: list[MicroBatch] = []
    for part in (True, False):
        chosen = [s for s, mine in zip(SAMPLES, parts, strict=True) if mine is part]
        batches += micro_batches(chosen, budget, CPU, packed=packed, round_up=rounded)
    for split, expected in zip(gradients(alone.model, batches), alone.gradients, strict=True):
        assert (split - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("budget", [40, 400])
def test_adapters_of_two_policies_learn_from_shared_prompts_what_they_learn_from_padded_rows(
    base: LoadedModel, budget: int
) -> None:
    config = PolicyConfig(lora_rank=4)
    first = Policy(replace(base, model=base.model.double()), config, seed=0)
    second = Policy(first.base, config, seed=1, beside=first)
    parameters = [*first.parameters, *second.parameters]
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    fused = first.fuse()
    assert prepare_for_packing(first.model) is None
    for policy in (first, second):
        policy.wake()
    samples = [replace(sample, policy=sample.policy % 2) for sample in SAMPLES]
    found: list[list[Tensor]] = []
    for packed in (True, False):
        for batch in micro_batches(samples, budget, CPU, packed=packed):
            names = {0: first.adapter_name, 1: second.adapter_name}
            tokens = [RoutedTokens(names[policy], count) for policy, count in batch.tokens_of_policies]
            with fused.route(tokens):
                (logprobs(first.model, batch) * batch.advantages_N).sum().backward()
        gradients = [parameter.grad for parameter in parameters]
        assert all(gradient is not None for gradient in gradients)
        found.append([gradient for gradient in gradients if gradient is not None])
        for parameter in parameters:
            parameter.grad = None
    for shared, padded in zip(*found, strict=True):
        assert (shared - padded).abs().max() <= 1e-6 * padded.abs().max()


def samples_of(one: RolloutGroup, loss: str = "dapo", policy: int = 0) -> list[TrainingSample] | None:
    rules = SampleRules(lambda prompt: (2,), TrainingConfig(loss=loss), 64, end=lambda: 1, policy=policy)
    return lesson_samples(GroupLesson(one), rules)


def test_a_group_of_equal_rewards_yields_no_samples(group: Callable[..., RolloutGroup]) -> None:
    assert samples_of(group([[7, 1], [8, 1]], [1.0, 1.0])) is None


def test_the_end_token_is_trained(group: Callable[..., RolloutGroup]) -> None:
    samples = samples_of(group([[7, 1], [8, 1]], [1.0, 0.0]))
    assert samples is not None and [s.completion_ids for s in samples] == [(7, 1), (8, 1)]


def test_credit_follows_the_loss_and_the_policy(group: Callable[..., RolloutGroup]) -> None:
    samples = samples_of(group([[7, 1], [8, 1]], [1.0, 0.5]), "dr_grpo", policy=2)
    assert samples is not None
    assert [(s.advantage, s.policy) for s in samples] == [(0.25, 2), (-0.25, 2)]


def test_an_aborted_or_unscored_completion_is_not_trained_on(group: Callable[..., RolloutGroup]) -> None:
    unscored = samples_of(group([[7, 1], [8, 1], [9, 1]], [1.0, 0.0, None]))
    assert unscored is not None and len(unscored) == 2
    assert samples_of(group([[7], [8]], [1.0, 0.0], finish="abort")) == []


@pytest.mark.parametrize("bad", [sample(0, 1), sample(1, 0)], ids=["no prompt", "no completion"])
def test_a_sample_without_prompt_or_completion_is_an_error(bad: TrainingSample) -> None:
    with pytest.raises(EngineError, match="at least one prompt"):
        list(micro_batches([sample(2, 2), bad], 100, CPU, packed=True))
