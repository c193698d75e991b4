"""A run goes to a hub with its figures and without secrets, and on from there in another home."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import swarmnode as sn
from swarmnode.cli.app import app
from swarmnode.errors import CheckpointError, ConfigError
from swarmnode.extensions.results.hub import HubError
from swarmnode.machine.storage import resolve_paths
from swarmnode.training.records import State
from tests.fake_hub import TOKEN, FakeHub, fake_hub

REPO = "me/letters"
SMALL = {
    "exchange.enabled": False,
    "rollout.groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 8,
    "rollout.overlap": "off",
    "node.eval_every": 1,
    "tasks.eval_examples": 4,
    "policy.lora_rank": 4,
}


def length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        files = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@dataclass(frozen=True)
class Trained:
    """A home with a run of two rounds."""

    home: Path
    model: Path


@pytest.fixture(scope="module")
def trained(quick_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    home = tmp_path_factory.mktemp("trained")
    sn.run("rev", length, rounds=2, model=quick_model, home=home, settings=SMALL)
    return Trained(home, quick_model)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert TOKEN not in result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert TOKEN not in repr(result.exception)
        raise result.exception
    return result.stdout


def pushed(trained: Trained, *arguments: str) -> Any:
    what = ("--model", str(trained.model), "--home", str(trained.home), "--set", "policy.lora_rank=4")
    return json.loads(run("export", "--push", REPO, "--json", *what, *arguments))


def test_a_run_is_pushed_with_its_figures_and_goes_on_in_another_home(
    hub: FakeHub, trained: Trained, tmp_path: Path
) -> None:
    told = pushed(trained)
    assert told["pushed"] == {"url": f"{hub.url}/{REPO}", "private": True}
    files = hub.repos[REPO]
    card = files["README.md"].decode()
    state = msgspec.json.decode(files["swarmnode/state.json"], type=State)
    assert "library_name: peft" in card and "| Rounds | 2 (" in card
    assert f"| Held-out reward before the first round | {state.counters.reward_first:.3f} |" in card
    assert f"| Held-out reward after round 2 | {state.counters.reward_last:.3f} |" in card
    assert "| Measured on | 4 held-out examples of each of 1 tasks |" in card
    assert "| `policy.lora_rank` | 4 |" in card and f"swarmnode pull {REPO}" in card
    everything = b"".join(files.values())
    assert str(trained.home).encode() not in everything and str(trained.model).encode() not in everything
    there = tmp_path / "there"
    found = json.loads(run("pull", REPO, "--json", "--home", str(there)))
    assert (found["run"], found["round"]) == ("letters", 2)
    assert "--run letters --model " in found["command"] and "--task rev" in found["command"]
    assert "policy.lora_rank=4" in found["command"]
    (checkpoint,) = (resolve_paths(there).checkpoints / "letters").glob("round-*")
    adapters = resolve_paths(trained.home).checkpoints.rglob("adapter_model.safetensors")
    ours, theirs = load_file(checkpoint / "adapter" / "adapter_model.safetensors"), load_file(max(adapters))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
    done = sn.run("rev", length, rounds=3, run="letters", model=trained.model, home=there, settings=SMALL)
    assert (done.rounds, done.reward_first) == (3, state.counters.reward_first)
    assert "resumed after round 2" in (resolve_paths(there).logs / "node.log").read_text()
    with pytest.raises(CheckpointError, match="this home already has a run letters"):
        run("pull", REPO, "--home", str(there))


def test_a_merged_model_is_pushed_as_a_base(hub: FakeHub, trained: Trained, tmp_path: Path) -> None:
    pushed(trained, "--merged", "--public")
    assert hub.private[REPO] is False
    assert f"swarmnode join --model {REPO}" in hub.repos[REPO]["README.md"].decode()
    assert "config.json" in hub.repos[REPO]
    with pytest.raises(HubError, match="holds no swarmnode run") as raised:
        run("pull", REPO, "--home", str(tmp_path))
    assert f"swarmnode join --model {REPO}" in raised.value.hint


def test_nothing_becomes_public_by_mistake(hub: FakeHub, trained: Trained) -> None:
    hub.repos[REPO], hub.private[REPO] = {}, False
    with pytest.raises(ConfigError, match="and is public"):
        pushed(trained)
    assert hub.repos[REPO] == {}


@pytest.mark.parametrize("name", ["nonsense", "two/many/words", "no such/name", ""])
def test_what_is_no_repository_is_refused_before_a_model_is_looked_for(hub: FakeHub, name: str) -> None:
    with pytest.raises(ConfigError, match="--push") as refused:
        run("export", "--push", name, "--model", "/nowhere")
    assert refused.value.hint == "write OWNER/NAME"


def test_errors_of_the_hub_are_told_without_the_token(
    hub: FakeHub, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.breaks_with = f"I will tell everybody {TOKEN}"
    with pytest.raises(HubError, match=r"I will tell everybody \*\*\*"):
        pushed(trained)
    hub.breaks_with = ""
    with pytest.raises(HubError, match="no/such"):
        run("pull", "no/such", "--home", str(tmp_path))
    with pytest.raises(HubError, match="the hub request for"):
        run("pull", "no such name", "--home", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no token"):
        pushed(trained)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the hub request for"):
        run("pull", REPO, "--home", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("swarmnode/state.json", b"{}", "damaged"),
        ("swarmnode/state.json", b'{"format": 99}', "format 99"),
        ("adapter_config.json", b'{"r": 1000000, "lora_alpha": 1, "target_modules": []}', "cannot be read"),
        ("adapter_config.json", b'{"r": 4, "lora_alpha": 8, "target_modules": "auto"}', "cannot be read"),
        ("adapter_model.safetensors", b"\x80\x04pickled", "cannot be read"),
        ("adapter_model.safetensors", None, "has 9999999999 bytes"),
    ],
)
def test_what_a_stranger_pushed_is_checked(
    name: str, content: bytes | None, error: str, hub: FakeHub, trained: Trained, tmp_path: Path
) -> None:
    pushed(trained)
    if content is None:
        hub.sizes[name] = 9999999999
    else:
        hub.repos[REPO][name] = content
    with pytest.raises((CheckpointError, HubError), match=error):
        run("pull", REPO, "--home", str(tmp_path))
    assert not list(resolve_paths(tmp_path).checkpoints.glob("*"))


def test_a_state_takes_no_path_and_no_round_without_end_along(
    hub: FakeHub, trained: Trained, tmp_path: Path
) -> None:
    pushed(trained)
    state = msgspec.json.decode(hub.repos[REPO]["swarmnode/state.json"])
    state |= {"task_specs": ["/home/you/task.py", "os:system", "rev"], "base_model": "/home/you/model; rm x"}
    hub.repos[REPO]["swarmnode/state.json"] = msgspec.json.encode(state)
    command = json.loads(run("pull", REPO, "--json", "--home", str(tmp_path)))["command"]
    assert "--model 'model; rm x'" in command
    (kept,) = resolve_paths(tmp_path).checkpoints.rglob("state.json")
    assert json.loads(kept.read_text())["task_specs"] == ["rev"]
    state["counters"]["round"] = -1
    hub.repos[REPO]["swarmnode/state.json"] = msgspec.json.encode(state)
    with pytest.raises(CheckpointError, match="from round -1"):
        run("pull", REPO, "--run", "other", "--home", str(tmp_path))
