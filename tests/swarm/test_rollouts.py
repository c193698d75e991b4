"""Real nodes that generate: with vLLM, with partial rollouts that outlive them, and beside training."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from swarmnode.extensions.vllm.compat import missing_reason

Join = Callable[..., Any]

pytestmark = pytest.mark.slow

LONG_ANSWERS = (
    *("--set", "rollout.max_tokens=120", "--set", "rollout.groups=4", "--set", "rollout.group_size=4"),
    *(
        "--set",
        "rollout.mode=refill",
        "--set",
        "rollout.slots=48",
        "--set",
        "node.checkpoint_every=1",
        "--seed",
        "5",
    ),
)
"""Most answers of a policy that knows nothing go on to the limit or end by accident: a long tail."""


@pytest.mark.skipif(missing_reason("cpu") is not None, reason="no vLLM for the CPU is installed")
def test_a_node_generates_with_vllm_shares_and_learns(join: Join) -> None:
    node = join("--engine", "vllm", "--no-overlap", "--rounds", "3", "--set", "rollout.slots=64")
    summary = node.summary()
    assert summary["rounds"] == 3 and summary["tokens"] > 0
    assert "rollout engine: vllm" in node.story
    last = node.rounds()[-1]
    assert last["training.engine_kl"] < 1e-6, "engine and trainer hold the same policy"
    assert last["progress.policy_version"] >= 2


def test_unfinished_rollouts_outlive_the_process(join: Join) -> None:
    done, last = 0, {"generation.resumed": 0}
    for _ in range(3):
        first = join(*LONG_ANSWERS)
        first.until_round(done + 2)
        first.kill(signal.SIGTERM)
        before = first.summary()
        left = [line for line in first.rounds() if line["progress.round"] == before["rounds"]][-1]
        assert left["generation.groups_in_flight"] > 0, "a round does not wait for the longest answer"

        second = join(*LONG_ANSWERS, "--rounds", str(before["rounds"] + 2))
        done = second.summary()["rounds"]
        last = second.rounds()[-1]
        if last["generation.resumed"] > 0:
            break  # Else the signal came just when all that was in flight had begun, without a token yet.
    assert last["generation.resumed"] > 0
    assert last["generation.reprefilled_tokens"] > 0


def test_beside_training_the_next_round_is_generated(join: Join) -> None:
    node = join("--overlap", "--rounds", "8", "--set", "rollout.mode=sync")
    node.summary()
    assert "overlap of generation and training on" in node.story
    # A policy that knows nothing has rounds whose answers are all as bad: nothing is trained then.
    ages = [line["training.mean_age"] for line in node.rounds() if "training.mean_age" in line]
    assert ages[0] == 0 and set(ages[1:]) == {1.0}, "from round 2 on, one version old"
