import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import ConfigError
from swarmnode.extensions.pipeline.scheduling.instance import (
    MAX_FILE_BYTES,
    Instance,
    agents,
    least_visits,
    load_instance,
    parse_instance,
)

INSTANCES = Path(__file__).parents[5] / "benchmarks" / "instances"

SMALL = {
    "delays": [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]],
    "comp": [1.0, 2.0, 3.0],
    "memory": 2,
    "path_len": 2,
    "stages": [[0], [1], [2]],
    "waves": 2,
}

SMALL_TOML = """
delays = [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]
comp = [1.0, 2.0, 3.0]
memory = 2
path_len = 2
stages = [[0], [1], [2]]
waves = 2
"""


def small(**changes: object) -> Instance:
    return parse_instance(json.dumps({**SMALL, **changes}).encode())


def test_the_published_instances_load() -> None:
    geo20 = load_instance(INSTANCES / "geo20_skip33.json")
    assert geo20.node_count == 20
    assert geo20.names[1] == "Belgium"
    assert geo20.memory == (3,) * 20
    assert load_instance(INSTANCES / "geo8_skip25.json").stage_of == (3, 2, 0, 1, 1, 3, 2, 0)


def test_toml_says_the_same_as_json() -> None:
    assert parse_instance(SMALL_TOML.encode(), toml=True) == small()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delay": 1}, "delay"),
        ({"delays": [[0.0]]}, "links"),
        ({"delays": [[0.0, -1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]}, "links"),
        ({"comp": [1.0, 0.0, 3.0]}, "forward time"),
        ({"comp": ["1", 2.0, 3.0]}, "comp"),
        ({"memory": [2, 0, 2]}, "memory"),
        ({"memory": [2, 2]}, "memories"),
        ({"stages": [[0], [1], [1, 2]]}, "two stages"),
        ({"stages": [[0], [1], [7]]}, "outside"),
        ({"stages": [[0], [], [2]]}, "without a node"),
        ({"path_len": 4}, "path_length"),
        ({"waves": 0}, "waves"),
        ({"gap_s": -0.1}, "gap"),
        ({"memory": 100_000}, "in flight"),
        ({"averaging": {}}, "averaging"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**changes)


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="forward time"):
        parse_instance(SMALL_TOML.replace("1.0, 2.0, 3.0]\nm", "inf, 2.0, 3.0]\nm").encode(), toml=True)


def test_a_file_is_measured_before_it_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="larger than"):
        load_instance(large)
    with pytest.raises(ConfigError, match="cannot read"):
        load_instance(tmp_path / "absent.json")


def test_every_slot_of_a_data_node_is_an_agent() -> None:
    assert agents(small()) == (0, 0)
    geo20 = load_instance(INSTANCES / "geo20_skip33.json")
    assert len(agents(geo20)) == 15


def test_without_skipping_fewer_agents_fit_and_data_nodes_share_the_loss() -> None:
    full = replace(load_instance(INSTANCES / "geo20_skip33.json"), path_length=6)
    assert agents(full) == (0, 0, 2, 2, 3, 3, 4, 4, 6)


def test_every_stage_needs_an_even_share_unless_its_slots_are_fewer() -> None:
    wide = small(memory=[6, 6, 2])
    assert least_visits(wide, 6) == (6, 3, 2)
