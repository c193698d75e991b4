"""What an author says of its answers is not believed: a policy learns beside a liar."""

from collections.abc import Callable

import pytest

from benchmarks.attackers.handle import Attacker
from tests.joined_node import JoinedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def test_a_liar_about_endings_does_not_keep_a_policy_from_learning(start: Callable[..., JoinedNode]) -> None:
    victim = start("--rounds", "60", "--seed", "0", "--set", "tasks.eval_examples=64")
    with Attacker("finish_lies", [victim.running().addresses[0]], seconds=400):
        victim.wait(400)
        summary = victim.summary()
    assert summary["reward_first"] < 0.30
    assert summary["reward_last"] >= 0.45, "as without a liar (test_join.py)"
    assert sum(summary["external_groups_trained"].values()) > 0, "it did train on what the liar sent"
