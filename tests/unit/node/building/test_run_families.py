"""Families of all kinds: what a node refuses before it loads them, and that they train."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swarmnode.errors import EngineError, ModelError
from swarmnode.extensions.vllm import compat
from swarmnode.families.family import FAMILIES
from swarmnode.machine.storage import Paths, resolve_paths
from swarmnode.model.base_model import load_base_model
from swarmnode.node.building.loaded_memory import build_forward
from swarmnode.node.building.local_policy import LocalPolicy, checkpoint_store, load_policy
from swarmnode.node.building.look_ahead import look_ahead
from swarmnode.node.learner import Overlap
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config
from swarmnode.training.records import Counters
from swarmnode.types import Example, ExampleKey, Scores
from tests.families import save_family

SETTINGS = [
    "rollout.groups=2",
    "rollout.group_size=4",
    "rollout.max_tokens=6",
    "rollout.mode=sync",
    "policy.lora_rank=4",
    "policy.device=cpu",
    "training.learning_rate=1e-2",
]
ALONE = Overlap(on=False, sleep=False, reason="as set")
WITH_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "gpt_oss")
DENSE = ("gpt2", "gemma2", "gemma3_text", "phi3", "mistral", "smollm3", "falcon", "gpt_neox")
CALM = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WITHOUT_TORCH = """
import sys
from swarmnode.settings.config_layers import load_config
from swarmnode.errors import EngineError
from swarmnode.node.building.machine_memory import check_loadable
config = load_config(environ={}, assignments=["rollout.engine=embedded", "policy.device=cpu"]).config
try:
    check_loadable(config, sys.argv[1])
except EngineError as error:
    print(error.message.partition(": ")[2] + ",", "torch is imported:", "torch" in sys.modules)
"""


class Even:
    """An answer is right when most of its characters have even codes, which is luck."""

    name = "even"
    version = "1"

    def examples(self, seed: int) -> Iterator[Example]:
        for index in range(1000):
            yield Example(ExampleKey(self.name, self.version, seed, index), f"say {index}=")

    def score(self, example: Example, completions: Sequence[str]) -> list[Scores]:
        return [{"even": sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)} for text in completions]


def settings(*more: str) -> Config:
    return load_config(environ={}, assignments=[*SETTINGS, *more]).config


def start(config: Config, folder: Path, paths: Paths) -> tuple[LocalPolicy, PolicyLearner]:
    local = load_policy(config, str(folder), paths, silent)
    forward = build_forward(config, local)
    store = checkpoint_store(config, str(folder), paths, local.base)
    parts = local.policy, local.engine, local.renderer, {"even": Even()}, store
    return local, PolicyLearner(config, *parts, author="me", seed=3, overlap=ALONE, forward=forward)


@CALM
@pytest.mark.parametrize("family", [*WITH_EXPERTS, *DENSE])
def test_a_family_trains_is_saved_resumes_and_loads_in_stock_peft(
    family: str, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM takes long to start, and the engine is not what is asked here.
    monkeypatch.setattr(compat, "missing_reason", lambda device: "it is not wanted")
    folder = save_family(family, tmp_path / "model", quick_model)
    config, paths = settings(), resolve_paths(tmp_path / "home")
    local, learner = start(config, folder, paths)
    assert local.engine.capabilities.name == ("embedded" if family in FAMILIES else "generate")
    before = local.policy.adapter()
    for number in (1, 2):
        report = learner.train(learner.rollouts(number).groups, [])
        assert report.grad_norm is not None and report.grad_norm > 0
    after = local.policy.adapter()
    assert all(not torch.equal(before[name], after[name]) for name in after if ".lora_B." in name)
    saved: Future[str] = learner.save(Counters(round=2))
    saved.result()
    learner.close()

    again, other = start(config, folder, paths)
    resumed = other.resume()
    assert resumed is not None and resumed.counters.round == 2
    assert all(torch.equal(tensor, after[name]) for name, tensor in again.policy.adapter().items())
    other.train(other.rollouts(3).groups, [])
    other.close()

    (adapter,) = (paths.checkpoints).rglob("round-00000002/adapter")
    stock: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    named = {name.replace(".default.", "."): p for name, p in stock.named_parameters() if ".lora_" in name}
    assert named.keys() == after.keys()
    assert all(torch.equal(named[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("family", "setting", "policies", "reason"),
    [
        ("smollm3", "rollout.engine=embedded", 1, r"embedded engine cannot run .*smollm3.*--engine auto"),
        (
            "qwen3_moe",
            "policy.lora_targets=gate_proj",
            1,
            "lora_targets: qwen3_moe has no linear layer gate_",
        ),
        ("gpt2", "rollout.engine=auto", 2, "2 policies cannot share an engine"),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_its_weights_are_read(
    family: str, setting: str, policies: int, reason: str, quick_model: Path, tmp_path: Path
) -> None:
    folder = save_family(family, tmp_path / "model", quick_model)
    (folder / "model.safetensors").unlink()
    with pytest.raises((EngineError, ModelError), match=reason):
        load_policy(settings(setting), str(folder), resolve_paths(tmp_path), silent, policies=policies)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("phi3", {"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ("mistral", {"hidden_act": "relu"}, "its activation is relu"),
        (
            "mistral",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic depends on the sequence length",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ],
)
def test_what_a_known_family_has_beyond_its_record_is_refused_before_its_weights_are_read(
    family: str,
    changes: dict[str, Any],
    reason: str,
    quick_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "missing_reason", lambda device: "it is not wanted")
    folder = save_family(family, tmp_path / "model", quick_model)
    (folder / "model.safetensors").unlink()
    assert engine_of(folder) == "embedded"
    published = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in changes or "partial_rotary_factor" in changes:  # as files of older versions have it
        published |= {"rope_theta": published.pop("rope_parameters")["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(published | changes))
    assert engine_of(folder) == "generate"
    with pytest.raises(EngineError, match=f"embedded engine cannot run this model: .*{reason}"):
        load_policy(settings("rollout.engine=embedded"), str(folder), resolve_paths(tmp_path), silent)


def engine_of(folder: Path) -> str | None:
    ahead = look_ahead(settings(), str(folder))
    return None if ahead is None else ahead.engine.record.name


def test_a_model_whose_scores_are_capped_is_loaded_with_the_attention_that_caps_them(
    quick_model: Path, tmp_path: Path
) -> None:
    folder = save_family("gemma2", tmp_path / "model", quick_model)
    assert engine_of(folder) == "embedded"
    base = load_base_model(str(folder), settings().policy)
    assert base.model.config._attn_implementation == "eager"
    assert base.model.config.attn_logit_softcapping == 50.0


def test_embedded_is_refused_without_even_importing_torch(quick_model: Path, tmp_path: Path) -> None:
    folder = save_family("gpt2", tmp_path / "model", quick_model)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"gpt2 is not one of {', '.join(FAMILIES)}, torch is imported: False\n"


def test_a_model_with_packed_weights_is_known_by_its_configuration(quick_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="its weights are quantized"):
        look_ahead(settings("rollout.engine=embedded", "policy.quantization=nf4"), str(quick_model))
    ahead = look_ahead(settings(), str(quick_model))
    assert ahead is not None and ahead.engine.record.name == "embedded"
    assert ahead.targets.names == (
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    )  # fmt: skip


def test_a_folder_that_is_no_causal_lm_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(ModelError, match=rf"cannot load {tmp_path} as a causal LM"):
        look_ahead(settings(), str(tmp_path))


def silent(done: int, total: int, what: str) -> None:
    """Nobody looks at the progress of a test."""
