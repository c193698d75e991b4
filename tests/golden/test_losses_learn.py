"""Every loss reaches the reward it is known to reach: three seeds each on the policy of tabular.py.

losses.json holds their curves; `python benchmarks/losses.py --golden` writes it anew. Do that only for a
change of a loss that is meant, and look at the difference.
"""

import json
from pathlib import Path
from statistics import fmean

import pytest

from swarmnode.registry import SEAMS
from tests.golden.tabular import CURVE_EVERY, ROUNDS, SEEDS, learning_curve

LOSSES = tuple(SEAMS["loss"].ours)
GOLDEN = json.loads((Path(__file__).parent / "losses.json").read_text())


def test_the_golden_curves_are_those_of_this_problem() -> None:
    assert (GOLDEN["rounds"], GOLDEN["curve_every"], GOLDEN["seeds"]) == (ROUNDS, CURVE_EVERY, list(SEEDS))
    assert set(GOLDEN["curves"]) == set(LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_golden_curve_of_a_loss_rises_from_almost_nothing_to_almost_everything(loss: str) -> None:
    for curve in GOLDEN["curves"][loss]:
        assert curve[0] < 0.15
        assert curve[-1] > 0.85
        assert curve == sorted(curve)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_learns_along_its_golden_curve_within_the_spread_of_the_seeds(loss: str) -> None:
    curves = [learning_curve(loss, seed) for seed in SEEDS]
    for found, golden in zip(
        zip(*curves, strict=True), zip(*GOLDEN["curves"][loss], strict=True), strict=True
    ):
        # Rounded in the file; before the first round the seeds do not differ yet.
        spread = max(golden) - min(golden) + 1e-3
        assert abs(fmean(found) - fmean(golden)) <= spread
