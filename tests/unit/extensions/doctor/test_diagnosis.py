"""What doctor and join say of memory before anything is loaded."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.extensions.demonstration.tiny import MAX_POSITIONS
from swarmnode.extensions.doctor.diagnosis import (
    Finding,
    engine_findings,
    gpu_finding,
    memory_findings,
    model_findings,
    policy_findings,
    reach_findings,
)
from swarmnode.extensions.vllm import compat as vllm_compat
from swarmnode.machine import hardware
from swarmnode.machine.hardware import GIB, Card, Gpu, Machine, TorchCuda
from swarmnode.machine.storage import resolve_paths
from swarmnode.network.reach import Reach
from swarmnode.node.building import machine_memory as memory_module
from swarmnode.node.building.machine_memory import plan_for
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.showing.node_status import Network, NodeStatus, Phase
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from tests.shown_page import shown_page

SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
LARGE = "Qwen/Qwen2.5-7B-Instruct"


def settings(*assignments: str) -> Config:
    return load_config(environ={}, assignments=assignments).config


def on_a_machine(monkeypatch: pytest.MonkeyPatch, free_gib: float, gpu: Gpu | None = None) -> None:
    machine = Machine("a CPU", 2, 64 * GIB, int(free_gib * GIB), () if gpu is None else (gpu,))
    monkeypatch.setattr(memory_module, "inspect_machine", lambda: machine)
    monkeypatch.setattr(memory_module, "find_card", lambda device: Card(gpu))
    monkeypatch.setattr(vllm_compat, "missing_reason", lambda device: "vLLM is not installed")


def findings(config: Config, model: str) -> list[Finding]:
    return list(memory_findings(plan_for(config, model)))


def test_a_small_model_fits_on_a_cpu_against_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, 20)
    plan, budget = findings(settings(), SMALL)
    assert (plan.verdict, plan.advice, budget.verdict) == ("ok", "", "ok")
    assert "20.0 GiB free on this machine" in plan.text
    assert "embedded engine's weights" in plan.text
    assert budget.text.startswith("2048 tokens: ")


def test_a_model_that_does_not_fit_is_a_problem_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, 20, Gpu("RTX 3060", 12 * GIB, 11 * GIB, 8.6))
    plan, budget = findings(settings(), LARGE)
    assert (plan.verdict, budget.verdict) == ("problem", "note")
    assert "11.0 GiB free on RTX 3060" in plan.text
    assert "rollout.slots" in plan.advice and "--model" in plan.advice


def test_with_less_memory_micro_batches_shrink_and_then_layers_are_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, bool]] = []
    for free in (80, 24, 18):
        on_a_machine(monkeypatch, 20, Gpu("a card", 96 * GIB, free * GIB, 9.0))
        planned = plan_for(settings("policy.quantization=nf4", "rollout.slots=8"), LARGE)
        assert planned.budget is not None and planned.fits
        found.append((planned.budget.tokens, planned.budget.checkpointing))
    assert found[0][0] > found[1][0]
    assert [recomputed for _, recomputed in found] == [False, False, True]


def test_a_card_without_bfloat16_is_planned_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[float] = []
    for capability in (7.5, 8.6):
        on_a_machine(monkeypatch, 20, Gpu("a card", 96 * GIB, 90 * GIB, capability))
        plan = plan_for(settings(), SMALL).plan
        assert plan is not None
        weights.append(plan.weights)
    assert weights[0] == 2 * weights[1]


def test_a_card_that_torch_cannot_use_is_a_problem_with_the_next_step() -> None:
    card = Gpu("RTX 4090", 24 * GIB, 23 * GIB, 8.9, driver="470.82.01")
    machine = Machine("a CPU", 2, 64 * GIB, 20 * GIB, (card,))
    old = hardware.card_for(0, machine.gpus, TorchCuda("2.13.0", "13.0"), None)
    found = gpu_finding(machine, old)
    assert found.verdict == "problem" and "driver 470.82.01 is too old for torch 2.13.0" in found.text
    assert "580.65" in found.advice
    assert gpu_finding(machine, Card(card)) == Finding("gpu", "ok", "RTX 4090 (23.0 GiB free)")
    assert gpu_finding(machine, Card(None)).verdict == "note", "told to leave it alone"


def test_an_engine_that_is_not_installed_is_advised_where_it_would_be_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine(monkeypatch, 20)
    machine = Machine("a CPU", 2, 64 * GIB, 20 * GIB, ())
    (on_cpu,) = engine_findings(machine)
    assert on_cpu.verdict == "note" and on_cpu.text.startswith("vLLM is not installed") and not on_cpu.advice
    (on_card,) = engine_findings(replace(machine, gpus=(Gpu("RTX 4090", 24 * GIB, 23 * GIB, 8.9),)))
    assert "fastest on a CUDA card" in on_card.advice and "make join ENGINE=vllm" in on_card.advice
    monkeypatch.setattr(vllm_compat, "missing_reason", lambda device: None)
    assert [found.verdict for found in engine_findings(machine)] == ["ok"]


def test_engine_and_lora_layers_of_a_model_are_said_before_it_is_loaded(quick_model: Path) -> None:
    room = "rollout.max_tokens=64"
    engine, lora = model_findings(settings("policy.device=cpu", room), str(quick_model))
    assert engine.text.startswith("embedded: qwen3 runs in our own decode loop")
    assert lora.text == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    (refused,) = model_findings(settings("policy.lora_targets=nonsense"), str(quick_model))
    assert refused.verdict == "problem" and "policy.lora_targets" in refused.text
    assert list(model_findings(settings(), "nobody/has-this")) == []


def test_answers_as_long_as_the_model_leave_no_room_for_a_prompt(quick_model: Path) -> None:
    *_, answers = model_findings(settings(f"rollout.max_tokens={MAX_POSITIONS}"), str(quick_model))
    assert answers.verdict == "problem" and "leaves no room for a prompt" in answers.text
    assert answers.advice == f"try --set rollout.max_tokens={MAX_POSITIONS // 2}"


def test_a_model_that_is_not_here_is_unknown_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, 20)
    (plan,) = findings(settings(), "nobody/has-this")
    assert plan.verdict == "note" and plan.text.startswith("nobody/has-this is not on this disk yet")


def test_a_folder_is_known_by_its_headers(monkeypatch: pytest.MonkeyPatch, quick_model: Path) -> None:
    on_a_machine(monkeypatch, 20)
    from_folder = plan_for(settings(), str(quick_model)).plan
    assert from_folder is not None and from_folder == plan_for(settings(), "tiny").plan


def test_a_container_has_the_memory_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("8000\n")
    assert hardware.container_memory(tmp_path) == (8000, 5500)
    assert hardware.container_memory(tmp_path / "none") is None


def test_tasks_and_ports_of_every_policy_are_looked_at(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = policy_findings(
            settings(
                "node.policies=2", "tasks.names=['nonsense']", "network.listen=127.0.0.1",
                f"network.port={port - 1}",
            ),
            paths,
        )  # fmt: skip
        verdicts = {finding.subject: finding.verdict for finding in found}
    assert (verdicts["tasks 0"], verdicts["tasks 1"], verdicts["port 1"]) == ("problem", "problem", "problem")
    alone = {finding.subject: finding.verdict for finding in policy_findings(settings(), paths)}
    assert alone == {"tasks": "ok", "port": "ok"}


def test_settings_that_join_refuses_are_a_problem(tmp_path: Path) -> None:
    found = list(
        policy_findings(
            settings("node.policies=3", "network.port=4000", "node.http_port=4002"), resolve_paths(tmp_path)
        )
    )
    assert [(one.subject, one.verdict) for one in found] == [("policies", "problem")]


def test_nobody_is_said_to_try_without_the_extension_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (with_it,) = reach_findings(resolve_paths(tmp_path))
    assert with_it.text == "once a node runs here, peers test whether they can reach it"
    monkeypatch.setattr("swarmnode.extensions.doctor.diagnosis.names", lambda kind: ())
    (without,) = reach_findings(resolve_paths(tmp_path))
    assert without.text == "without the extension reach, this node cannot find out who can reach it"


def test_the_node_that_runs_here_is_asked_who_reaches_it(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    (unknown,) = reach_findings(paths)
    assert "once a node runs here" in unknown.text
    reach = Reach("nobody", "nobody can reach you", ("forward a port", "join a seed"))
    status = NodeStatus(
        peer_id="p",
        name="otter",
        swarm="commons",
        model="tiny",
        version="1",
        pid=os.getpid(),
        started_at=0.0,
        phase=Phase("generating", 0.0),
        network=Network(reach=reach),
    )
    with shown_page(lambda: status) as page:
        write_running(paths.running, RunningNode(os.getpid(), "p", "127.0.0.1", page.port, ()))
        (found,) = reach_findings(paths)
    assert (found.verdict, found.text) == ("note", "nobody can reach you")
    assert found.advice == "forward a port; or join a seed"
    (gone,) = reach_findings(paths)
    assert "no node responds" in gone.text
