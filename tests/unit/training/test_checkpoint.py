import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.errors import CheckpointError, StorageError
from swarmnode.training import checkpoint as checkpoint_module
from swarmnode.training.base_model import LoadedModel
from swarmnode.training.checkpoint import CheckpointStore, Waiting, restore
from swarmnode.training.policy import Policy
from swarmnode.training.records import Counters
from swarmnode.training.trainer import Trainer
from swarmnode.types import RolloutGroup

ANSWERS = [[7, 1], [8, 9, 1]]
Make = Callable[[], tuple[Policy, Trainer]]
WAITING = Waiting(exchange=b"groups of others", rollouts=b"half an answer")


@pytest.fixture
def make(base: LoadedModel) -> Make:
    import copy
    from dataclasses import replace

    def new() -> tuple[Policy, Trainer]:
        policy = Policy(replace(base, model=copy.deepcopy(base.model)), PolicyConfig(lora_rank=4), seed=0)
        config = TrainingConfig(learning_rate=1e-2)
        return policy, Trainer(policy, config, temperature=1.0, seed=0, render=lambda prompt: (5, 6))

    return new


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, "random", "fingerprint", keep=2)


def learn(trainer: Trainer, group: Callable[..., RolloutGroup], rounds: int) -> None:
    for _ in range(rounds):
        trainer.train([group(ANSWERS, [1.0, 0.0])], [])


def weights(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.trainable().values()]


def save(
    store: CheckpointStore, parts: tuple[Policy, Trainer], round: int, waiting: Waiting = WAITING
) -> Path:
    return store.save(*parts, Counters(round=round, tokens=7 * round), waiting, seed=0)


def test_a_resumed_run_continues_exactly_as_one_that_never_stopped(
    make: Make, store: CheckpointStore, group: Callable[..., RolloutGroup]
) -> None:
    steady = make()
    learn(steady[1], group, 3)
    save(store, steady, 3)
    learn(steady[1], group, 2)

    resumed = make()
    checkpoint = store.latest()
    assert checkpoint is not None
    assert restore(checkpoint, *resumed) == WAITING
    assert checkpoint.state.counters == Counters(round=3, tokens=21)
    learn(resumed[1], group, 2)
    assert resumed[0].version == steady[0].version == 5
    assert all(torch.equal(a, b) for a, b in zip(weights(steady[0]), weights(resumed[0]), strict=True))


def test_torch_draws_continue_where_they_were(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    expected = torch.rand(4)
    torch.manual_seed(99)
    checkpoint = store.latest()
    assert checkpoint is not None
    restore(checkpoint, *make())
    assert torch.equal(torch.rand(4), expected)


def test_peft_reads_the_adapter(make: Make, store: CheckpointStore, base: LoadedModel, group: Any) -> None:
    from peft import PeftModel

    policy, trainer = make()
    learn(trainer, group, 2)
    folder = save(store, (policy, trainer), 2)
    ids = torch.tensor([[5, 6, 7]])
    loaded = PeftModel.from_pretrained(base.model, str(folder / "adapter")).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_only_the_newest_are_kept(make: Make, store: CheckpointStore) -> None:
    for number in (1, 2, 3):
        save(store, make(), number)
    assert sorted(p.name for p in store.folder.iterdir()) == ["round-00000002", "round-00000003"]


@pytest.mark.parametrize(
    "victim", ["state.json", "adapter/adapter_model.safetensors", "optimizer.safetensors", "rollouts.bin"]
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    make: Make, store: CheckpointStore, victim: str, damage: str
) -> None:
    save(store, make(), 1)
    path = save(store, make(), 2) / victim
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(bytes([data[0] ^ 0xFF]) + data[1:])
    found = store.latest()
    assert found is not None and found.state.counters.round == 1
    assert path.parent.exists() or path.parent.parent.exists(), "looking changes nothing"
    store.tidy()
    found = store.latest()
    assert found is not None and found.state.counters.round == 1
    assert [p.name for p in store.folder.glob("damaged-round-00000002-*")], "nothing is deleted"


def test_a_checkpoint_of_another_version_is_not_damage(make: Make, store: CheckpointStore) -> None:
    folder = save(store, make(), 1)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 99}))
    for look in (store.latest, store.tidy):
        with pytest.raises(CheckpointError, match="has format 99"):
            look()
    assert folder.exists()


def test_what_a_killed_save_left_is_removed_at_the_next_start(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    (store.folder / ".round-00000002.123").mkdir()
    store.tidy()
    assert [p.name for p in store.folder.iterdir()] == ["round-00000001"]


def test_without_any_sound_checkpoint_there_is_none(make: Make, store: CheckpointStore) -> None:
    (save(store, make(), 1) / "state.json").write_text("{}")
    assert store.latest() is None


def test_a_full_disk_leaves_the_last_checkpoint_and_no_rubbish(
    make: Make, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, make(), 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "_write", full)
    with pytest.raises(StorageError, match="disk is full"):
        save(store, make(), 2)
    assert [p.name for p in store.folder.iterdir()] == ["round-00000001"]


def test_a_checkpoint_of_another_base_model_is_refused(make: Make, store: CheckpointStore) -> None:
    from dataclasses import replace

    save(store, make(), 1)
    policy, trainer = make()
    policy.base = replace(policy.base, fingerprint="other")
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="another base"):
        restore(checkpoint, policy, trainer)


def test_another_rank_is_refused_before_anything_changes(
    make: Make, store: CheckpointStore, base: LoadedModel
) -> None:
    save(store, make(), 1)
    policy = Policy(base, PolicyConfig(lora_rank=8), seed=0)
    trainer = Trainer(policy, TrainingConfig(), temperature=1.0, seed=0, render=lambda prompt: (5,))
    before = weights(policy)
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="another rank"):
        restore(checkpoint, policy, trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))


def test_starting_fresh_keeps_what_was(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    kept = store.archive()
    assert store.latest() is None
    assert (
        kept is not None and json.loads((kept / "round-00000001" / "state.json").read_text())["format"] == 2
    )
    assert store.archive() is None


WRITER = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
from swarmnode.training import checkpoint
from swarmnode.training.checkpoint import CheckpointStore, Waiting
from swarmnode.training.records import Counters
class Policy:
    base = SimpleNamespace(name="b", fingerprint="f"); version = 0
    def trainable(self): return {}
    def save_adapter(self, folder):
        folder.mkdir(); (folder / "adapter_model.safetensors").write_bytes(b"x" * 300_000)
policy, trainer = Policy(), SimpleNamespace(optimizer=SimpleNamespace(state={}))
store = CheckpointStore(Path(sys.argv[1]), "b", "f", keep=2)
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    number += 1
    store.save(policy, trainer, Counters(round=number), Waiting(b"y" * 100_000), 0)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    import random

    rng = random.Random(0)
    store = CheckpointStore(tmp_path, "b", "f", keep=2)
    last = 0
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(0.1 + rng.random() / 5)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = store.latest()
        assert found is not None and found.state.counters.round >= last
        assert not list(store.folder.glob("damaged-*")), "a rename never shows half a checkpoint"
        last = found.state.counters.round
