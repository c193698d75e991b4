import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import ModelError
from swarmnode.extensions.vllm import compat
from swarmnode.machine.hardware import GIB, Gpu, cpu_has_bf16, find_card, parse_nvidia_smi, visible_gpus
from swarmnode.machine.memory_plan import Workload, plan_memory
from swarmnode.machine.storage import builtin_folder
from swarmnode.models import (
    BF16_FROM_HIDDEN,
    TINY,
    bf16_pays_on_cpu,
    card_of,
    choose_for_machine,
    choose_model,
    expected_engine,
    find_facts,
    find_model,
    load_cards,
    number_bytes,
    read_facts,
    remember_model,
    resolve_model,
    within_limit,
    workload,
)
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config

CARDS = load_cards(builtin_folder("configs") / "models.toml")
WORK = Workload(rank=16, slots=64, sequence_tokens=1024, micro_batch_tokens=2048)


def test_the_cards_are_ordered_from_large_to_small() -> None:
    assert [card.parameters for card in CARDS] == sorted((card.parameters for card in CARDS), reverse=True)


def test_the_largest_model_that_fits_is_taken() -> None:
    chosen = [choose_model(CARDS, gib * GIB, WORK)[0].name for gib in (10, 12, 24, 80)]
    sizes = [next(c.parameters for c in CARDS if c.name == name) for name in chosen]
    assert sizes == sorted(sizes)
    assert chosen[0] != chosen[-1]


def test_a_chosen_model_needs_no_more_than_there_is() -> None:
    for gib in (10, 16, 24, 48):
        _, plan = choose_model(CARDS, gib * GIB, WORK)
        assert plan.total <= gib * GIB


def test_a_card_that_is_too_small_gets_the_arithmetic_and_a_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        choose_model(CARDS, GIB, WORK)
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
    assert find_card("cpu").gpu is None


def test_the_key_value_cache_is_counted_as_two_tensors_per_layer() -> None:
    card = replace(TINY, layers=3, kv_heads=2, head_dim=5)
    plan = plan_memory(card, Workload(rank=0, slots=7, sequence_tokens=11, micro_batch_tokens=0))
    assert plan.kv_cache == 2 * 3 * 2 * 5 * 7 * 11 * 2


def test_every_card_has_the_parameters_that_its_shapes_give() -> None:
    assert [card.name for card in (TINY, *CARDS) if not card.is_consistent] == []


def test_cards_of_the_driver_are_read_and_unknown_stays_unknown() -> None:
    one, other = parse_nvidia_smi(
        "24564, 23000, 8.9, GPU-1, 580.65.06, NVIDIA RTX 4090\n[N/A], [N/A], 0, GPU-2, [N/A], Odd, card\n"
    )
    assert one.driver == "580.65.06"
    assert (one.name, one.memory_free_bytes, one.capability) == ("NVIDIA RTX 4090", 23000 * 2**20, 8.9)
    assert (other.name, other.memory_free_bytes, other.capability) == ("Odd, card", None, None)


def test_the_card_of_the_tiny_policy_is_that_of_its_files(quick_model: Path) -> None:
    facts = read_facts(quick_model, "tiny")
    assert (facts.card, facts.source) == (TINY, "its files")
    assert find_facts("tiny", ()).card == TINY


def test_a_mixture_of_experts_is_not_taken_for_a_dense_model() -> None:
    config = {
        "num_attention_heads": 2,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 160,
        "vocab_size": 258,
        "head_dim": 32,
    }
    assert card_of("dense", config, 111_000, ()).card is not None
    facts = card_of("moe", config, 400_000, ())
    assert facts.card is None and "do not match" in facts.source


@pytest.mark.parametrize("damage", ["missing", "cut", "huge"])
def test_damaged_weights_are_unknown_and_no_error(tmp_path: Path, quick_model: Path, damage: str) -> None:
    folder = shutil.copytree(quick_model, tmp_path / "copy")
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100] if damage == "cut" else b"\xff" * 100)
    assert read_facts(folder, "mine").card is None


def test_the_engine_that_is_planned_for_is_the_one_that_will_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "missing_reason", lambda device: None)
    config = load_config(environ={}).config
    assert expected_engine(config, gpu=True).name == "vllm"
    assert expected_engine(config, gpu=False).name == "embedded"
    quantized = load_config(environ={}, assignments=["policy.quantization=nf4"]).config
    assert expected_engine(quantized, gpu=True).name == "generate"
    monkeypatch.setattr(compat, "missing_reason", lambda device: "vLLM is not installed")
    assert expected_engine(config, gpu=True).name == "embedded"


def test_a_model_that_is_set_is_taken_as_it_is(tmp_path: Path) -> None:
    config = load_config(environ={}, assignments=["policy.model=./mine"]).config
    cards = builtin_folder("configs") / "models.toml"
    assert resolve_model(config, cards, tmp_path / "none") == ("./mine", "as set")


def test_each_of_several_policies_has_the_sequences_in_flight_that_one_alone_has() -> None:
    alone = load_config(assignments=["rollout.groups=4", "rollout.group_size=8"]).config
    three = load_config(assignments=["rollout.groups=4", "rollout.group_size=8", "node.policies=3"]).config
    assert workload(three, None).slots == 3 * workload(alone, None).slots == 96


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "AB"), ("1", "B"), ("1,0", "BA"), ("GPU-b", "B"), ("", ""), ("-1", ""), ("0,7,1", "A")],
)
def test_the_cards_that_are_hidden_from_the_process_are_not_planned_with(
    visible: str | None, expected: str
) -> None:
    cards = Gpu("A", None, None, uuid="GPU-aa"), Gpu("B", None, None, uuid="GPU-bb")
    assert "".join(gpu.name for gpu in visible_gpus(cards, visible)) == expected


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx512f avx512_bf16", True), ("amx_bf16", True), ("avx2", False)]
)
def test_the_units_of_a_cpu_are_read_from_its_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\nflags\t\t: amx_bf16\n")
    assert cpu_has_bf16(cpuinfo) is expected
    assert not cpu_has_bf16(tmp_path / "nothing")


def test_a_cpu_plans_two_bytes_for_wide_models_where_it_multiplies_them_in_bfloat16() -> None:
    assert bf16_pays_on_cpu(BF16_FROM_HIDDEN) is cpu_has_bf16()
    assert not bf16_pays_on_cpu(TINY.hidden)
    assert number_bytes("auto", None, BF16_FROM_HIDDEN) == (2 if cpu_has_bf16() else 4)
    config = load_config(environ={}).config
    assert workload(config, None, hidden=TINY.hidden).number_bytes == 4
    in_4_bits = config.model_copy(update={"policy": config.policy.model_copy(update={"quantization": "nf4"})})
    assert workload(in_4_bits, None, hidden=4096).number_bytes == 4


def test_a_limit_of_memory_counts_what_we_have_taken_and_never_adds_to_what_is_free() -> None:
    limited = Config.model_validate({"limits": {"memory_gb": 4}})
    assert within_limit(Config(), 9.0) == 9.0
    assert within_limit(limited, 9 * GIB) == 4 * GIB
    assert within_limit(limited, 2 * GIB) == 2 * GIB
    assert within_limit(limited, 9 * GIB, 3 * GIB) == GIB
    assert within_limit(limited, 9 * GIB, 5 * GIB) == 0


def test_a_folder_is_known_by_its_whole_path_as_a_run_is_used_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model("./mine") == find_model("mine") == str(tmp_path / "mine")
