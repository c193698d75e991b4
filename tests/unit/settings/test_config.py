import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import swarmnode
from swarmnode.cli.app import app
from swarmnode.errors import ConfigError
from swarmnode.machine.storage import builtin_folder
from swarmnode.settings.config import KEYS, Config, explain_setting
from swarmnode.settings.config_layers import advice_for_argument, load_config, presets
from swarmnode.settings.other_names import other_names
from tests.test_docker import module

VARIABLE = re.compile(r'"(SWARMNODE_[A-Z]+(?:_[A-Z]+)*)"')
"""A variable that is no setting: those have two underscores."""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_power_is_a_share_or_in_percent_and_never_more_than_all() -> None:
    for text, share in (("60%", 0.6), ("0.6", 0.6), ("100%", 1.0), ("1", 1.0)):
        assert load_config(assignments=[f"limits.power={text}"], environ={}).config.limits.power == share
    for text in ("60", "101%", "0%", "%", "much%", "nan%"):
        with pytest.raises(ConfigError, match=r"limits\.power"):
            load_config(assignments=[f"limits.power={text}"], environ={})


def test_a_member_of_a_pipeline_has_no_limits_that_others_would_wait_for() -> None:
    with pytest.raises(ConfigError, match="all members would wait"):
        load_config(assignments=["pipeline.name=ours", "limits.hours=22-7"], environ={})
    stage = load_config(assignments=["pipeline.name=ours", "limits.memory_gb=6"], environ={}).config
    assert stage.limits.memory_gb == 6
    assert load_config(assignments=["pipeline.name=ours"], environ={}).config.pipeline.name == "ours"


def test_each_layer_overrides_the_one_before_and_is_remembered(tmp_path: Path) -> None:
    layers = {
        "preset": write(tmp_path / "home.toml", "[rollout]\ngroups = 1\ngroup_size = 3\n"),
        "user_file": write(tmp_path / "config.toml", "[rollout]\ngroups = 2\n[node]\nseed = 2\n"),
        "config_file": write(tmp_path / "mine.toml", "[node]\nseed = 3\nrounds = 3\n"),
    }
    environ = {"SWARMNODE_NODE__ROUNDS": "4", "SWARMNODE_NODE__CHECKPOINT_EVERY": "4", "HOME": "/root"}
    loaded = load_config(
        **layers,
        environ=environ,
        assignments=["node.checkpoint_every=5", "node.eval_every=5"],
        flags={"node.eval_every": 6},
    )
    config = loaded.config
    assert (config.rollout.groups, config.rollout.group_size) == (2, 3)
    assert (config.node.seed, config.node.rounds) == (3, 4)
    assert (config.node.checkpoint_every, config.node.eval_every) == (5, 6)
    assert loaded.origins["rollout.group_size"] == "preset home"
    assert loaded.origins["rollout.groups"] == str(tmp_path / "config.toml")
    assert loaded.origins["node.seed"] == f"--config {tmp_path / 'mine.toml'}"
    assert loaded.origins["node.rounds"] == "SWARMNODE_NODE__ROUNDS"
    assert loaded.origins["node.checkpoint_every"] == "--set"
    assert loaded.origins["node.eval_every"] == "command line"
    assert loaded.origins["policy.model"] == "default"


@pytest.mark.parametrize(
    ("assignment", "closest"),
    [
        ("rollout.group=3", "rollout.groups"),
        ("trainig.learning_rate=3", "training.learning_rate"),
        ("learning_rate=3", "training.learning_rate"),
        ("tasks.name=rev", "tasks.names"),
        ("network.seed=3", "network.seeds"),
        ("training.max_tokens=3", "rollout.max_tokens"),
    ],
)
def test_an_unknown_key_names_the_closest_one(assignment: str, closest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, assignments=[assignment])
    assert "unknown setting" in caught.value.message
    assert repr(closest) in caught.value.hint


@pytest.mark.parametrize("name", ["", "training.", "rollout."])
def test_a_name_that_trl_has_is_answered_with_ours(name: str) -> None:
    (trl,) = other_names()
    for theirs, (ours, _) in trl.settings.items():
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


def test_a_section_of_a_script_may_be_a_dictionary() -> None:
    given = {"training": {"learning_rate": 0.5, "loss": "grpo"}, "node.seed": 3}
    config = load_config(environ={}, flags=given, flags_from="the script").config
    assert (config.training.learning_rate, config.training.loss, config.node.seed) == (0.5, "grpo", 3)
    with pytest.raises(ConfigError, match=r"unknown setting 'training\.lr' \(the script\)"):
        load_config(environ={}, flags={"training": {"lr": 0.5}}, flags_from="the script")


def test_an_unknown_key_far_from_all_points_to_the_list() -> None:
    with pytest.raises(ConfigError, match="config show"):
        load_config(environ={}, assignments=["zzz.qqq=1"])


def test_a_wrong_value_names_the_key_the_value_and_its_origin() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.groups = 'many'.*SWARMNODE_ROLLOUT__GROUPS"):
        load_config(environ={"SWARMNODE_ROLLOUT__GROUPS": "many"})


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        load_config(environ={}, assignments=["exchange.local_groups=0", "exchange.external_groups=0"])


def test_variables_of_ours_that_are_no_settings_stop_nothing() -> None:
    package = Path(swarmnode.__file__).parent
    named = {name for file in package.rglob("*.py") for name in VARIABLE.findall(file.read_text())}
    assert {"SWARMNODE_HOME", "SWARMNODE_SERVE_KEY", "SWARMNODE_WATCH_PASSWORD"} <= named
    assert load_config(environ=dict.fromkeys(named, "correct horse")).config == Config()


def test_a_list_can_be_given_on_the_command_line() -> None:
    loaded = load_config(environ={}, assignments=['tasks.names=["rev", "sort"]'])
    assert loaded.config.tasks.names == ("rev", "sort")


@pytest.mark.parametrize("text", ["[rollout", "seed = 3", "\xff\xfe"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_config(environ={}, config_file=path)


def test_a_missing_config_file_is_an_error_but_a_missing_user_file_is_not(tmp_path: Path) -> None:
    load_config(environ={}, user_file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(environ={}, config_file=tmp_path / "none.toml")


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        Config().node.seed = 3  # type: ignore[misc]


def test_every_preset_loads() -> None:
    found = presets(builtin_folder("configs"))
    assert "tiny" in found
    for path in found.values():
        load_config(environ={}, preset=path)


def test_every_setting_is_explained_in_a_sentence() -> None:
    assert [key for key in KEYS if not explain_setting(key).endswith(".")] == []


def test_every_section_of_the_tree_is_listed() -> None:
    assert {key.partition(".")[0] for key in KEYS} == set(Config.model_fields)


def test_one_value_stands_for_a_list_of_one() -> None:
    loaded = load_config(
        environ={"SWARMNODE_TASKS__NAMES": "sort"},
        assignments=["tasks.reward_weights=2", "limits.programs=7"],
    )
    assert loaded.config.tasks.names == ("sort",)
    assert (loaded.config.tasks.reward_weights, loaded.config.limits.programs) == ((2.0,), ("7",))


def test_a_setting_that_is_a_text_may_look_like_a_number_or_a_date() -> None:
    config = load_config(
        environ={"SWARMNODE_NODE__HTTP_PASSWORD": "1234567890"},
        assignments=[
            "node.run=2024-06-01",
            "swarm.name=2024",
            "tasks.system_prompt=[42]",
            "policy.device='cpu'",
        ],
    ).config
    assert config.node.http_password.get_secret_value() == "1234567890"
    assert (config.node.run, config.swarm.name) == ("2024-06-01", "2024")
    assert (config.tasks.system_prompt, config.policy.device) == ("[42]", "cpu")


def test_a_password_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "config.toml", "[node]\nhttp_password = 1234567890\n")
    with pytest.raises(ConfigError, match=r"node\.http_password = \.\.\.: .*valid string") as caught:
        load_config(environ={}, user_file=file)
    assert "put it in quotes" in caught.value.hint


def test_a_later_layer_replaces_single_entries_of_a_table(tmp_path: Path) -> None:
    judge = load_config(
        user_file=write(tmp_path / "home.toml", "[tasks.judge]\nurl = 'http://j/v1'\nmodel = 'm'\n"),
        config_file=write(tmp_path / "mine.toml", "[tasks.judge]\ntimeout_s = 5.0\n"),
        environ={"SWARMNODE_TASKS__JUDGE__MAX_TOKENS": "7"},
        assignments=["tasks.judge.model=8"],
    ).config.tasks.judge
    assert (judge.url, judge.model, judge.timeout_s, judge.max_tokens) == ("http://j/v1", "8", 5.0, 7)


def test_what_is_wrong_in_a_table_names_its_entry() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.judge\.max_tokens = 0: .*--set"):
        load_config(environ={}, assignments=["tasks.judge={url = 'http://j', max_tokens = 0}"])
    with pytest.raises(ConfigError, match=r"tasks\.judge = 'http://j/v1': it is a table") as caught:
        load_config(environ={}, assignments=["tasks.judge=http://j/v1"])
    assert "tasks.judge.url=" in caught.value.hint
    for assignment in ("tasks.judge.ulr=x", "tasks.judge={ulr = 'x'}"):
        with pytest.raises(ConfigError, match=r"unknown setting 'tasks\.judge\.ulr' \(--set\)") as caught:
            load_config(environ={}, assignments=[assignment])
        assert "'tasks.judge.url'" in caught.value.hint


@pytest.mark.parametrize(
    "assignment",
    [
        "rollout.temperature=inf", "network.listen=::1", "network.listen=me",
        "node.rounds=true", "training.learning_rate=false", "tasks.reward_weights=true",
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_at_once(assignment: str) -> None:
    with pytest.raises(ConfigError, match=assignment.partition("=")[0]):
        load_config(environ={}, assignments=[assignment])


def test_a_variable_without_two_underscores_is_told_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match="SECTION__KEY"):
        load_config(environ={"SWARMNODE_ROLLOUT_GROUPS": "3"})


def test_what_a_wrong_value_is_told_to_type_explains_every_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"SWARMNODE_ROLLOUT__GROUPS": "many"})
    (command,) = re.findall("`swarmnode (.*?)`", caught.value.hint)
    shown = CliRunner().invoke(app, command.split()).output.splitlines()
    assert [line.split()[0] for line in shown] == list(KEYS)
    assert [key for key, line in zip(KEYS, shown, strict=True) if explain_setting(key) not in line] == []


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_learning_rate_that_falls_needs_to_know_until_when(schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"training.schedule = {schedule} needs node.rounds"):
        load_config(environ={}, assignments=[f"training.schedule={schedule}"])
    loaded = load_config(environ={}, assignments=[f"training.schedule={schedule}", "node.rounds=10"])
    assert loaded.config.training.schedule == schedule


@pytest.mark.parametrize("name", ["deepspeed", "delta", "vllm_mode", "repetition_penalty", "top_k"])
def test_what_trl_has_and_we_do_not_is_answered_and_not_guessed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, flags={name: 1})
    assert caught.value.hint.startswith(f"TRL's {name} has no setting here")
    assert "resume" in advice_for_argument("resume_from_checkpoint", ["rounds"])
    assert "node.run" in advice_for_argument("run_name", ["run"])
    assert "monitors=" in advice_for_argument("trackers", ["tools"])


@pytest.mark.parametrize("key", ["node.run", "swarm.name", "pipeline.name"])
def test_a_name_that_is_none_is_refused_in_words(key: str) -> None:
    with pytest.raises(ConfigError, match=r"a name has .*letters, digits") as refused:
        load_config(environ={}, assignments=[f"{key}=a b/c"])
    assert "pattern" not in str(refused.value)


def test_the_page_of_settings_is_what_the_code_says() -> None:
    made = module(Path(__file__).parents[3] / "checks" / "settings_page.py")
    assert made.PAGE.read_text() == made.reference_page(), "make it again: python checks/settings_page.py"
    assert all(f"`{key}`" in made.PAGE.read_text() for key in KEYS)
