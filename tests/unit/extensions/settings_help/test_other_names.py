"""Who brings a name along from elsewhere is told ours."""

import pytest

from swarmnode.errors import ConfigError
from swarmnode.extensions.settings_help.other_names import NAMES_OF_TRL
from swarmnode.settings.config import KEYS
from swarmnode.settings.config_layers import advice_for_argument, load_config


@pytest.mark.parametrize("name", ["", "training.", "rollout."])
def test_a_name_that_trl_has_is_answered_with_ours(name: str) -> None:
    for theirs, (ours, _) in NAMES_OF_TRL.items():
        assert ours in KEYS
        if f"{name}{theirs}" not in KEYS:
            with pytest.raises(ConfigError) as caught:
                load_config(environ={}, assignments=[f"{name}{theirs}=1"])
            assert repr(ours) in caught.value.hint, theirs


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("lora_dropout", "the adapter has none"),
        ("weight_decay", "training.kl_coef"),
        ("log_completions", "rollouts.jsonl"),
        ("output_dir", "swarmnode export"),
        ("logging_steps", "every round is logged"),
    ],
)
def test_what_trl_has_and_we_have_not_is_told_and_nothing_else_is_guessed(theirs: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, assignments=[f"{theirs}=1"])
    assert told in caught.value.hint and "Did you mean" not in caught.value.hint


@pytest.mark.parametrize(
    ("former", "told"),
    [
        ("training.clip_low", "its own clip"),
        ("policy.threads", "OMP_NUM_THREADS"),
        ("rollout.max_lag", 'rollout.mode="sync"'),
        ("limits.battery", "limits.give_way"),
    ],
)
def test_a_setting_that_there_was_is_answered_with_what_stands_in_its_place(former: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, assignments=[f"{former}=1"])
    assert told in caught.value.hint and "Did you mean" not in caught.value.hint
    assert former not in KEYS


@pytest.mark.parametrize("name", ["deepspeed", "delta", "vllm_mode", "repetition_penalty", "top_k"])
def test_what_trl_has_and_we_do_not_is_answered_and_not_guessed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, flags={name: 1})
    assert caught.value.hint.startswith(f"TRL's {name} has no setting here")
    assert "resume" in advice_for_argument("resume_from_checkpoint", ["rounds"])
    assert "node.run" in advice_for_argument("run_name", ["run"])
    assert "monitors=" in advice_for_argument("trackers", ["tools"])
