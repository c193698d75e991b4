"""How a checkpoint answers where no node runs."""

from pathlib import Path

from swarmnode.extensions.serve.standing_alone import longest_answer
from swarmnode.settings.config_layers import load_settings


def test_answers_are_as_long_as_those_of_the_run_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    def longest(noted: dict[str, object], *assignments: str) -> int:
        settings = load_settings(home=tmp_path, assignments=["policy.model=any", *assignments])
        return longest_answer(settings, noted)

    assert longest({"rollout.max_tokens": 77}) == 77
    assert longest({"rollout.max_tokens": 77}, "rollout.max_tokens=9") == 9
    assert longest({}, "rollout.max_tokens=9") == 9
