"""The sampler draws from the distribution it reports, and each request from its own stream."""

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from swarmnode.rollout.decode.sampler import (
    NUMBERS_AT_ONCE,
    RUN,
    STRIDES,
    WORDS,
    WORTH_RUNS,
    Noise,
    Sampler,
    keep_likely,
    smallest,
)
from swarmnode.rollout.engine import SamplingParams

CPU = torch.device("cpu")
DRAWS = 20_000


def draw(
    logits: torch.Tensor, params: SamplingParams, rows: int = 500, steps: int = DRAWS // 500
) -> torch.Tensor:
    """Tokens of `rows` requests with seeds 0, 1, 2, ... over some positions."""
    sampler = Sampler(len(logits), rows, CPU)
    settings = [SamplingParams(1, params.temperature, params.top_p, seed=row) for row in range(rows)]
    sampler.write(torch.arange(rows), settings, [3] * rows)
    return torch.stack([sampler.sample(logits.expand(rows, -1))[0] for _ in range(steps)])


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * tokens.numel()
    counts = torch.bincount(tokens.flatten(), minlength=len(probs)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_they_should(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    tokens = draw(logits, SamplingParams(1, temperature))
    # 39 degrees of freedom: above 72.1 in one of a thousand cases. The seeds are fixed, so it never flickers.
    assert chi_square(tokens, (logits / temperature).softmax(-1).double()) < 72.1


def test_rare_tokens_come_rarely_but_come() -> None:
    probs = torch.tensor([0.998, 0.001, 0.001, 0.0])
    tokens = draw(probs.log(), SamplingParams(1))
    assert chi_square(tokens, probs.double()) < 13.8


def test_filtered_tokens_never_come() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    tokens = draw(logits, SamplingParams(1, top_p=0.8))
    kept = torch.tensor([2.0, 1.0, *[float("-inf")] * 3]).softmax(-1)
    assert chi_square(tokens, kept.double()) < 10.8


def test_streams_of_two_seeds_and_of_two_positions_are_independent() -> None:
    """With uniform probabilities, two draws agree once in `vocab` times."""
    tokens = draw(torch.zeros(10), SamplingParams(1))
    along_rows = (tokens[:, 1:] == tokens[:, :-1]).double().mean()
    along_positions = (tokens[1:] == tokens[:-1]).double().mean()
    # Three standard deviations of a share of 0.1 among 20,000.
    assert abs(along_rows - 0.1) < 0.0064
    assert abs(along_positions - 0.1) < 0.0064


def test_the_noise_is_standard_exponential() -> None:
    noise = Noise(vocab=100, rows=200, device=CPU)
    noise.seed(torch.arange(200), list(range(200)), [0] * 200)
    drawn = -torch.stack([noise.advance(200) for _ in range(10)]).double()
    assert drawn.min() > 0
    assert drawn.max() < 17
    assert abs(drawn.mean() - 1) < 0.01
    assert abs(drawn.var() - 1) < 0.02
    assert abs((drawn < 0.01).double().mean() - 0.00995) < 0.0007


def test_a_stream_visits_every_offset_before_it_repeats() -> None:
    assert all(stride % 2 == 1 and 0 < stride < WORDS for stride in STRIDES)


def test_the_noise_of_a_seed_is_pinned() -> None:
    """What a node samples after a resume, on any device or version of torch, hangs on these numbers."""
    noise = Noise(vocab=3, rows=1, device=CPU)
    noise.seed(torch.tensor([0]), [2024], [5])
    assert noise.advance(1)[0].tolist() == pytest.approx(
        [-3.2211592197418213, -0.3542511761188507, -1.5215719938278198], rel=1e-5
    )


def test_noise_depends_on_seed_and_position_alone() -> None:
    walking, jumping = (Noise(vocab=7, rows=4, device=CPU) for _ in range(2))
    walking.seed(torch.tensor([2]), [42], [10])
    jumping.seed(torch.tensor([0]), [42], [13])
    steps = [walking.advance(3)[2] for _ in range(4)]
    assert torch.equal(steps[3], jumping.advance(1)[0])
    assert not torch.equal(steps[2], steps[3])


def test_rows_that_are_sampled_for_in_portions_get_what_they_get_alone() -> None:
    vocab, rows = NUMBERS_AT_ONCE // 3, 8
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(1, i % 3, top_p=(1.0, 0.7)[i % 2], seed=i) for i in range(rows)]
    together = Sampler(vocab, rows, CPU)
    together.write(torch.arange(rows), params, [i for i in range(rows)])
    tokens = torch.stack([together.sample(logits)[0] for _ in range(2)])
    for row in range(rows):
        alone = Sampler(vocab, 1, CPU)
        alone.write(torch.tensor([0]), params[row : row + 1], [row])
        assert [int(alone.sample(logits[row : row + 1])[0]) for _ in range(2)] == tokens[:, row].tolist()


@pytest.mark.parametrize("length", [RUN - 1, RUN, WORTH_RUNS, WORTH_RUNS + 1, 3 * WORTH_RUNS])
def test_the_smallest_number_is_found_and_the_first_of_equal_ones(length: int) -> None:
    table = torch.randint(-99, 99, (5, length), generator=torch.Generator().manual_seed(0)).float()
    table[0, -1], table[1, 0], table[2] = -100, -100, 3
    table[3, length // 2] = float("nan")
    assert torch.equal(smallest(table), table.argmin(-1))


def test_rows_keep_their_streams_and_settings_when_they_move() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(1, 0.5 + i, top_p=0.5 + i / 8, seed=i) for i in range(3)]
    staying, moving = (Sampler(30, 3, CPU) for _ in range(2))
    for sampler in (staying, moving):
        sampler.write(torch.arange(3), params, [1, 2, 3])
        sampler.sample(logits)
    moving.keep(torch.tensor([0, 2]))
    expected = staying.sample(logits)
    found = moving.sample(logits[[0, 2]])
    assert torch.equal(found[0], expected[0][[0, 2]])
    assert torch.equal(found[1], expected[1][[0, 2]])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 0.999999, 2.0])
def test_the_filter_agrees_with_transformers(top_p: float) -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(5)) * 3
    found = keep_likely(logits, torch.full((16, 1), top_p))
    assert torch.equal(found, TopPLogitsWarper(top_p)(None, logits) if top_p < 1 else logits)


def test_exactly_as_many_tokens_as_are_needed_stay_among_equals() -> None:
    found = keep_likely(torch.zeros(1, 9), torch.full((1, 1), 0.4))
    assert found.isfinite()[0].tolist() == [True] * 4 + [False] * 5


def test_a_mass_that_equals_top_p_exactly_is_enough() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    found = keep_likely(logits, torch.full((1, 1), 0.5))
    assert found.isfinite()[0].tolist() == [True, False, False]
