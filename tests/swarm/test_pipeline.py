"""Members of a pipeline in real processes over libp2p: a policy that none of them could hold, and churn."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.wide_policy import widen_tiny

Join = Callable[..., Any]

MEMBER = ("--pipeline", "attic", "--set", "exchange.enabled=false")
LIMITED = 1_300_000 * 1024
"""Bytes that a process may write to beside its code: one with a stage was seen to take 200 MB less, one with
the whole policy 200 MB more."""
A_THIRD = ("--set", "limits.memory_gb=0.45")
"""Of it for the pipeline: a stage of the wide policy fits, all of it does not."""
REVERSE = ("--task", "rev", "--seed", "0", "--set", "rollout.groups=8", "--set", "node.eval_every=0")
SMALL_STEPS = ("--set", "policy.lora_rank=8", "--set", "training.learning_rate=1e-3")
LITTLE_MEMORY = ("--set", "training.micro_batch_tokens=96", "--set", "pipeline.slots=2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def address_of(node: Any) -> str:
    return next(a for a in node.running().addresses if "/127.0.0.1/" in a)


def test_three_peers_train_a_policy_that_none_of_them_could_hold(
    join: Join, tiny_model: Path, tmp_path: Path
) -> None:
    wide = widen_tiny(tiny_model, tmp_path / "wide", layers=6, intermediate=24_000)
    settings = (*REVERSE, *SMALL_STEPS, *LITTLE_MEMORY)
    alone = join(
        *settings,
        *MEMBER,
        *A_THIRD,
        "--set",
        "pipeline.wait_for_members=1",
        home="alone",
        model=wide,
        data_bytes=LIMITED,
    )
    alone.until(lambda: "bytes to hold the whole model" in alone.story)
    assert alone.status()["pipeline"]["stage"] is None
    alone.end()

    three = (*settings, *MEMBER, *A_THIRD, "--rounds", "12", "--set", "pipeline.stages=3",
             "--set", "pipeline.wait_for_members=3")  # fmt: skip
    first = join(*three, home="first", model=wide, data_bytes=LIMITED)
    others = [
        join(
            address_of(first),
            *three,
            "--set",
            "pipeline.data=false",
            home=home,
            model=wide,
            data_bytes=LIMITED,
        )
        for home in ("second", "third")
    ]
    assert first.wait(300) == 0, first.story
    found = first.summary()
    assert found["rounds"] == found["saved_round"] == 12
    rewards = [line["reward.own"] for line in first.rounds()]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards
    saves = "we hold the data: from now on the whole adapter is saved here"
    assert saves in first.story
    for other in others:
        assert other.summary()["rounds"] == 12
        assert saves not in other.story
    stages = {line for node in (first, *others) for line in node.story.splitlines() if "stage " in line}
    assert all(any(f"stage {number} of 3" in line for line in stages) for number in range(3))


def test_a_killed_member_costs_no_restart_and_all_go_on_after_a_stop(
    join: Join, tiny_model: Path, tmp_path: Path, swarmnode: Callable[..., Any]
) -> None:
    model = widen_tiny(tiny_model, tmp_path / "six", layers=6, intermediate=160)
    settings = (*REVERSE, *SMALL_STEPS, *MEMBER, "--set", "pipeline.stages=3", "--set", "pipeline.skip=0.33")
    first = join(*settings, "--set", "pipeline.wait_for_members=4", home="first", model=model)
    to_first = (address_of(first), *settings, "--set", "pipeline.data=false")
    others = [
        join(*to_first, "--set", "pipeline.wait_for_members=4", home=home, model=model)
        for home in ("second", "third", "fourth")
    ]
    first.until_round(3)
    others[0].kill(signal.SIGKILL)
    at = first.status()["progress"]["round"]
    first.until_round(at + 4)
    assert first.status()["pipeline"]["plans"] >= 1
    newcomer = join(*to_first, home="fifth", model=model)
    newcomer.until(lambda: newcomer.status()["pipeline"]["stage"] is not None)
    before = first.status()["progress"]["round"]
    first.until_round(before + 2)

    running = (first, *others[1:], newcomer)
    for node in running:
        node.kill(signal.SIGTERM)
    done = first.summary()
    assert done["stopped"] == "stopped on request" and done["saved_round"] == done["rounds"] >= before + 2
    for node in running[1:]:
        assert node.summary()["stopped"] == "stopped on request"

    limit = ("--rounds", str(done["rounds"] + 2), "--set", "pipeline.wait_for_members=2")
    # The same commands, at the same time: a node comes back to the port that others know.
    again = join(*settings, *limit, home="first", model=model)
    beside = join(*to_first, *limit, home="third", model=model)
    resumed = again.summary()
    assert f"resumed after round {done['rounds']}" in again.story
    assert resumed["rounds"] == done["rounds"] + 2 and resumed["reward_first"] == done["reward_first"]
    assert beside.wait() == 0, beside.story

    command = ["eval", "--home", str(again.home), "--model", str(model)]
    options = ["--preset", "tiny", "--task", "rev", "--json", "--set", "policy.lora_rank=8"]
    single = swarmnode(*command, *options)
    assert single.returncode == 0, single.stderr
    assert json.loads(single.stdout)
