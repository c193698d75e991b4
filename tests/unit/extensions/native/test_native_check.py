"""What `swarmnode doctor` says of the C compiler."""

from pathlib import Path

import pytest

from swarmnode.extensions.native import native_check
from swarmnode.extensions.native.native_check import compiler_findings
from swarmnode.machine.hardware import GIB, Gpu, Machine
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config


def settings(*assignments: str) -> Config:
    return load_config(environ={}, assignments=assignments).config


def test_a_cpu_node_is_told_of_its_compiler_and_a_card_does_not_need_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = Machine("a CPU", 2, 64 * GIB, 20 * GIB, ())
    with_a_card = Machine("a CPU", 2, 64 * GIB, 20 * GIB, (Gpu("RTX 3060", 12 * GIB, 11 * GIB, 8.6),))
    off = settings("policy.cpu_kernels=off")
    monkeypatch.setattr(native_check, "find_compiler", lambda: Path("/usr/bin/gcc"))
    (found,) = compiler_findings(settings(), cpu)
    assert (found.verdict, found.advice) == ("ok", "") and "/usr/bin/gcc" in found.text
    assert [each.verdict for each in compiler_findings(off, cpu)] == ["note"]
    monkeypatch.setattr(native_check, "find_compiler", lambda: None)
    (missing,) = compiler_findings(settings(), cpu)
    assert missing.verdict == "note" and "gcc" in missing.advice
    assert list(compiler_findings(settings(), with_a_card)) == []
    assert len(list(compiler_findings(settings("policy.device=cpu"), with_a_card))) == 1
