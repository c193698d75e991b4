"""Which run a start belongs to, decided from what lies on the disk."""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from swarmnode.errors import CheckpointError
from swarmnode.training.checkpoints.run_folders import (
    TrainingRun,
    choose_run,
    is_trained,
    label_of,
    newest_run,
    only_model,
    runs_in,
    trained_model,
)
from swarmnode.training.records import FORMAT, STATE, Counters, Measure, State

LAST = {"last": "v1"}
OLD = "model-base"
"""The folder that earlier versions had for the only run of a base."""


def run(
    name: str, tasks: dict[str, str], *, base: str = "base", measured: tuple[str, ...] = ()
) -> TrainingRun:
    state = State(
        format=FORMAT,
        base_model="/models/model",
        base_fingerprint=base,
        policy_version=7,
        seed=0,
        counters=Counters(round=7),
        reward=None,
        measure=Measure(measured),
        tasks=tasks,
        digests={},
    )
    return TrainingRun(Path(name), state, 0.0)


def chosen(known: list[TrainingRun], tasks: dict[str, str], named: str = "") -> str:
    return choose_run(known, "base", tasks, named=named, old_name=OLD).name


def test_the_first_run_is_called_after_its_tasks() -> None:
    assert chosen([], LAST) == "last"
    assert chosen([], {"sort": "1", "rev": "1"}) == "rev-sort"
    assert chosen([], dict.fromkeys("abcdefgh", "1")) == "8-tasks"


def test_the_name_of_any_task_makes_a_folder() -> None:
    assert label_of(["../../etc"]) == "etc"
    assert label_of(["reasoning-gym:chain_sum"]) == "reasoning-gym-chain_sum"
    assert label_of(["*"]) == "run"
    assert len(label_of(["x" * 500])) == 40


def test_the_same_tasks_go_on_with_their_run() -> None:
    choice = choose_run([run("sort", {"sort": "1"}), run("last", LAST)], "base", LAST)
    assert (choice.name, choice.reason) == ("last", "")


def test_another_task_gets_a_run_beside_which_says_how_to_go_on_with_the_other() -> None:
    choice = choose_run([run("8-tasks", dict.fromkeys("abcdefgh", "1"))], "base", LAST)
    assert choice.name == "last"
    for said in ("starts from the base policy", "the tasks were a, b", "--run 8-tasks", "`swarmnode runs`"):
        assert said in choice.reason


def test_an_edited_reward_gets_a_run_beside_and_is_named_as_the_cause() -> None:
    choice = choose_run([run("last", LAST), run("sort", {"sort": "1"})], "base", {"last": "v2"})
    assert choice.name == "last-2"
    assert "the examples or the reward of last changed" in choice.reason
    assert "run last is kept at round 7" in choice.reason


def test_who_takes_the_edit_back_goes_on_where_it_was() -> None:
    known = [run("last-2", {"last": "v2"}), run("last", LAST)]
    assert chosen(known, LAST) == "last"
    assert chosen(known, {"last": "v2"}) == "last-2"
    assert chosen(known, {"last": "v3"}) == "last-3"


def test_another_model_gets_a_run_beside() -> None:
    choice = choose_run([run("last", LAST, base="other")], "base", LAST)
    assert choice.name == "last-2" and "of another model" in choice.reason


def test_a_run_that_a_person_named_is_left_alone_until_it_is_named_again() -> None:
    known = [run("mine", LAST)]
    assert chosen(known, LAST) == "last"
    assert "named explicitly" in choose_run(known, "base", LAST).reason
    assert chosen(known, LAST, named="mine") == "mine"
    assert chosen(known, {"sort": "1"}, named="mine") == "mine"
    assert chosen(known, LAST, named="new") == "new"


def test_a_named_run_of_another_model_is_refused() -> None:
    known = [run("mine", LAST, base="other")]
    for choose in (
        lambda: choose_run(known, "base", LAST, named="mine"),
        lambda: newest_run(known, "base", named="mine"),
    ):
        with pytest.raises(CheckpointError, match="to another model: /models/model"):
            choose()


def test_a_run_that_was_put_aside_is_not_gone_on_with() -> None:
    aside = run("last.20261123-101500", LAST)
    assert chosen([aside], LAST) == "last"
    assert newest_run([aside], "base") is None
    assert chosen([aside], LAST, named=aside.name) == aside.name


def test_checkpoints_of_before_there_were_runs_are_of_the_tasks_they_were_measured_on() -> None:
    noted, unknown = run(OLD, {}, measured=("last",)), run(OLD, {})
    assert chosen([noted], LAST) == OLD
    assert chosen([noted], {"sort": "1"}) == "sort"
    assert chosen([unknown], LAST) == OLD, "nobody can say, so it goes on as it did"


def test_a_run_that_cannot_be_read_is_chosen_only_where_no_other_is() -> None:
    broken = TrainingRun(Path(OLD), None, 0.0)
    assert chosen([broken], LAST) == OLD, "its reader says what is wrong"
    assert chosen([broken, run("last", LAST)], LAST) == "last"


def test_an_evaluation_is_of_the_run_that_was_written_to_last() -> None:
    known = [run("foreign", LAST, base="other"), run("sort", {"sort": "1"}), run("last", LAST)]
    assert newest_run(known, "base") == "sort"
    assert newest_run(known, "base", named="last") == "last"
    assert newest_run([], "base") is None


def test_whether_there_is_anything_to_measure_is_known_before_a_model_is_loaded() -> None:
    known = [run("last", LAST)]
    assert is_trained(known, "/elsewhere/model")
    assert not is_trained(known, "other") and not is_trained([], "model")
    with pytest.raises(CheckpointError, match="no run gone") as caught:
        is_trained(known, "model", named="gone")
    assert "last" in caught.value.hint


def write(root: Path, name: str, round: int, at: float) -> None:
    folder = root / name / f"round-{round:08d}"
    folder.mkdir(parents=True)
    state = run(name, LAST).state
    assert state is not None
    (folder / STATE).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(state, counters=Counters(round=round)))
    )
    os.utime(folder / STATE, (at, at))


def test_runs_are_listed_newest_first_by_their_newest_readable_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "old", 3, at=1000.0)
    write(tmp_path, "new", 1, at=2000.0)
    write(tmp_path, "new", 2, at=3000.0)
    (tmp_path / "new" / "round-00000002" / STATE).write_text("rubbish")
    (tmp_path / "broken" / "round-00000009").mkdir(parents=True)
    (tmp_path / "pipeline-f" / "step-00000001").mkdir(parents=True)
    (tmp_path / ".going" / "round-00000001").mkdir(parents=True)
    found = {one.name: one for one in runs_in(tmp_path)}
    assert set(found) == {"new", "old", "broken"}
    assert [name for name in found if name != "broken"] == ["new", "old"]
    assert found["new"].state is not None and found["new"].state.counters.round == 1
    assert found["broken"].state is None


def test_the_only_model_is_that_of_all_runs_but_of_those_put_aside() -> None:
    mine, theirs = run("last", LAST), run("rev", {"rev": "1"})
    assert theirs.state is not None
    other = replace(theirs, state=msgspec.structs.replace(theirs.state, base_model="/models/other"))
    assert only_model([]) is None
    assert only_model([mine, theirs]) == "/models/model"
    assert only_model([mine, other]) is None
    aside = replace(other, folder=Path("rev.20260101-000000"))
    assert aside.put_aside and only_model([mine, aside]) == "/models/model"
    tiny = msgspec.structs.replace(theirs.state, base_model="/cache/models/tiny-e0f9931f736b")
    assert only_model([replace(theirs, state=tiny)]) == "tiny", "by its name it brings its preset"


def test_a_command_or_script_without_a_model_takes_that_of_the_runs() -> None:
    mine, other = run("last", LAST), run("sort", {"sort": "1"})
    assert trained_model([mine, other], "tiny") == "/models/model"
    assert trained_model([], "tiny") == "tiny"
    assert trained_model([mine], "model") == "model"
    assert mine.state is not None
    theirs = TrainingRun(Path("own"), msgspec.structs.replace(mine.state, base_model="/models/theirs"), 0.0)
    assert trained_model([mine, theirs], "tiny") == "tiny", "nobody knows which"
    assert trained_model([mine, theirs], "tiny", named="own") == "/models/theirs"
