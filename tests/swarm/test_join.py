"""One node, as a person meets it: it learns, stops, resumes, and says what is wrong in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.errors import StorageError
from swarmnode.machine.storage import resolve_paths
from tests.test_readme import task_of_the_readme

Join = Callable[..., Any]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
ALONE = ("--set", "exchange.enabled=false")

pytestmark = pytest.mark.slow


def complaint(node: Any) -> str:
    """The error of a node that ended badly: exactly one line, and one that says what to do next."""
    assert node.wait() != 0
    lines = [line for line in node.story.splitlines() if line.startswith(("error:", "  next:"))]
    assert len(lines) == 2, node.story
    assert "Traceback" not in node.story
    return "\n".join(lines)


def adapter(node: Any, round: int) -> bytes:
    pattern = f"round-{round:08d}/adapter/adapter_model.safetensors"
    return next(node.paths.checkpoints.rglob(pattern)).read_bytes()


def test_the_tiny_policy_gets_better_on_questions_it_never_trained_on(join: Join, tiny_model: Path) -> None:
    arguments = ("--rounds", "60", "--seed", "0", "--set", "tasks.eval_examples=64")
    summary = join(*arguments, model=tiny_model).summary()
    assert summary["reward_first"] < 0.30
    assert summary["reward_last"] >= 0.45
    assert summary["rounds"] == 60
    assert summary["tokens"] > 0 and summary["seconds"] > 0


def test_a_stopped_node_saves_and_continues_its_numbers(join: Join) -> None:
    first = join("--seed", "1")
    first.until_round(3)
    first.kill(signal.SIGTERM)
    before = first.summary()
    assert before["stopped"] == "stopped on request"

    more = before["rounds"] + 2
    second = join("--seed", "1", "--rounds", str(more))
    after = second.summary()
    assert f"resumed after round {before['rounds']}" in second.story
    assert (after["rounds"], after["peer"]) == (more, before["peer"])
    assert after["reward_first"] == before["reward_first"]
    assert after["tokens"] > before["tokens"]


def test_without_partial_rollouts_a_run_in_two_parts_equals_one_in_one_piece(join: Join) -> None:
    on_policy = (*ALONE, "--no-overlap", "--set", "rollout.mode=sync", "--seed", "3")
    join(*on_policy, "--rounds", "2", home="parts").summary()
    parts = join(*on_policy, "--rounds", "4", home="parts")
    whole = join(*on_policy, "--rounds", "4", home="whole")
    assert parts.summary()["tokens"] == whole.summary()["tokens"]
    assert adapter(parts, 4) == adapter(whole, 4)


def test_a_running_node_answers_status_and_a_second_one_is_told_what_to_do(
    join: Join, swarmnode: Command
) -> None:
    node = join()
    node.until_round(1)
    home = str(node.home)
    answer = json.loads(swarmnode("status", "--json", "--home", home).stdout)
    assert answer["pid"] == node.process.pid
    assert answer["network"]["state"] == "up"
    panel = swarmnode("status", "--home", home).stdout
    assert answer["name"] in panel and "swarmnode join" in panel

    second = complaint(join())
    assert f"process {node.process.pid}" in second
    assert "--home ~/swarmnode-2 /ip4/127.0.0.1/tcp/" in second, "the line can be pasted as it is"


def test_status_without_a_node_says_so(tmp_path: Path, swarmnode: Command) -> None:
    done = swarmnode("status", "--home", str(tmp_path))
    assert done.returncode == 1 and "no node is running" in done.stderr


def test_eval_and_export_take_up_the_newest_checkpoint_and_starting_fresh_deletes_none(
    join: Join, quick_model: Path, tmp_path: Path, swarmnode: Command
) -> None:
    node = join(*ALONE, "--rounds", "2")
    node.summary()
    same = ("--home", str(node.home), "--model", str(quick_model), "--preset", "tiny")
    result = json.loads(swarmnode("eval", *same, "--set", "tasks.eval_examples=4", "--json").stdout)
    assert result["policy"] == "checkpoint of round 2"
    assert set(result["per_task"]) == {"rev", "sort", "next", "bitop", "pop", "max", "bin", "gcd"}

    assert swarmnode("export", str(tmp_path / "adapter"), *same).returncode == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == adapter(node, 2)
    assert swarmnode("export", str(tmp_path / "merged"), "--merged", *same).returncode == 0
    assert_merged_equals_adapter(quick_model, tmp_path / "adapter", tmp_path / "merged")
    assert "exists already" in swarmnode("export", str(tmp_path / "merged"), *same).stderr

    fresh = join(*ALONE, "--rounds", "1", "--fresh")
    assert fresh.summary()["rounds"] == 1
    rounds = sorted(path.parent.name for path in fresh.paths.checkpoints.rglob("state.json"))
    assert rounds == ["round-00000001", "round-00000002"]


def assert_merged_equals_adapter(base: Path, adapter_folder: Path, merged_folder: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(merged_folder).encode("rev abc=")])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter_folder).eval()
    merged = AutoModelForCausalLM.from_pretrained(merged_folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_task_of_the_readme_is_learnt(
    join: Join, tiny_model: Path, tmp_path: Path, swarmnode: Command
) -> None:
    """Every seed learns it well before the rounds that the README asks for (benchmarks/first_task.py)."""
    name, code = task_of_the_readme()
    task = tmp_path / name
    task.write_text(code)
    node = join(*ALONE, "--rounds", "100", "--seed", "0", "--task", str(task), model=tiny_model)
    summary = node.summary()
    assert summary["reward_first"] < 0.1 and summary["advice"] == ""
    assert summary["reward_last"] > 0.5
    same = ("--home", str(node.home), "--model", str(tiny_model), "--preset", "tiny")
    measured = json.loads(swarmnode("eval", *same, "--json").stdout)
    assert set(measured["per_task"]) == {"last"} and measured["mean"] > 0.5


# ---- what can go wrong: one clear line each, a non-zero exit or a stated fall-back, nothing lost ----


def test_a_wrong_model_path(join: Join) -> None:
    assert "no such folder" in complaint(join(model="./nowhere"))


def test_a_folder_that_is_no_model(join: Join, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in complaint(join(model=tmp_path / "empty"))


def test_a_busy_port(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = complaint(join("--port", str(port)))
    assert f"port {port}" in said and "--port" in said


def test_an_address_that_is_none(join: Join) -> None:
    assert "not-an-address" in complaint(join("not-an-address"))


def test_an_unknown_task(join: Join) -> None:
    assert "did you mean sort?" in complaint(join("--task", "sorrt"))


def test_a_key_that_cannot_be_read(join: Join, tmp_path: Path) -> None:
    key = resolve_paths(tmp_path / "node").identity
    key.parent.mkdir(parents=True)
    key.write_bytes(b"this is no key")
    assert str(key) in complaint(join())
    assert key.read_bytes() == b"this is no key", "a key we cannot read may be somebody's only one"


def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_is_used(join: Join) -> None:
    settings = (*ALONE, "--set", "node.checkpoint_every=1")
    first = join(*settings, "--rounds", "3")
    first.summary()
    *_, before, newest = sorted(first.paths.checkpoints.rglob("round-????????"))
    assert newest.name == "round-00000003"
    (newest / "optimizer.safetensors").write_bytes(b"rubbish")

    second = join(*settings, "--rounds", "4")
    assert second.summary()["rounds"] == 4
    assert "checkpoint round-00000003 is damaged" in second.story
    assert f"resumed after round {int(before.name.removeprefix('round-'))}," in second.story
    assert list(newest.parent.glob("damaged-round-00000003-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False)
    if mount.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_no_checkpoint_stops_no_training_and_is_told_at_the_end(
    join: Join, small_disk: Path
) -> None:
    settings = (*ALONE, "--set", "node.checkpoint_every=1")
    first = join(*settings, "--rounds", "2", home="disk")
    first.summary()
    kept = adapter(first, 2)
    filler = small_disk / "filler"
    fill(filler)

    second = join(*settings, "--rounds", "4", home="disk")
    assert second.wait() == StorageError.exit_code, second.story
    assert "round 4/4" in second.story and "the node continues" in second.story
    assert "rounds 3 to 4 could not be saved" in second.story and "after round 2" in second.story
    assert "Traceback" not in second.story
    assert adapter(second, 2) == kept
    assert not list(second.paths.checkpoints.rglob("round-00000004")), "no half-written checkpoint"

    filler.unlink()
    third = join(*settings, "--rounds", "4", home="disk")
    third.summary()
    assert "resumed after round 2" in third.story
    assert adapter(third, 4)


def test_a_full_disk_at_the_first_start(join: Join, small_disk: Path) -> None:
    fill(small_disk / "filler")
    said = complaint(join(*ALONE, "--rounds", "1", home="disk", model="tiny"))
    assert "No space left" in said and "--home" in said


def fill(path: Path) -> None:
    """Leave less free space than a checkpoint takes: room for small files, none for weights."""
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    path.write_bytes(b"x" * max(0, free - 60_000))


def test_neither_seeds_that_are_down_nor_a_reader_that_goes_away_stop_the_training(
    tmp_path: Path, quick_model: Path
) -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    command = [sys.executable, "-m", "swarmnode", "join", nobody, "--home", str(tmp_path / "piped")]
    settings = ["--set", "network.listen=127.0.0.1", "--set", "tasks.eval_examples=8"]
    policy = ["--model", str(quick_model), "--preset", "tiny", "--rounds", "5", *settings]
    node = subprocess.Popen([*command, *policy], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert node.stdout is not None and node.stderr is not None
    node.stderr.readline()
    node.stderr.close()
    summary = json.loads(node.stdout.read().splitlines()[-1])
    node.stdout.close()
    assert node.wait(60) == 0
    assert summary["rounds"] == summary["saved_round"] == 5


def test_settings_that_leave_no_room_for_a_prompt_are_refused(join: Join) -> None:
    assert "leaves no room for a prompt" in complaint(join(*ALONE, "--set", "rollout.max_tokens=600"))
