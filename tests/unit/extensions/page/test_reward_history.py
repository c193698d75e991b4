"""Curves of a run, read from the file that every node writes while it is being written."""

from pathlib import Path

import msgspec
import pytest

from swarmnode.extensions.page import reward_history as module
from swarmnode.extensions.page.reward_history import RewardHistory
from swarmnode.node.showing.monitors import append_line


def written(folder: Path, round: int, own: float | None = 0.5, event: str = "round", **more: float) -> None:
    values = {"progress.round": round, **({} if own is None else {"reward.own": own}), **more}
    append_line(folder / "metrics.jsonl", {"event": event, "peer": "me", "run": "r", **values})


def read(folder: Path) -> RewardHistory:
    history = RewardHistory(folder, "r", "me")
    history.read()
    return history


def test_what_is_unknown_is_none_and_what_is_new_is_read_later(tmp_path: Path) -> None:
    history = read(tmp_path)
    assert history.curves()["rounds"] == []
    written(tmp_path, 1, None)
    written(tmp_path, 1, event="evaluation", **{"reward.eval_last": 0.2, "reward.eval_tasks.rev": 0.1})
    history.read()
    assert (history.curves()["own"], history.curves()["held_out"]) == ([None], [0.2])
    assert history.curves()["held_out_tasks"] == {"rev": [0.1]}
    written(tmp_path, 2, 0.7)
    history.read()
    assert history.curves()["own"] == [None, 0.7]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    written(tmp_path, 1)
    path = tmp_path / "metrics.jsonl"
    line = path.read_bytes()
    path.write_bytes(line[:20])
    history = read(tmp_path)
    assert history.rounds == []
    with path.open("ab") as file:
        file.write(line[20:])
    history.read()
    assert [one.round for one in history.rounds] == [1]


def test_damaged_lines_and_those_of_others_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a\xff\n[]\n{"progress.round": "x"}\n\x00\n')
    line = {"event": "round", "peer": "other", "run": "r", "progress.round": 1}
    append_line(tmp_path / "metrics.jsonl", line)
    written(tmp_path, 2)
    assert [one.round for one in read(tmp_path).rounds] == [2]


def test_rounds_that_a_crash_undid_are_replaced_when_they_come_again(tmp_path: Path) -> None:
    for number, own in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.8)):
        written(tmp_path, number, own)
    assert read(tmp_path).curves()["own"] == [0.1, 0.8]


def test_a_file_that_was_put_aside_is_still_part_of_the_curve(tmp_path: Path) -> None:
    for number in (1, 2):
        written(tmp_path, number)
    history = read(tmp_path)
    written(tmp_path, 3)
    (tmp_path / "metrics.jsonl").replace(tmp_path / "metrics.1.jsonl")
    written(tmp_path, 4)
    history.read()
    assert [one.round for one in history.rounds] == [1, 2, 3, 4]
    assert [one.round for one in read(tmp_path).rounds] == [1, 2, 3, 4]


def test_long_runs_have_bounded_curves_that_reach_back_to_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROUNDS", 200)
    monkeypatch.setattr(module, "MOST_POINTS", 50)
    for number in range(1, 501):
        written(tmp_path, number, number / 500)
    history = read(tmp_path)
    assert len(history.curves()["rounds"]) <= 50 and history.rounds[0].round == 1
    assert history.curves()["rounds"][-1] == 500
    assert msgspec.json.encode(history.curves())
