"""The measured gate in front of the kernel, with a timer that says what it is told: no GPU, no Triton."""

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from swarmnode.extensions.native.triton import lora_kernel
from swarmnode.extensions.native.triton.kernel_choice import GemmShape, KernelChoice, KernelEnvironment, Run
from swarmnode.extensions.native.triton.lora_kernel import available, lora_gemm_for
from swarmnode.registry import find, names

MACHINE = KernelEnvironment("GPU of the tests", "1.0", "13.0", "2.13.0", "3.9.0", "abc")
SHAPE = GemmShape(n=8, k=8, swapped=False, rank=16, tokens=4, dtype="bfloat16", several=False)
RIGHT = torch.arange(8.0).reshape(2, 4)
WRONG = RIGHT + torch.tensor([0.0, 0.0, 0.0, 1.0])


@dataclass
class FakeTimer:
    """Times by name, in milliseconds; remembers who was timed."""

    times_ms: Mapping[str, float]
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, runs: Mapping[str, Run]) -> dict[str, float]:
        self.asked.append(list(runs))
        return {name: self.times_ms[name] for name in runs}


def returns(y: Tensor) -> Run:
    return lambda: y


def fails(error: Exception) -> Run:
    def run() -> Tensor:
        raise error

    return run


def contest(**configs: Run) -> Callable[[], tuple[Run, Mapping[str, Run]]]:
    return lambda: (returns(RIGHT), configs)


def pays(choice: KernelChoice, shape: GemmShape = SHAPE) -> bool:
    verdict = choice.known(shape)
    return verdict is not None and verdict.pays


@pytest.mark.parametrize(("kernel_ms", "expected"), [(9.0, True), (9.7, True), (9.75, False), (12.0, False)])
def test_the_kernel_pays_from_three_percent_on(tmp_path: Path, kernel_ms: float, expected: bool) -> None:
    choice = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": kernel_ms}))
    choice.measure(SHAPE, contest(a=returns(RIGHT)))
    assert pays(choice) is expected


def test_the_fastest_configuration_is_kept(tmp_path: Path) -> None:
    timer = FakeTimer({"addmm_": 10.0, "a": 8.0, "b": 5.0, "c": 9.0})
    choice = KernelChoice(tmp_path / "k.json", MACHINE, timer)
    choice.measure(SHAPE, contest(a=returns(RIGHT), b=returns(RIGHT), c=returns(RIGHT)))
    verdict = choice.known(SHAPE)
    assert verdict is not None
    assert (verdict.config, verdict.kernel_ms, verdict.addmm_ms) == ("b", 5.0, 10.0)


@pytest.mark.parametrize("wrong", [WRONG, RIGHT * float("nan"), RIGHT * float("inf")])
def test_a_wrong_result_is_never_timed_and_never_used(
    tmp_path: Path, wrong: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    timer = FakeTimer({"addmm_": 10.0, "fast": 1.0, "slow": 9.0})
    choice = KernelChoice(tmp_path / "k.json", MACHINE, timer)
    choice.measure(SHAPE, contest(fast=returns(wrong), slow=returns(RIGHT)))
    verdict = choice.known(SHAPE)
    assert verdict is not None
    assert (verdict.config, timer.asked) == ("slow", [["addmm_", "slow"]])
    assert "fast is off by" in caplog.text


def test_rounding_is_not_taken_for_a_wrong_result(tmp_path: Path) -> None:
    choice = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0}))
    choice.measure(SHAPE, contest(a=returns(RIGHT + 2**-7)))
    assert pays(choice)


def test_a_configuration_that_does_not_fit_is_skipped(tmp_path: Path) -> None:
    timer = FakeTimer({"addmm_": 10.0, "small": 5.0})
    choice = KernelChoice(tmp_path / "k.json", MACHINE, timer)
    choice.measure(SHAPE, contest(big=fails(RuntimeError("out of resource")), small=returns(RIGHT)))
    assert pays(choice)


def test_where_nothing_runs_addmm_stays_and_the_next_start_knows(tmp_path: Path) -> None:
    choice = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0}))
    choice.measure(SHAPE, contest(a=fails(RuntimeError("no compiler"))))
    again = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({}))
    assert not pays(choice)
    assert not again.open(SHAPE)
    assert not pays(again)


def test_the_next_start_reads_what_this_one_measured(tmp_path: Path) -> None:
    first = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0}))
    other = msgspec.structs.replace(SHAPE, tokens=8)
    for shape in (SHAPE, other):
        first.measure(shape, contest(a=returns(RIGHT)))
    second = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({}))
    assert [second.known(shape) for shape in (SHAPE, other)] == [
        first.known(shape) for shape in (SHAPE, other)
    ]
    assert not second.open(SHAPE)


@pytest.mark.parametrize("what", [name for name in KernelEnvironment.__struct_fields__])
def test_another_machine_driver_or_kernel_measures_again(tmp_path: Path, what: str) -> None:
    first = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0}))
    first.measure(SHAPE, contest(a=returns(RIGHT)))
    other = msgspec.structs.replace(MACHINE, **{what: "another"})
    assert KernelChoice(tmp_path / "k.json", other, FakeTimer({})).open(SHAPE)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"machine": {}, "verdicts": []}', b" " * (2**20 + 1)],
    ids=["empty", "cut", "a list", "bytes", "no machine", "too large"],
)
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "k.json"
    file.write_bytes(content)
    choice = KernelChoice(file, MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0}))
    assert choice.open(SHAPE)
    choice.measure(SHAPE, contest(a=returns(RIGHT)))
    assert not KernelChoice(file, MACHINE, FakeTimer({})).open(SHAPE)


@pytest.mark.parametrize(
    "change", [(b'"addmm_ms": 10.0', b'"addmm_ms": "10"'), (b'"n": 8', b'"n": 8, "x": 1')]
)
def test_the_file_is_read_strictly(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    file = tmp_path / "k.json"
    KernelChoice(file, MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0})).measure(
        SHAPE, contest(a=returns(RIGHT))
    )
    damaged = file.read_bytes().replace(*change)
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    assert KernelChoice(file, MACHINE, FakeTimer({})).open(SHAPE)


def test_a_file_that_cannot_be_written_costs_the_memory_not_the_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file where a folder should be")
    choice = KernelChoice(tmp_path / "taken" / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": 5.0}))
    choice.measure(SHAPE, contest(a=returns(RIGHT)))
    assert pays(choice)
    assert "cannot be written" in caplog.text


def test_short_memory_gives_the_shape_up_for_this_start_only(tmp_path: Path) -> None:
    choice = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0}))
    choice.measure(SHAPE, contest(a=fails(torch.OutOfMemoryError("none left"))))
    assert not choice.open(SHAPE)
    assert not pays(choice)
    assert KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({})).open(SHAPE)


def test_measuring_ends_when_its_time_is_spent(tmp_path: Path) -> None:
    now_s = iter([0.0, 20.0, 20.0, 45.0])
    timer = FakeTimer({"addmm_": 10.0, "a": 5.0})
    choice = KernelChoice(tmp_path / "k.json", MACHINE, timer, budget_s=40.0, clock_s=lambda: next(now_s))
    shapes = [msgspec.structs.replace(SHAPE, tokens=tokens) for tokens in (1, 2, 4)]
    for shape in shapes:
        choice.measure(shape, contest(a=returns(RIGHT)))
    assert [pays(choice, shape) for shape in shapes] == [True, True, False]
    assert len(timer.asked) == 2
    assert not choice.open(shapes[2]), (
        "asked once, answered for good: a forward pass and its repeat must agree"
    )


def test_within_a_shape_too_the_time_is_bounded(tmp_path: Path) -> None:
    now_s = iter([0.0, 50.0, 50.0])
    timer = FakeTimer({"addmm_": 10.0, "a": 5.0})
    choice = KernelChoice(tmp_path / "k.json", MACHINE, timer, budget_s=40.0, clock_s=lambda: next(now_s))
    choice.measure(SHAPE, contest(a=returns(RIGHT), b=fails(AssertionError("no time for this"))))
    assert timer.asked == [["addmm_", "a"]]
    assert pays(choice)
    assert KernelChoice(tmp_path / "k.json", MACHINE, timer).open(SHAPE), (
        "the next start tries the others too"
    )


def test_the_log_tells_what_was_decided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    choice = KernelChoice(tmp_path / "k.json", MACHINE, FakeTimer({"addmm_": 10.0, "a": 8.0}))
    choice.measure(SHAPE, contest(a=returns(RIGHT)))
    assert "LoRA 8 -> 8, 4 tokens, r 16, bfloat16, one adapter: kernel" in caplog.text
    assert "1.25x" in caplog.text


def test_micro_batches_of_about_one_size_share_an_answer() -> None:
    weight = torch.empty(6, 10, dtype=torch.bfloat16)

    def shape(tokens: int, rank: int = 8) -> GemmShape:
        return GemmShape.of(torch.empty(tokens, 10, dtype=torch.bfloat16), weight, rank, several=False)

    assert shape(3500) == shape(4096) == shape(5000)
    assert [shape(t).tokens for t in (1, 2, 3, 5, 6, 1000, 3000, 3100)] == [1, 2, 4, 4, 8, 1024, 2048, 4096]
    assert [shape(64, rank).rank for rank in (1, 16, 17, 32, 48)] == [16, 16, 32, 32, 64]


def test_a_gradient_of_the_input_is_another_shape_than_a_layer_of_the_transposed_size() -> None:
    weight, x = torch.empty(6, 10), torch.empty(32, 6)
    backward, forward = GemmShape.of(x, weight.t(), 8, False), GemmShape.of(x, torch.empty(10, 6), 8, False)
    assert (backward.n, backward.k) == (forward.n, forward.k)
    assert backward != forward


def test_without_a_gpu_the_reason_is_a_sentence(tmp_path: Path) -> None:
    offer = lora_gemm_for(torch.device("cpu"), tmp_path / "k.json")
    assert offer.gemm is None
    assert offer.reason == "the LoRA kernel needs a CUDA GPU, this node trains on cpu: addmm_ is used"
    assert not (tmp_path / "k.json").exists()


def test_without_triton_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_kernel.importlib.util, "find_spec", lambda name: None)
    possible, reason = available(torch.device("cuda"))
    assert not possible
    assert "needs Triton, which is not installed" in reason


def test_importing_it_imports_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import swarmnode.extensions.native.triton.lora_kernel, torch\n"
        "print(swarmnode.extensions.native.triton.lora_kernel.available(torch.device('cpu'))[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "this node trains on cpu" in done.stdout


def test_a_driver_that_does_not_answer_is_unknown() -> None:
    assert lora_kernel._driver((sys.executable, "-c", "print('570.86.15')")) == "570.86.15"
    assert lora_kernel._driver((sys.executable, "-c", "raise SystemExit(9)")) == "unknown"
    assert lora_kernel._driver(("no-such-command-here",)) == "unknown"


def test_a_node_with_a_card_asks_for_it_by_name() -> None:
    assert [find("gemm", name) for name in names("gemm")] == [lora_gemm_for]
