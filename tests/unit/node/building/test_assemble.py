"""From the node's settings to those of its exchange."""

import pytest

from swarmnode.errors import ConfigError
from swarmnode.exchange.limits import MAX_GROUP_SIZE
from swarmnode.node.building.assemble import exchange_settings
from swarmnode.settings.config_layers import load_config


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
    assert (settings.max_prompt_tokens, settings.max_tokens) == (100, 7)
