import pytest

from swarmnode.config import load_config
from swarmnode.errors import ModelError
from swarmnode.hardware import GIB, parse_nvidia_smi
from swarmnode.models import ModelCard, choose_model, load_cards, plan_memory
from swarmnode.paths import builtin_folder

CARDS = load_cards(builtin_folder("configs") / "models.toml")
NEEDS = {"slots": 64, "sequence_tokens": 1024, "micro_batch_tokens": 2048}


def test_the_cards_are_ordered_from_large_to_small() -> None:
    assert [card.parameters for card in CARDS] == sorted((card.parameters for card in CARDS), reverse=True)


def test_the_largest_model_that_fits_is_taken() -> None:
    chosen = [choose_model(CARDS, gib * GIB, **NEEDS)[0].name for gib in (8, 12, 24, 80)]
    sizes = [next(c.parameters for c in CARDS if c.name == name) for name in chosen]
    assert sizes == sorted(sizes)
    assert chosen[0] != chosen[-1]


def test_a_chosen_model_needs_no_more_than_there_is() -> None:
    for gib in (8, 16, 24, 48):
        _, plan = choose_model(CARDS, gib * GIB, **NEEDS)
        assert plan.total <= gib * GIB


def test_a_card_that_is_too_small_gets_the_arithmetic_and_a_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        choose_model(CARDS, GIB, **NEEDS)
    assert "weights" in caught.value.message and "1.0 GiB free" in caught.value.message
    assert "--model tiny" in caught.value.hint


def test_the_key_value_cache_is_counted_as_two_tensors_per_layer() -> None:
    card = ModelCard("m", parameters=0, layers=3, hidden=0, kv_heads=2, head_dim=5, vocabulary=0)
    plan = plan_memory(card, slots=7, sequence_tokens=11, micro_batch_tokens=0)
    assert plan.total == plan.kv_cache == 2 * 3 * 2 * 5 * 7 * 11 * 2


def test_cards_of_the_driver_are_read_and_unknown_memory_stays_unknown() -> None:
    one, other = parse_nvidia_smi("NVIDIA RTX 4090, 24564, 23000\nOdd, card, [N/A], [N/A]\n")
    assert (one.name, one.memory_free_bytes) == ("NVIDIA RTX 4090", 23000 * 2**20)
    assert (other.name, other.memory_free_bytes) == ("Odd, card", None)


def test_a_model_that_is_set_is_taken_as_it_is() -> None:
    from swarmnode.models import resolve_model

    config = load_config(environ={}, assignments=["policy.model=./mine"]).config
    assert resolve_model(config, builtin_folder("configs") / "models.toml") == ("./mine", "as set")
