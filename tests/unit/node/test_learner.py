"""When generation and training run side by side."""

from typing import Literal

import pytest

from swarmnode.machine.hardware import GIB
from swarmnode.node.learner import decide_overlap


@pytest.mark.parametrize("gpu", [False, True])
def test_with_room_for_both_they_overlap(gpu: bool) -> None:
    decision = decide_overlap("auto", gpu=gpu, cores=2, free_bytes=8 * GIB, need_bytes=6 * GIB)
    assert decision.on and not decision.sleep
    assert decision.reason == "on: 6.00 GiB for generation and training at once, 8.00 GiB free"


def test_on_a_card_without_room_the_engine_sleeps_while_training() -> None:
    decision = decide_overlap("auto", gpu=True, cores=8, free_bytes=4 * GIB, need_bytes=6 * GIB)
    assert decision.sleep and not decision.on


def test_a_cpu_without_room_takes_turns_and_nobody_sleeps() -> None:
    decision = decide_overlap("auto", gpu=False, cores=8, free_bytes=4 * GIB, need_bytes=6 * GIB)
    assert not decision.on and not decision.sleep


def test_one_core_has_nothing_to_share_but_one_core_beside_a_card_has() -> None:
    assert not decide_overlap("auto", gpu=False, cores=1, free_bytes=9e9, need_bytes=1).on
    assert decide_overlap("auto", gpu=True, cores=1, free_bytes=9e9, need_bytes=1).on


@pytest.mark.parametrize("setting", ["on", "off"])
def test_what_is_set_is_done(setting: Literal["on", "off"]) -> None:
    decision = decide_overlap(setting, gpu=False, cores=1, free_bytes=0, need_bytes=1)
    assert decision.on == (setting == "on")


def test_a_model_whose_memory_nobody_can_tell_takes_turns() -> None:
    decision = decide_overlap("auto", gpu=True, cores=8, free_bytes=9e9, need_bytes=None)
    assert (decision.on, decision.sleep) == (False, True)
