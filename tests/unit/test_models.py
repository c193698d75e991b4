from pathlib import Path

import pytest

from swarmnode.config_layers import load_config
from swarmnode.errors import ModelError
from swarmnode.hardware import GIB, Gpu, parse_nvidia_smi, usable_gpu
from swarmnode.models import (
    ModelCard,
    choose_for_machine,
    choose_model,
    load_cards,
    plan_memory,
    remember_model,
    resolve_model,
)
from swarmnode.paths import builtin_folder

CARDS = load_cards(builtin_folder("configs") / "models.toml")
NEEDS = {"slots": 64, "sequence_tokens": 1024, "micro_batch_tokens": 2048}


def test_the_cards_are_ordered_from_large_to_small() -> None:
    assert [card.parameters for card in CARDS] == sorted((card.parameters for card in CARDS), reverse=True)


def test_the_largest_model_that_fits_is_taken() -> None:
    chosen = [choose_model(CARDS, gib * GIB, **NEEDS)[0].name for gib in (10, 12, 24, 80)]
    sizes = [next(c.parameters for c in CARDS if c.name == name) for name in chosen]
    assert sizes == sorted(sizes)
    assert chosen[0] != chosen[-1]


def test_a_chosen_model_needs_no_more_than_there_is() -> None:
    for gib in (10, 16, 24, 48):
        _, plan = choose_model(CARDS, gib * GIB, **NEEDS)
        assert plan.total <= gib * GIB


def test_a_card_that_is_too_small_gets_the_arithmetic_and_a_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        choose_model(CARDS, GIB, **NEEDS)
    assert "weights" in caught.value.message and "1.0 GiB free" in caught.value.message
    assert "lower rollout.slots" in caught.value.hint


def test_on_a_card_that_is_too_small_auto_is_the_tiny_policy_and_says_why() -> None:
    config = load_config(environ={}).config
    model, reason = choose_for_machine(config, CARDS, Gpu("RTX 3050", 4 * GIB, 3 * GIB))
    assert model == "tiny" and "weights" in reason and "3.0 GiB free" in reason
    assert choose_for_machine(config, CARDS, None)[0] == "tiny"
    assert choose_for_machine(config, CARDS, Gpu("H200", 141 * GIB, 139 * GIB))[0] == CARDS[0].name


def test_auto_stays_with_its_first_choice(tmp_path: Path) -> None:
    config = load_config(environ={}).config
    remember_model(tmp_path / "data" / "model", "owner/name")
    model, reason = resolve_model(
        config, builtin_folder("configs") / "models.toml", tmp_path / "data" / "model"
    )
    assert model == "owner/name" and "first start" in reason


def test_a_machine_told_to_use_its_cpu_has_no_gpu() -> None:
    assert usable_gpu("cpu") is None


def test_the_key_value_cache_is_counted_as_two_tensors_per_layer() -> None:
    card = ModelCard("m", parameters=0, layers=3, hidden=0, kv_heads=2, head_dim=5, vocabulary=0)
    plan = plan_memory(card, slots=7, sequence_tokens=11, micro_batch_tokens=0)
    assert plan.total == plan.kv_cache == 2 * 3 * 2 * 5 * 7 * 11 * 2


def test_cards_of_the_driver_are_read_and_unknown_memory_stays_unknown() -> None:
    one, other = parse_nvidia_smi("NVIDIA RTX 4090, 24564, 23000\nOdd, card, [N/A], [N/A]\n")
    assert (one.name, one.memory_free_bytes) == ("NVIDIA RTX 4090", 23000 * 2**20)
    assert (other.name, other.memory_free_bytes) == ("Odd, card", None)


def test_a_model_that_is_set_is_taken_as_it_is(tmp_path: Path) -> None:
    config = load_config(environ={}, assignments=["policy.model=./mine"]).config
    cards = builtin_folder("configs") / "models.toml"
    assert resolve_model(config, cards, tmp_path / "none") == ("./mine", "as set")
