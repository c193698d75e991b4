"""A card counts where torch can use it; where it cannot, the reason and the next step are said."""

import re
from pathlib import Path

import pytest

from swarmnode.errors import ModelError
from swarmnode.machine import hardware
from swarmnode.machine.hardware import GIB, Card, Gpu, TorchCuda, card_for, find_card
from swarmnode.machine.storage import builtin_folder
from swarmnode.model.base_model import find_device
from swarmnode.models import resolve_model
from swarmnode.settings.config_layers import load_config

FAST = Gpu("RTX 4090", 24 * GIB, 23 * GIB, 8.9, "GPU-fa57", "580.65.06")
SLOW = Gpu("GTX 1080", 8 * GIB, 7 * GIB, 6.1, "GPU-510e", "580.65.06")
BOTH = (SLOW, FAST)
"""As the driver lists them, by their slots; CUDA counts the fastest first."""
WORKS = TorchCuda("2.13.0", "13.0", ("fa57", "510e"))


def shows(monkeypatch: pytest.MonkeyPatch, folder: Path, driver: str, torch: TorchCuda | None) -> None:
    """A machine whose driver shows one 4090, and what torch says of it."""
    line = f"24564, 24000, 8.9, GPU-fa57, {driver}, NVIDIA GeForce RTX 4090"
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{line}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "torch_cuda", lambda: torch)


def test_a_driver_too_old_is_named_and_the_model_is_chosen_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows(monkeypatch, tmp_path, "470.82.01", TorchCuda("2.13.0", "13.0", None, "The driver is too old"))
    config, cards = load_config(environ={}).config, builtin_folder("configs") / "models.toml"
    model, reason = resolve_model(config, cards, tmp_path / "none")
    assert model == "tiny"
    assert reason == (
        "NVIDIA GeForce RTX 4090 is not used: its driver 470.82.01 is too old for torch 2.13.0,"
        " which is built for CUDA 13.0; using the demonstration policy"
    )
    assert find_card("auto").gpu is None
    assert "update the NVIDIA driver to 580.65 or newer" in find_card("auto").advice
    with pytest.raises(ModelError, match=r"driver 470\.82\.01 is too old") as caught:
        find_device("cuda")
    assert "580.65" in caught.value.hint


def test_with_a_driver_that_will_do_the_same_card_has_a_model_of_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows(monkeypatch, tmp_path, "580.65.06", TorchCuda("2.13.0", "13.0", ("fa57",)))
    cards = builtin_folder("configs") / "models.toml"
    model, reason = resolve_model(load_config(environ={}).config, cards, tmp_path / "none")
    assert model != "tiny" and reason.endswith("free on NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize(
    ("torch", "problem", "advice"),
    [
        (TorchCuda("2.13.0+cpu", None), r"torch 2.13.0\+cpu is a build without CUDA", "policy.device=cpu"),
        (TorchCuda("2.13.0", "13.0", None, "no device file"), "cannot start CUDA .*: no device file", "init"),
        (None, "torch is not installed", "pip install"),
    ],
)
def test_every_reason_not_to_use_a_card_has_words_and_a_next_step(
    torch: TorchCuda | None, problem: str, advice: str
) -> None:
    found = card_for(0, (FAST,), torch, None)
    assert found.gpu is None and advice in found.advice
    assert re.search(problem, found.problem)


def test_cards_are_counted_as_cuda_does_and_not_as_the_driver_lists_them() -> None:
    assert [card_for(number, BOTH, WORKS, None).gpu for number in (0, 1)] == [FAST, SLOW]
    assert card_for(0, BOTH, TorchCuda("2.13.0", "13.0", ("510e",)), "GPU-510e").gpu == SLOW
    assert "torch sees 2" in card_for(2, BOTH, WORKS, None).problem


def test_a_part_of_a_card_is_found_by_its_number() -> None:
    part = TorchCuda("2.13.0", "13.0", ("another-uuid",))
    assert card_for(0, (FAST,), part, None).gpu == FAST


def test_whoever_hides_all_cards_is_not_told_of_them() -> None:
    assert card_for(0, BOTH, TorchCuda("2.13.0", "13.0"), "") == Card(None)


def test_without_a_card_nobody_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("importing torch takes seconds")

    monkeypatch.setattr(hardware, "nvidia_gpus", lambda: ())
    monkeypatch.setattr(hardware, "torch_cuda", asked)
    assert find_card("auto") == Card(None)
    assert find_card("cpu") == Card(None)


def test_a_node_says_at_its_start_that_a_card_stays_idle(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quick_model: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from swarmnode.machine.storage import resolve_paths
    from swarmnode.node.building.local_policy import load_policy

    shows(monkeypatch, tmp_path, "470.82.01", TorchCuda("2.13.0", "13.0"))
    config = load_config(environ={}, assignments=["rollout.max_tokens=16"]).config
    load_policy(config, str(quick_model), resolve_paths(tmp_path), lambda *_: None)
    assert "too old for torch 2.13.0" in caplog.text and "this node runs on the CPU" in caplog.text
