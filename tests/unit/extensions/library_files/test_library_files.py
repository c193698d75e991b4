"""A library as a file: each row verified by itself, for whoever has it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import JudgementLost, JudgementOverran, StorageError
from swarmnode.exchange.gossip.announcing import ModelLabel, compose
from swarmnode.exchange.library.signed_group import (
    MAX_LINE_BYTES,
    line_of,
    signed_group,
)
from swarmnode.extensions.library_files.library_files import (
    Judging,
    add_verified,
    copy_verified,
    look_through,
)
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import resolve_paths
from tests.unit.exchange.conftest import Addition
from tests.unit.exchange.library.test_signed_group import signed


def test_a_damaged_row_is_named_by_its_line_and_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    long = b"x" * (3 * MAX_LINE_BYTES) + b"\n"
    file.write_bytes(line_of(signed(0)) + long + b"\n" + b"nothing\n" + line_of(signed(1)).rstrip(b"\n"))
    report = look_through(file)
    assert report.rows == 2 and report.damaged_rows == 2
    assert [told.partition(":")[0] for told in report.damaged] == ["line 2", "line 4"]


def test_with_the_task_the_answers_are_judged(tmp_path: Path) -> None:
    file, task = tmp_path / "some.jsonl", Addition()
    file.write_bytes(line_of(signed(0)) + line_of(signed(1)))
    report = look_through(file, judging=Judging({task.name: task}))
    assert report.right == {("addition", "1"): 4} and report.answers == 8


@pytest.mark.parametrize(
    ("lost", "reason"), [(JudgementOverran, "score_timeout"), (JudgementLost, "unscorable")]
)
def test_a_row_that_cannot_be_judged_is_counted_and_costs_no_other(
    tmp_path: Path, lost: type[Exception], reason: str
) -> None:
    class Hanging(Addition):
        judged = 0

        def score(self, example: Any, completions: Any) -> Any:
            Hanging.judged += 1
            if Hanging.judged == 1:
                raise lost("it took too long")
            return super().score(example, completions)

    file = tmp_path / "some.jsonl"
    file.write_bytes(line_of(signed(0)) + line_of(signed(1)))
    report = look_through(file, judging=Judging({"addition": Hanging()}))
    assert report.refused == {reason: 1} and report.right == {("addition", "1"): 2}


def test_a_copy_has_each_sound_row_once(tmp_path: Path) -> None:
    file, copy = tmp_path / "some.jsonl", tmp_path / "copy.jsonl"
    file.write_bytes(line_of(signed(0)) + b"?\n" + line_of(signed(0)) + line_of(signed(1)))
    assert copy_verified(file, copy).damaged_rows == 1
    assert copy.read_bytes() == line_of(signed(0)) + line_of(signed(1))


def test_an_import_takes_what_is_new_and_says_why_not_the_rest(tmp_path: Path) -> None:
    file, home = tmp_path / "some.jsonl", tmp_path / "library.jsonl"
    home.write_bytes(line_of(signed(0)))
    file.write_bytes(line_of(signed(0)) + line_of(signed(1)) + b"?\n" + line_of(signed(2)))
    report = add_verified(file, home)
    assert (report.taken, report.known, report.damaged_rows) == (2, 1, 1)
    assert look_through(home).rows == 3


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["library", *words])


def test_the_commands_show_export_and_import(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "some.jsonl"
    file.write_bytes(line_of(signed(0)) + b"?\n" + line_of(signed(1)))
    taken = run("import", str(file), "--home", str(home))
    assert taken.exit_code == 0 and "imported 2 of 3 groups" in taken.output
    assert "line 2: malformed" in taken.stderr
    out = tmp_path / "out.jsonl"
    assert "wrote 2 groups of 1 authors" in run("export", str(out), "--home", str(home)).output
    assert out.read_bytes() == resolve_paths(home).library.read_bytes()
    shown = run("show", "--home", str(home)).output
    assert "2 groups, 8 answers" in shown and "addition 1: 2 groups" in shown
    told = json.loads(run("show", str(out), "--json").output)
    assert told["groups"] == 2 and told["tasks"][0]["right"] is None


def test_an_export_replaces_no_file_and_an_import_of_nothing_sound_fails(tmp_path: Path) -> None:
    home, file, out = tmp_path / "home", tmp_path / "some.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(line_of(signed(0)))
    run("import", str(file), "--home", str(home))
    out.write_text("mine")
    refused = run("export", str(out), "--home", str(home)).exception
    assert isinstance(refused, StorageError) and "exists already" in str(refused)
    assert out.read_text() == "mine"
    before = resolve_paths(home).library.read_bytes()
    refused = run("import", str(out), "--home", str(home))
    assert isinstance(refused.exception, StorageError) and "line 1: malformed" in refused.stderr
    assert resolve_paths(home).library.read_bytes() == before


def test_show_judges_with_a_task(tmp_path: Path) -> None:
    from swarmnode.tasks.builtin import BUILTIN_TASKS
    from swarmnode.tasks.task import draw_train, score_strictly
    from swarmnode.types import Completion, RolloutGroup, one_span

    task, key = BUILTIN_TASKS[0], NodeKey(b"\3" * 32)
    example = next(iter(draw_train(task, 0)))
    texts = [str(example.columns["answer"]), "nothing"]
    completions = tuple(Completion(text, (1,), None, one_span(1, 1), "stop") for text in texts)
    group = RolloutGroup(example, completions, score_strictly(task, example, texts), key.peer_id, 1)
    sent = compose(group, key, swarm="elsewhere", model=ModelLabel("tiny", None), now=1.0)
    file = tmp_path / "some.jsonl"
    file.write_bytes(line_of(signed_group(sent.sealed, sent.body)))
    shown = run("show", str(file), "--task", task.name, "--home", str(tmp_path / "home"))
    assert shown.exit_code == 0 and "1 answers with a reward above 0" in shown.output


def test_a_library_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    assert isinstance(run("show", "--home", str(tmp_path)).exception, StorageError)
