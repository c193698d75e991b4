from pathlib import Path

import pytest
import torch

from swarmnode.extensions.demonstration.tiny import build_quick_tiny
from swarmnode.extensions.pipeline.stages.measuring import measure_stage, memory_for_stage, time_stage
from swarmnode.extensions.pipeline.stages.stage_model import StageSettings
from swarmnode.extensions.pipeline.stages.whole_model import open_model
from swarmnode.machine.hardware import GIB


def test_a_machine_measures_what_real_layers_of_the_model_cost(tmp_path: Path) -> None:
    whole = open_model(str(build_quick_tiny(tmp_path)), torch.float32)
    for trainable in ("lora", "full"):
        timings = measure_stage(whole, StageSettings(trainable), micro_batch_tokens=64)
        assert [timing.layers for timing in timings] == [1, 2]
        assert all(timing.forward_s > 0 and timing.backward_s > 0 for timing in timings)


def test_memory_that_is_set_is_taken_at_its_word() -> None:
    assert memory_for_stage(1.5, torch.device("cpu")) == 1.5 * GIB
    assert 0 < memory_for_stage(None, torch.device("cpu")) < 2**50


def test_a_slow_first_call_and_one_hiccup_are_not_counted() -> None:
    now_s, calls = [0.0], [0]

    def forward() -> int:
        calls[0] += 1
        now_s[0] += 50.0 if calls[0] in (1, 3) else 1.0
        return 128

    def backward(tokens: int) -> None:
        now_s[0] += 2.0

    timing = time_stage(4, forward, backward, 100, clock=lambda: now_s[0])
    assert (timing.layers, timing.forward_s, timing.backward_s) == (
        4,
        pytest.approx(0.01),
        pytest.approx(0.02),
    )


def test_a_clock_that_sees_nothing_gives_a_time_all_the_same() -> None:
    assert time_stage(1, lambda: 8, lambda _: None, 8, clock=lambda: 0.0).forward_s > 0
