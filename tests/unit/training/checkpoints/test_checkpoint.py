import copy
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.errors import CheckpointError, StorageError
from swarmnode.model.base_model import LoadedModel
from swarmnode.model.policy import Policy
from swarmnode.settings.config import PolicyConfig
from swarmnode.training.checkpoints.checkpoint import Checkpoint, Measure, Waiting, restore, take_snapshot
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters

Learning = tuple[Policy, torch.optim.Optimizer]
Make = Callable[[], Learning]
WAITING = Waiting(rollouts=b"half an answer", rule=b"a book")


def optimizer_of(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(policy.trainable().values()), lr=1e-2)


@pytest.fixture
def make(base: LoadedModel) -> Make:
    def new() -> Learning:
        policy = Policy(replace(base, model=copy.deepcopy(base.model)), PolicyConfig(lora_rank=4), seed=0)
        return policy, optimizer_of(policy)

    return new


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "random", keep=2)


def learn(learning: Learning, steps: int) -> None:
    """Steps whose gradients are drawn from torch's own generator: they show where that stands as well."""
    policy, optimizer = learning
    for _ in range(steps):
        for parameter in policy.trainable().values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        policy.version += 1


def weights(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.trainable().values()]


def same(ours: Policy, theirs: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))


def counted(round: int, reward: float | None = None) -> Counters:
    evaluated = None if reward is None else round
    return Counters(round=round, tokens=7 * round, reward_last=reward, evaluated_round=evaluated)


def save(store: CheckpointStore, learning: Learning, round: int, reward: float | None = None) -> Path:
    snapshot = take_snapshot(*learning, counted(round, reward), WAITING, seed=0)
    return store.folder / store.write(snapshot)


def found(checkpoint: Checkpoint | None) -> Checkpoint:
    assert checkpoint is not None
    return checkpoint


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


# ---- what is in a checkpoint ----


def test_a_resumed_run_continues_exactly_as_one_that_never_stopped(
    make: Make, store: CheckpointStore
) -> None:
    steady = make()
    learn(steady, 3)
    save(store, steady, 3)
    learn(steady, 2)

    resumed = make()
    torch.manual_seed(99)
    checkpoint = found(store.latest())
    assert restore(checkpoint, *resumed) == WAITING
    assert checkpoint.state.counters == counted(3)
    learn(resumed, 2)
    assert resumed[0].version == steady[0].version == 5
    assert same(steady[0], resumed[0])


def test_a_checkpoint_from_before_there_were_rules_is_read_without_one(
    make: Make, store: CheckpointStore
) -> None:
    folder = save(store, make(), 1)
    state = json.loads((folder / "state.json").read_text())
    del state["digests"]["rule.bin"]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "rule.bin").unlink()
    assert restore(found(store.latest()), *make()) == replace(WAITING, rule=b"")


def test_groups_of_others_in_an_older_checkpoint_are_not_read(make: Make, store: CheckpointStore) -> None:
    folder = save(store, make(), 1)
    (folder / "exchange.bin").write_bytes(b"groups of others")
    state = json.loads((folder / "state.json").read_text())
    state["digests"]["exchange.bin"] = hashlib.sha256(b"groups of others").hexdigest()
    (folder / "state.json").write_text(json.dumps(state))
    assert restore(found(store.latest()), *make()) == WAITING


def test_a_snapshot_is_of_the_moment_it_was_taken(make: Make, store: CheckpointStore) -> None:
    learning, counters = make(), counted(3, reward=0.5)
    learn(learning, 3)
    expected = copy.deepcopy(learning[0].adapter()), copy.deepcopy(learning[1].state_dict()["state"])
    snapshot = take_snapshot(*learning, counters, WAITING, seed=0)

    learn(learning, 2)
    counters.round, counters.reward_last, counters.external_groups_trained["late"] = 5, 0.9, 1
    learning[0].peft_model.peft_config["default"].r = 77
    store.write(snapshot)

    checkpoint = found(store.latest())
    assert (checkpoint.state.counters, checkpoint.state.policy_version) == (counted(3, 0.5), 3)
    assert json.loads((checkpoint.adapter / "adapter_config.json").read_text())["r"] == 4
    policy, optimizer = make()
    restore(checkpoint, policy, optimizer)
    assert all(torch.equal(tensor, expected[0][name]) for name, tensor in policy.adapter().items())
    for index, tensors in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, expected[1][index][key]) for key, tensor in tensors.items())


def test_peft_reads_the_adapter(make: Make, store: CheckpointStore, base: LoadedModel) -> None:
    from peft import PeftModel

    policy, optimizer = make()
    learn((policy, optimizer), 2)
    folder = save(store, (policy, optimizer), 2)
    ids = torch.tensor([[5, 6, 7]])
    loaded = PeftModel.from_pretrained(base.model, str(folder / "adapter")).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_what_the_second_policy_of_a_node_saved_a_first_one_resumes(
    make: Make, base: LoadedModel, store: CheckpointStore
) -> None:
    resumed = make()
    first = Policy(base, PolicyConfig(lora_rank=4), seed=1)
    second = Policy(base, PolicyConfig(lora_rank=4), seed=2, beside=first)
    learning = second, optimizer_of(second)
    learn(learning, 2)
    save(store, learning, 2)
    learn(learning, 2)
    restore(found(store.latest()), *resumed)
    learn(resumed, 2)
    assert same(second, resumed[0]) and not same(second, first)


def test_a_policy_that_took_no_step_yet_resumes_as_well(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    resumed = make()
    restore(found(store.latest()), *resumed)
    assert resumed[1].state_dict()["state"] == {}


def test_a_reward_of_another_round_is_not_taken_for_this_one(make: Make, store: CheckpointStore) -> None:
    counters = Counters(round=4, reward_last=0.5, evaluated_round=3)
    store.write(take_snapshot(*make(), counters, WAITING, seed=0))
    assert found(store.latest()).state.reward is None
    save(store, make(), 5, reward=0.0)
    assert found(store.latest()).state.reward == 0.0, "zero is a measurement"


def test_a_checkpoint_of_another_base_model_is_refused(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    policy, optimizer = make()
    policy.base = replace(policy.base, fingerprint="other")
    with pytest.raises(CheckpointError, match="another base"):
        restore(found(store.latest()), policy, optimizer)


def test_another_rank_is_refused_before_anything_changes(
    make: Make, store: CheckpointStore, base: LoadedModel
) -> None:
    save(store, make(), 1)
    policy = Policy(base, PolicyConfig(lora_rank=8), seed=0)
    before = weights(policy)
    with pytest.raises(CheckpointError, match="another rank"):
        restore(found(store.latest()), policy, optimizer_of(policy))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))


# ---- which are kept, and which is the best ----


def test_only_the_newest_are_kept(make: Make, store: CheckpointStore) -> None:
    for number in (1, 2, 3):
        save(store, make(), number)
    assert names(store) == ["round-00000002", "round-00000003"]


def test_the_best_is_kept_while_it_is_the_best(make: Make, store: CheckpointStore) -> None:
    assert store.best() is None
    for number, reward in enumerate([0.2, 0.7, None, 0.5, 0.6], start=1):
        save(store, make(), number, reward)
    assert names(store) == ["round-00000002", "round-00000004", "round-00000005"]
    assert found(store.best()).state.counters.round == 2
    assert found(store.latest()).state.counters.round == 5, "a start goes on from the newest"
    save(store, make(), 6, 0.7)
    assert found(store.best()).state.counters.round == 6, "of equals the newest"
    assert names(store) == ["round-00000005", "round-00000006"]


def test_while_it_is_unknown_which_is_the_best_nothing_is_deleted(
    make: Make, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    best = save(store, make(), 1, 0.9) / "state.json"
    kept = best.read_bytes()
    save(store, make(), 2)
    best.unlink()
    best.mkdir()  # what reading it meets is an error of the disk, not a missing file
    save(store, make(), 3)
    assert len(names(store)) == 3 and "deleting no checkpoints" in caplog.text
    best.rmdir()
    best.write_bytes(kept)
    save(store, make(), 4)
    assert names(store) == ["round-00000001", "round-00000003", "round-00000004"]


def test_a_damaged_best_gives_way_to_the_next_best(make: Make, store: CheckpointStore) -> None:
    (save(store, make(), 1, 0.9) / "optimizer.safetensors").write_bytes(b"rubbish")
    save(store, make(), 2, 0.4)
    assert found(store.best()).state.reward == 0.4


def test_a_round_that_has_its_checkpoint_keeps_it(make: Make, store: CheckpointStore) -> None:
    learning = make()
    first = save(store, learning, 1)
    before = first.stat().st_ino, (first / "state.json").read_bytes()
    learn(learning, 1)
    assert save(store, learning, 1) == first
    assert (first.stat().st_ino, (first / "state.json").read_bytes()) == before
    assert names(store) == ["round-00000001"]


def test_a_reward_that_was_measured_after_a_save_is_added_to_it(make: Make, store: CheckpointStore) -> None:
    learning = make()
    folder = save(store, learning, 1)
    weights_before = (folder / "adapter" / "adapter_model.safetensors").stat().st_ino
    save(store, learning, 1, reward=0.5)
    checkpoint = found(store.best())
    assert (checkpoint.state.reward, checkpoint.state.counters) == (0.5, counted(1, 0.5))
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_ino == weights_before
    save(store, learning, 1, reward=0.9)
    assert found(store.best()).state.reward == 0.5, "what is there stays"
    assert names(store) == ["round-00000001"]


def test_rewards_on_different_tasks_are_not_compared(make: Make, store: CheckpointStore) -> None:
    easy, hard = Measure(("rev",), 8), Measure(("gcd",), 8)
    for number, (reward, measure) in enumerate([(0.9, easy), (0.3, hard), (0.2, hard)], start=1):
        store.write(take_snapshot(*make(), counted(number, reward), WAITING, seed=0, measure=measure))
    assert found(store.best()).state.counters.round == 2


def test_a_damaged_checkpoint_is_no_reason_not_to_write_the_round_again(
    make: Make, store: CheckpointStore
) -> None:
    (save(store, make(), 1) / "rollouts.bin").write_bytes(b"rubbish")
    save(store, make(), 1)
    assert found(store.latest()).state.counters.round == 1
    assert list(store.folder.glob("damaged-round-00000001-*")), "nothing is deleted"


def test_starting_fresh_keeps_what_was(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    kept = store.archive()
    assert store.latest() is None and store.best() is None
    assert kept is not None
    assert json.loads((kept / "round-00000001" / "state.json").read_text())["format"] == 3
    assert store.archive() is None


# ---- damage ----


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
    assert found(store.latest()).state.counters.round == 1
    assert path.parent.exists() or path.parent.parent.exists(), "looking changes nothing"
    assert found(store.tidy()).state.counters.round == 1
    assert list(store.folder.glob("damaged-round-00000002-*")), "nothing is deleted"


def test_a_run_of_which_every_checkpoint_is_damaged_says_once_that_it_begins_anew(
    make: Make, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.tidy() is None and not caplog.records, "a new run has none"
    for number in (1, 2):
        (save(store, make(), number) / "state.json").unlink()
    for _ in range(2):
        assert store.tidy() is None
    assert caplog.text.count(f"so it starts over; the damaged ones are kept in {store.folder}") == 1


def test_a_checkpoint_of_another_version_is_not_damage(make: Make, store: CheckpointStore) -> None:
    folder = save(store, make(), 1)
    (folder / "state.json").write_text('{"format": 2, "what": "the version before this one wrote"}')
    for look in (store.latest, store.tidy):
        with pytest.raises(CheckpointError, match="has format 2"):
            look()
    assert folder.exists()


def test_what_a_killed_save_left_is_removed_at_the_next_start(make: Make, store: CheckpointStore) -> None:
    save(store, make(), 1)
    (store.folder / ".round-00000002.123").mkdir()
    (store.folder / ".round-00000000.123").mkdir()
    store.tidy()
    assert names(store) == ["round-00000001"]


def test_without_any_sound_checkpoint_there_is_none(make: Make, store: CheckpointStore) -> None:
    (save(store, make(), 1) / "state.json").write_text("{}")
    assert store.latest() is None


# ---- a disk that refuses ----


class Disk:
    """Fails at the step `fails_at`, counted from 0: making, opening, syncing, renaming."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.fails_at = -1
        for name in ("mkdir", "fsync", "rename"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        monkeypatch.setattr(Path, "open", self._watched(Path.open))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps - 1 == self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)

        return watched


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)


def test_a_disk_that_is_full_at_any_step_leaves_the_last_checkpoint_and_no_rubbish(
    make: Make, store: CheckpointStore, disk: Disk
) -> None:
    learning = make()
    save(store, learning, 1)
    disk.steps = 0
    save(store, learning, 2)
    steps = disk.steps
    assert steps > 15
    refused = 0
    for number in range(3, 3 + steps):
        before = names(store)
        disk.steps, disk.fails_at = 0, number - 3
        try:
            save(store, learning, number)
        except StorageError as error:
            assert "the disk is full" in error.message
            refused += 1
            disk.fails_at = -1
            assert [name for name in names(store) if name != f"round-{number:08d}"] == before
        disk.fails_at = -1
        assert found(store.latest()).state.counters.round >= 2
        assert not list(store.folder.glob(".*")) and not list(store.folder.glob("damaged*"))
    assert refused > 15


def test_what_cannot_be_deleted_is_deleted_after_a_later_save(
    make: Make, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """The process ends here."""

    def killed(self: CheckpointStore, keep: int) -> None:
        raise Killed

    save(store, make(), 1)
    save(store, make(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "prune", killed)
        with pytest.raises(Killed):
            save(store, make(), 3)
    assert found(store.tidy()).state.counters.round == 3
    assert names(store) == [f"round-0000000{number}" for number in (1, 2, 3)]
    save(store, make(), 4)
    assert names(store) == ["round-00000003", "round-00000004"]
