import random
from dataclasses import replace

import pytest

from swarmnode.errors import Rejected
from swarmnode.exchange.validation.body_check import require_advantage
from swarmnode.training.losses import group_advantages, standardised
from swarmnode.training.rules.rules import choose_own
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span


def group_with(*rewards: float | None) -> RolloutGroup:
    completion = Completion("4", (1,), None, one_span(0, 1), "stop")
    return RolloutGroup(
        example=Example(ExampleKey("sum", "1", 0, 0), "2 + 2 ="),
        completions=(completion,) * len(rewards),
        scores=tuple({"correct": reward} for reward in rewards),
        author="me",
        policy_version=0,
    )


def test_groups_without_a_gradient_are_not_chosen() -> None:
    useful = group_with(1.0, 0.0)
    assert choose_own([group_with(1.0, 1.0), useful, group_with(None, 1.0)], 3, random.Random(0)) == [useful]


def test_no_more_are_chosen_than_there_is_room_for_and_none_twice() -> None:
    groups = [replace(group_with(1.0, 0.0), policy_version=version) for version in range(8)]
    chosen = choose_own(groups, 5, random.Random(0))
    assert len({group.policy_version for group in chosen}) == 5


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.1 + 0.2, 0.3), False),
        ((0.0, 1e-7), False),
        ((0.0, 1e-5), True),
        ((1.0, None), False),
        ((None, None), False),
        ((), False),
    ],
)
def test_mixing_crediting_and_sharing_agree_on_what_has_a_gradient(
    rewards: tuple[float | None, ...], expected: bool
) -> None:
    group = group_with(*rewards)
    assert group.has_gradient == expected
    assert bool(choose_own([group], 1, random.Random(0))) == expected
    assert (group_advantages(rewards, standardised) is not None) == expected
    if expected:
        require_advantage(group)
    else:
        with pytest.raises(Rejected):
            require_advantage(group)
