"""Rollouts of a run, read while they are written and thinned."""

from pathlib import Path

from swarmnode.extensions.page.rollout_reader import MOST_OF_A_ROUND, RolloutReader
from swarmnode.node.showing.monitors import append_line


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    for number in range(1, 5):
        append_line(path, {"round": number, "author": "own", "task": "t"})
    reader = RolloutReader(path)
    assert reader.at()["rounds"] == [1, 2, 3, 4]
    aside = tmp_path / "aside"
    append_line(aside, {"round": 1, "author": "own", "task": "t", "reward": 1.0})
    aside.replace(path)
    found = reader.at()
    assert found["rounds"] == [1] and found["rollouts"][0]["reward"] == 1.0


def test_nothing_kept_and_damaged_lines_are_no_error(tmp_path: Path) -> None:
    assert RolloutReader(None).at(3)["rollouts"] == []
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\xff\n{}\n[1]\n")
    assert RolloutReader(path).at() == {"round": None, "rounds": [], "rollouts": []}


def test_a_round_has_a_bound_and_authors_have_names(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    for _ in range(2 * MOST_OF_A_ROUND):
        append_line(path, {"round": 1, "author": "12D3KooWother", "task": "t"})
    found = RolloutReader(path).at(7)["rollouts"]
    assert len(found) == MOST_OF_A_ROUND and "-" in found[0]["author_name"]
