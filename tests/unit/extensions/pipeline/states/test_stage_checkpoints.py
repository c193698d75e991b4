"""What a pipeline of three stages saved goes on as two, one or four stages, and on a single machine."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_local import LocalPipeline
from swarmnode.errors import CheckpointError, StorageError
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, cross_entropy
from swarmnode.extensions.pipeline.stages.packed_state import MOMENTS, unpack_state
from swarmnode.extensions.pipeline.stages.stage_model import StagePart, StageSettings
from swarmnode.extensions.pipeline.stages.trial_cut import try_cut
from swarmnode.extensions.pipeline.states.holdings import Assembled, HeldState, of_part
from swarmnode.extensions.pipeline.states.stage_checkpoints import (
    RECORD,
    STATE,
    StageCheckpoints,
    single_machine_tensors,
    whole_snapshot,
)
from swarmnode.model.policy import Policy
from swarmnode.training.checkpoints.checkpoint import (
    Measure,
    Snapshot,
    Waiting,
    check_has_adapter,
    restore,
    state_of,
)
from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore
from swarmnode.training.records import Counters
from tests.unit.extensions.pipeline.tiny_models import (
    ADAPTER,
    LAYERS,
    SETTINGS,
    batches,
    saved,
    single_machine,
    tiny_config,
    tiny_model,
)

PACKS = try_cut(tiny_config())
FULL = StageSettings(trainable="full")
STEP_TOKENS = 30
NO_CLIP = 1e9
MODEL = "fingerprint"
WHOLE = StagePart(0, LAYERS, has_ends=True)


class Trained:
    """A pipeline with an optimizer for each stage."""

    def __init__(self, folder: Path, ends: Sequence[int], settings: StageSettings = SETTINGS) -> None:
        self.pipeline = LocalPipeline.load(folder, ends, settings, packs=PACKS)
        self.optimizers = [adam(worker.model.trainable()) for worker in self.pipeline.workers]

    def step(self) -> None:
        for batch in batches(packed=True):
            self.pipeline.accumulate(LossInputs(batch, self.pipeline.full_path), cross_entropy(STEP_TOKENS))
        taken = self.pipeline.take_gradients()
        for worker, optimizer, one in zip(self.pipeline.workers, self.optimizers, taken, strict=True):
            worker.apply(one.of_step(one.tokens), optimizer, max_norm=NO_CLIP)

    def states(self) -> list[HeldState]:
        workers = zip(self.pipeline.workers, self.optimizers, strict=True)
        return [worker.state(optimizer) for worker, optimizer in workers]

    def load(self, tensors: dict[str, Tensor]) -> None:
        for worker, optimizer in zip(self.pipeline.workers, self.optimizers, strict=True):
            worker.load_state(tensors, optimizer)

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        batch = batches(packed=False)[0]
        return self.pipeline.logprobs(batch, self.pipeline.full_path).logprobs_N

    def weights(self) -> dict[str, Tensor]:
        named = (worker.model.trainable() for worker in self.pipeline.workers)
        return {name: p.detach().clone() for part in named for name, p in part.items()}


def adam(parameters: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.values(), lr=1e-2)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """Three stages after three steps; nobody moves them."""
    found = Trained(folder, [2, 4, 6])
    for _ in range(3):
        found.step()
    return found


@pytest.fixture(scope="module")
def after(folder: Path, trained: Trained) -> dict[str, Tensor]:
    """Their weights one step later."""
    going_on = Trained(folder, [2, 4, 6])
    going_on.load(assembled(trained.states()).tensors)
    going_on.step()
    return going_on.weights()


def assembled(held: Sequence[HeldState]) -> Assembled:
    tensors = {name: t for one in held for name, t in unpack_state(one.data).items()}
    return Assembled(tensors, held[0].holding.iteration)


def member_folders(root: Path, trained: Trained, keep: int = 3) -> list[StageCheckpoints]:
    stores = [StageCheckpoints(root / f"member-{n}", MODEL, keep=keep) for n in range(3)]
    for store, held in zip(stores, trained.states(), strict=True):
        store.write(held)
    return stores


def read(stores: Sequence[StageCheckpoints], part: StagePart) -> Assembled:
    """The newest of every folder, as far as it belongs to the part."""
    whole = assembled([next(store.states()) for store in stores])
    return Assembled(of_part(whole.tensors, part), whole.iteration)


@pytest.mark.parametrize("ends", [[6], [3, 6], [1, 2, 5, 6]])
def test_a_checkpoint_of_three_stages_goes_on_under_any_partition(
    folder: Path, trained: Trained, after: dict[str, Tensor], tmp_path: Path, ends: list[int]
) -> None:
    stores = member_folders(tmp_path, trained)
    found = Trained(folder, ends)
    for worker, optimizer in zip(found.pipeline.workers, found.optimizers, strict=True):
        part = read(stores, worker.model.part)
        assert part.iteration == 3
        assert set(worker.model.trainable()) < set(part.tensors) <= names_of(worker.model.trainable())
        worker.load_state(part.tensors, optimizer)
    torch.testing.assert_close(found.logprobs(), trained.logprobs(), rtol=0, atol=1e-6)
    found.step()
    close(found.weights(), after)


def names_of(parameters: dict[str, Any]) -> set[str]:
    """Of a stage's parameters and their moments."""
    return {f"{before}{name}" for name in parameters for before in ("", *(f"{key}/" for key in MOMENTS))}


def store_of(root: Path) -> CheckpointStore:
    return CheckpointStore(root / "random")


def snapshot_of(whole: Assembled) -> Snapshot:
    state = state_of("random", "", whole.iteration, Counters(round=whole.iteration), 0, Measure())
    return whole_snapshot(whole.tensors, state, ADAPTER, waiting=Waiting())


def written(trained: Trained, root: Path) -> CheckpointStore:
    stores = member_folders(root / "members", trained)
    store_of(root).write(snapshot_of(read(stores, WHOLE)))
    return store_of(root)


def single_step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """By the plain model on padded rows."""
    for batch in batches(packed=False):
        logits_NV = policy.model(input_ids=batch.input_ids_BT).logits.flatten(0, 1)[batch.predictors_N]
        loss = torch.nn.functional.cross_entropy(logits_NV, batch.targets_N, reduction="sum")
        (loss / STEP_TOKENS).backward()
    optimizer.step()


def test_a_single_machine_resumes_from_it_with_the_same_next_step(
    model: Any, trained: Trained, after: dict[str, Tensor], tmp_path: Path
) -> None:
    policy = single_machine(model)
    optimizer = adam(policy.trainable())
    checkpoint = written(trained, tmp_path).latest()
    assert checkpoint is not None
    restore(checkpoint, policy, optimizer)
    assert policy.version == 3
    close(policy.adapter(), trained.weights())
    single_step(policy, optimizer)
    close(policy.adapter(), after)


def test_plain_peft_loads_it_on_the_whole_model(model: Any, trained: Trained, tmp_path: Path) -> None:
    from peft import PeftModel

    checkpoint = written(trained, tmp_path).latest()
    assert checkpoint is not None
    peft_model = PeftModel.from_pretrained(copy.deepcopy(model), str(checkpoint.adapter))
    batch = batches(packed=False)[0]
    with torch.no_grad():
        logits_NV = peft_model(input_ids=batch.input_ids_BT).logits.flatten(0, 1)[batch.predictors_N]
    found = logits_NV.log_softmax(-1).gather(1, batch.targets_N[:, None])[:, 0]
    torch.testing.assert_close(found, trained.logprobs(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ends", [[6], [2, 4, 6]])
def test_stages_go_on_from_a_single_machines_checkpoint(
    folder: Path, trained: Trained, after: dict[str, Tensor], tmp_path: Path, ends: list[int]
) -> None:
    checkpoint = written(trained, tmp_path).latest()
    assert checkpoint is not None
    found = Trained(folder, ends)
    tensors = single_machine_tensors(checkpoint.folder)
    found.load(tensors.tensors)
    assert tensors.iteration == 3
    torch.testing.assert_close(found.logprobs(), trained.logprobs(), rtol=0, atol=1e-6)
    found.step()
    close(found.weights(), after)


def test_with_full_training_the_ends_come_from_the_stage_that_has_them(folder: Path, tmp_path: Path) -> None:
    before = Trained(folder, [2, 6], FULL)
    before.step()
    stores = [StageCheckpoints(tmp_path / str(n), MODEL) for n in range(2)]
    for store, held in zip(stores, before.states(), strict=True):
        store.write(held)
    found = Trained(folder, [4, 6], FULL)
    for worker, optimizer in zip(found.pipeline.workers, found.optimizers, strict=True):
        part = worker.model.part
        worker.load_state(read(stores, part).tensors, optimizer)
    torch.testing.assert_close(found.logprobs(), before.logprobs(), rtol=0, atol=1e-6)
    before.step()
    found.step()
    close(found.weights(), before.weights())
    with pytest.raises(CheckpointError, match="full training"):
        snapshot_of(read(stores, WHOLE))


# Folders.


def held(first: int, end: int, step: int) -> HeldState:
    tensors = {f"model.layers.{n}.weight": torch.full((2,), 10.0 * step + n) for n in range(first, end)}
    return HeldState.of(StagePart(first, end), step, tensors)


def test_the_last_steps_stay_and_the_others_go(tmp_path: Path) -> None:
    store = StageCheckpoints(tmp_path, MODEL, keep=2)
    for step in (1, 2, 3):
        store.write(held(0, 2, step))
    assert [one.holding.iteration for one in store.states()] == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002-layers-0-2",
        "step-00000003-layers-0-2",
    ]


@pytest.mark.parametrize("damage", [STATE, RECORD])
def test_a_damaged_checkpoint_is_left_and_not_read(tmp_path: Path, damage: str) -> None:
    store = StageCheckpoints(tmp_path, MODEL)
    store.write(held(0, 2, 1))
    path = store.write(held(0, 2, 2)) / damage
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x80
    path.write_bytes(data)
    assert [one.holding.iteration for one in store.states()] == [1]
    assert path.exists()


def test_what_a_crash_left_and_other_models_checkpoints_are_not_seen(tmp_path: Path) -> None:
    store = StageCheckpoints(tmp_path, MODEL)
    (tmp_path / ".step-00000009-layers-0-2.77").mkdir(parents=True)
    StageCheckpoints(tmp_path, "another").write(held(0, 2, 8))
    store.write(held(0, 2, 1))
    assert [one.holding.iteration for one in store.states()] == [1]


def test_a_step_taken_again_replaces_the_former(tmp_path: Path) -> None:
    store = StageCheckpoints(tmp_path, MODEL)
    store.write(held(0, 2, 1))
    again = HeldState.of(StagePart(0, 2), 1, {"model.layers.0.weight": torch.ones(1)})
    store.write(again)
    assert [*store.states()] == [again]


def test_a_folder_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="was not written"):
        StageCheckpoints(tmp_path / "file", MODEL).write(held(0, 2, 1))


def test_an_adapter_with_a_hole_is_not_written(trained: Trained) -> None:
    first, _, last = trained.states()
    with pytest.raises(CheckpointError, match="holds layer 2 of 6"):
        snapshot_of(assembled([first, last]))


def test_half_of_an_adapter_that_is_no_matrix_is_not_written(trained: Trained) -> None:
    whole = assembled(trained.states())
    name = next(name for name in whole.tensors if name.endswith("lora_B.weight") and "/" not in name)
    with pytest.raises(CheckpointError, match="no partner, or not rank"):
        snapshot_of(Assembled({**whole.tensors, name: torch.ones(4)}, whole.iteration))


def test_a_checkpoint_with_full_training_says_where_the_weights_are(trained: Trained, tmp_path: Path) -> None:
    checkpoint = written(trained, tmp_path).latest()
    assert checkpoint is not None
    check_has_adapter(checkpoint)
    store_of(tmp_path).write(snapshot_of(Assembled({}, 9)))
    latest = store_of(tmp_path).latest()
    assert latest is not None and latest.state.policy_version == 9
    with pytest.raises(CheckpointError, match="trains all weights") as refused:
        check_has_adapter(latest)
    assert "layers" in str(refused.value.hint)
    assert single_machine_tensors(latest.folder).tensors == {}
