"""Free memory of a device once a model is loaded, and what the engine may take of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swarmnode.machine.hardware import inspect_machine
from swarmnode.machine.storage import builtin_folder
from swarmnode.models import load_cards
from swarmnode.node.building import loaded_memory
from swarmnode.node.building.loaded_memory import choose_budget, free_bytes
from swarmnode.node.building.local_policy import LocalPolicy
from swarmnode.rollout.shared_engine import GUEST_VERSIONS, SharedEngine
from swarmnode.settings.config_layers import load_config
from swarmnode.testing.fake_engine import FakeEngine

GIB = 2**30


@pytest.mark.parametrize(("limit", "free"), [("", 77), ("limits.memory_gb=40", 37)])
def test_what_torch_keeps_of_a_card_to_use_again_is_free(
    limit: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest micro-batch was tried: 27 GiB of it are reserved, and nothing of them is in use."""
    card = {"mem_get_info": (50 * GIB, 80 * GIB), "memory_reserved": 30 * GIB, "memory_allocated": 3 * GIB}
    for name, answer in card.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    config = load_config(environ={}, assignments=[limit] if limit else []).config
    assert free_bytes(config, torch.device("cuda"), inspect_machine()) == free * GIB


CONFIG = load_config(environ={}, assignments=["rollout.engine=embedded"]).config
CARD = next(card for card in load_cards(builtin_folder("configs") / "models.toml") if "0.5B" in card.name)


def loaded(reserves_kv: bool = False) -> LocalPolicy:
    """A model of half a billion parameters on a CPU, and an engine that could run 256 answers at once."""
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    base = SimpleNamespace(card=CARD, name="m", max_positions=None, model=model, is_quantized=False)
    engine = FakeEngine(lambda request: (1,), CONFIG.rollout.slots)
    engine.capabilities = replace(engine.capabilities, reserves_kv=reserves_kv)
    shared = SharedEngine(engine, 1)
    return LocalPolicy(base, None, shared.member("policy-0"), shared, None)


def bounds(free_gib: float, local: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Sequences at once, and versions for guests."""
    monkeypatch.setattr(loaded_memory, "free_bytes", lambda *_: free_gib * GIB)
    budget = choose_budget(CONFIG, local)
    need = loaded_memory._overlap_bytes(CONFIG, local, budget)
    assert need is not None and (need <= free_gib * GIB or not budget.fits)
    return local.engine.capabilities.max_running, local.shared.guest_versions


def test_the_scheduler_gets_as_many_sequences_as_fit_and_never_less_than_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, some, many = (bounds(free, loaded(), monkeypatch)[0] for free in (4, 9, 30))
    assert few == CONFIG.rollout.groups * CONFIG.rollout.group_size < some < many == CONFIG.rollout.slots


def test_copies_of_the_layers_for_guests_are_held_only_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [bounds(free, loaded(), monkeypatch)[1] for free in (9, 30)] == [0, GUEST_VERSIONS]
    one_less = replace(loaded_memory._loaded_workload(CONFIG, local := loaded()), guest_copies=0)
    copies = loaded_memory._still_to_come(CARD, loaded_memory._loaded_workload(CONFIG, local), local)
    copies -= loaded_memory._still_to_come(CARD, one_less, local)
    assert copies == (GUEST_VERSIONS + 1) * CARD.linear_parameters * 2, "two versions and the base"


def test_an_engine_that_reserved_its_room_keeps_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bounds(4, loaded(reserves_kv=True), monkeypatch)[0] == CONFIG.rollout.slots
