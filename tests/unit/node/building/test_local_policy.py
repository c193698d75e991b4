"""A policy is loaded as the settings say, and reads prompts as they say."""

import re
from pathlib import Path

import pytest

from swarmnode.chat import prompt_of
from swarmnode.errors import ConfigError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.local_policy import load_policy, renderer_of
from swarmnode.settings.config_layers import load_config
from tests.unit.rollout.test_renderer import byte_tokenizer


def test_the_settings_say_how_a_policy_reads_prompts() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if loud }}"
    said = ["policy.chat_template={loud=true}", "policy.raw_prompts=true"]
    config = load_config(environ={}, assignments=said).config.policy
    renderer = renderer_of(config, byte_tokenizer(template), (256,))
    asked = prompt_of([{"role": "system", "content": "Add: "}, {"role": "user", "content": "2+2"}])
    assert renderer.decode(renderer.prompt_ids("2+2")) == "2+2"
    assert renderer.decode(renderer.prompt_ids(asked)) == "Add: 2+2!"


def test_nodes_and_members_of_a_pipeline_read_prompts_by_the_same_settings() -> None:
    package = Path(__file__).parents[4] / "swarmnode"
    making = re.compile(r"(?<!>>> renderer = )\bRenderer\(")
    made = [path.name for path in package.rglob("*.py") if making.search(path.read_text())]
    assert made == ["local_policy.py"], "renderer_of knows what they are"


@pytest.mark.parametrize("setting", ["training.loss", "exchange.rule"])
def test_what_cannot_be_imported_is_refused_before_a_model_is_made(setting: str, tmp_path: Path) -> None:
    config = load_config(assignments=[f"{setting}=no_such_module:mine"]).config
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        load_policy(config, "tiny", resolve_paths(tmp_path), lambda *_: None)
    assert not list(tmp_path.rglob("*.safetensors"))
