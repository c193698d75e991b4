import pytest

from swarmnode.errors import ConfigError
from swarmnode.exchange.exchange_settings import ExchangeSettings


def test_the_defaults_are_sound():
    assert ExchangeSettings().swarm == "commons"


@pytest.mark.parametrize(
    "wrong",
    [
        {"swarm": ""},
        {"swarm": "Commons"},
        {"swarm": "a/b"},
        {"swarm": "x" * 64},
        {"answers_per_group": 1},
        {"answers_per_group": 513},
        {"max_prompt_tokens": 0},
        {"max_completion_tokens": 0},
        {"max_age_versions": -1},
        {"max_age_s": 0.0},
        {"buffer_groups": 0},
        {"prefetch_groups": -1},
        {"fetch_concurrency": 0},
        {"fetch_timeout_s": 0.0},
        {"score_timeout_s": float("nan")},
        {"store_bytes": 1000},
        {"upload_bytes_per_s": 1000.0},
    ],
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, object]):
    with pytest.raises(ConfigError) as caught:
        ExchangeSettings(**wrong)
    assert any(name in caught.value.message for name in wrong)
    assert caught.value.hint
