"""From the node's settings to the exchange's, and to what reads prompts."""

import re
from pathlib import Path

import pytest

from swarmnode.chat import chat_text
from swarmnode.errors import ConfigError
from swarmnode.exchange.limits import MAX_GROUP_SIZE
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.assemble import exchange_settings, load_policy, renderer_of
from swarmnode.settings.config_layers import load_config
from tests.unit.rollout.test_renderer import byte_tokenizer


@pytest.mark.parametrize(("group_size", "largest"), [(8, 16), (2, 4), (512, 512)])
def test_of_a_peers_group_we_train_on_as_much_as_of_two_of_ours(group_size: int, largest: int) -> None:
    config = load_config(environ={}, assignments=[f"rollout.group_size={group_size}"]).config
    assert exchange_settings(config, 100).answers_per_group == largest


def test_a_group_of_ours_may_be_as_wide_as_one_may_travel() -> None:
    widest = [f"rollout.group_size={MAX_GROUP_SIZE}"]
    assert load_config(environ={}, assignments=widest).config.rollout.group_size == MAX_GROUP_SIZE
    with pytest.raises(ConfigError):
        load_config(environ={}, assignments=[f"rollout.group_size={MAX_GROUP_SIZE + 1}"])


def test_the_book_of_own_successes_has_nothing_fetched_ahead() -> None:
    config = load_config(environ={}, assignments=["exchange.rule=own_book"]).config
    assert exchange_settings(config, 100).prefetch_groups == 0


def test_a_peers_sequences_are_no_longer_than_ours() -> None:
    settings = exchange_settings(load_config(environ={}, assignments=["rollout.max_tokens=7"]).config, 100)
    assert (settings.max_prompt_tokens, settings.max_completion_tokens) == (100, 7)


def test_the_settings_say_how_a_policy_reads_prompts() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if loud }}"
    said = ["policy.chat_template={loud=true}", "policy.raw_prompts=true"]
    config = load_config(environ={}, assignments=said).config.policy
    renderer = renderer_of(config, byte_tokenizer(template), (256,))
    asked = chat_text([{"role": "system", "content": "Add: "}, {"role": "user", "content": "2+2"}])
    assert renderer.decode(renderer.prompt_ids("2+2")) == "2+2"
    assert renderer.decode(renderer.prompt_ids(asked)) == "Add: 2+2!"


def test_nodes_and_members_of_a_pipeline_read_prompts_by_the_same_settings() -> None:
    package = Path(__file__).parents[4] / "swarmnode"
    making = re.compile(r"(?<!>>> renderer = )\bRenderer\(")
    made = [path.name for path in package.rglob("*.py") if making.search(path.read_text())]
    assert made == ["assemble.py"], "renderer_of knows what they are"


@pytest.mark.parametrize("setting", ["training.loss", "exchange.rule"])
def test_what_cannot_be_imported_is_refused_before_a_model_is_made(setting: str, tmp_path: Path) -> None:
    config = load_config(assignments=[f"{setting}=no_such_module:mine"]).config
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        load_policy(config, "tiny", resolve_paths(tmp_path), lambda *_: None)
    assert not list(tmp_path.rglob("*.safetensors"))
