"""A run is of its task: whatever is changed between two starts in one home, nothing is mixed, nothing is lost
without a word, and the rewards that a start returns are of the tasks it was given."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import swarmnode as sn
from swarmnode.cli.app import app
from swarmnode.errors import CheckpointError, ConfigError, IdentityInUse
from swarmnode.identity.key_file import load_or_create
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import IdentityLock
from swarmnode.training.checkpoints.run_folders import runs_in
from swarmnode.training.records import STATE
from tests.joined_node import JoinedNode
from tests.warm_start import WarmStart

SMALL = {
    "exchange.enabled": False,
    "rollout.groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 8,
    "rollout.overlap": "off",
    "node.eval_every": 0,
    "tasks.eval_examples": 2,
}
ROWS = [(f"{a}+{b}=", str(a + b)) for a in range(9) for b in range(9)]
TASK = """
def examples(seed):
    for number in range(40):
        yield f"letter {(seed + number) % 26}=", "a"

def reward(completions, **columns):
    return [REWARD for _ in completions]
"""


def positive(completions: list[str], **columns: object) -> list[float]:
    return [1.0 + len(text) for text in completions]


def negative(completions: list[str], **columns: object) -> list[float]:
    return [-1.0 - len(text) for text in completions]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def options(quick_model: Path, home: Path) -> dict[str, Any]:
    return {"model": quick_model, "home": home, "settings": SMALL}


def adapters(home: Path) -> dict[str, bytes]:
    files = resolve_paths(home).checkpoints.rglob("adapter_model.safetensors")
    return {f"{file.parts[-4]}/{file.parts[-3]}": file.read_bytes() for file in files}


def said(home: Path, what: str) -> list[str]:
    """Lines of the log of all starts."""
    return [line for line in (resolve_paths(home).logs / "node.log").read_text().splitlines() if what in line]


def cli(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_script_with_another_reward_trains_on_it_and_returns_it(
    options: dict[str, Any], home: Path
) -> None:
    first = sn.run(ROWS, positive, rounds=2, **options)
    before = adapters(home)
    rounds: list[int] = []
    second = sn.run(
        ROWS, negative, rounds=2, on_round=lambda seen: rounds.append(seen.progress.round), **options
    )
    assert rounds == [1, 2]
    assert first.reward_first is not None and first.reward_first >= 1.0
    for reward in (second.reward_first, second.reward_last):
        assert reward is not None and reward <= -1.0, "the second reward is never positive"
    assert (first.run, second.run) == ("rows", "rows-2")
    assert len(said(home, "the examples or the reward of rows changed; run rows is kept at round 2")) == 1
    kept = {name: data for name, data in adapters(home).items() if name.startswith("rows/")}
    assert kept == before, "the earlier run is as it was"


def test_what_is_done_is_not_done_again_and_that_is_said(options: dict[str, Any], home: Path) -> None:
    first = sn.run(ROWS, positive, rounds=2, **options)
    assert first.stopped == "2 rounds are done"
    before = adapters(home)
    again = sn.run(ROWS, positive, rounds=2, **options)
    assert again.stopped.startswith("nothing to do: 2 of 2 rounds are done")
    assert "--rounds" in again.stopped and "fresh=True" in again.stopped
    assert said(home, "nothing to do: 2 of 2 rounds are done")
    assert (again.rounds, again.reward_last, adapters(home)) == (2, first.reward_last, before)

    more = sn.run(ROWS, positive, rounds=3, **options)
    assert (more.rounds, more.stopped, more.run) == (3, "3 rounds are done", "rows")


def test_a_task_file_that_is_edited_begins_anew_and_one_that_is_edited_back_goes_on(
    options: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "last.py"
    file.write_text(TASK.replace("REWARD", "1.0"))
    assert sn.run(file, rounds=2, **options).reward_last == 1.0
    file.write_text(TASK.replace("REWARD", "-3.0"))
    edited = sn.run(file, rounds=1, **options)
    assert (edited.run, edited.rounds, edited.reward_first, edited.reward_last) == ("last-2", 1, -3.0, -3.0)
    assert said(home, "the examples or the reward of last changed")
    file.write_text(TASK.replace("REWARD", "1.0"))
    back = sn.run(file, rounds=3, **options)
    assert (back.run, back.rounds, back.reward_first, back.reward_last) == ("last", 3, 1.0, 1.0)
    assert said(home, "resumed after round 2, policy version")


def test_the_order_of_the_readme_trains_the_second_task_for_all_of_its_rounds(
    home: Path, quick_model: Path, tmp_path: Path, warm: WarmStart
) -> None:
    file = tmp_path / "last.py"
    file.write_text(TASK.replace("REWARD", "0.25"))
    flags = ["--model", str(quick_model), "--preset", "tiny", "--set", "tasks.eval_examples=2"]
    flags += ["--set", "exchange.enabled=false"]
    joined = JoinedNode(home, *flags, "--rounds", "5", warm=warm)
    try:
        assert joined.summary()["run"] == "8-tasks"
        joined = JoinedNode(home, *flags, "--task", str(file), "--rounds", "4", warm=warm)
        last = joined.summary()
        assert len(joined.rounds()) == 5 + 4
        assert [line["run"] for line in joined.rounds()] == ["8-tasks"] * 5 + ["last"] * 4
    finally:
        joined.end()
    assert (last["run"], last["rounds"], last["stopped"]) == ("last", 4, "4 rounds are done")
    assert last["reward_first"] == last["reward_last"] == 0.25, "both are of last.py"
    assert "resumed" not in joined.story
    assert re.search(r"the tasks were bin, .* and are last now; run 8-tasks is kept at round 5", joined.story)


def test_a_run_that_is_named_goes_on_with_other_tasks_knowingly(options: dict[str, Any], home: Path) -> None:
    first = sn.run(ROWS, positive, rounds=2, run="mine", **options)
    assert first.run == "mine"
    second = sn.run(ROWS, negative, rounds=3, run="mine", **options)
    assert (second.run, second.rounds) == ("mine", 3), "its rounds are counted on"
    for reward in (second.reward_first, second.reward_last):
        assert reward is not None and reward <= -1.0, "measured anew"
    (line,) = said(home, "run mine continues, but the examples or the reward of rows changed")
    assert re.search(r"\d+ answers in its book and \d+ unfinished groups are dropped", line)
    assert [run.name for run in runs_in(resolve_paths(home).checkpoints)] == ["mine"]

    plain = sn.run(ROWS, negative, rounds=1, **options)
    assert (plain.run, plain.rounds) == ("rows", 1), "who does not name it leaves it alone"
    third = sn.run(ROWS, negative, rounds=4, run="mine", **options)
    assert (third.rounds, third.reward_first) == (4, second.reward_first)
    assert len(said(home, "run mine continues, but")) == 1, "it is of these tasks now"


def test_a_run_that_is_named_and_done_returns_no_reward_for_other_tasks(options: dict[str, Any]) -> None:
    sn.run(ROWS, positive, rounds=2, run="mine", **options)
    with pytest.raises(ConfigError, match=r"2 of 2 rounds are done.* the reward of rows changed"):
        sn.run(ROWS, negative, rounds=2, run="mine", **options)


def test_another_model_gets_a_run_of_its_own(options: dict[str, Any], home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(options["model"], other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: tensor + 0.25 for name, tensor in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    first = sn.run(ROWS, positive, rounds=2, **options)
    second = sn.run(ROWS, positive, rounds=1, **{**options, "model": other})
    assert (first.run, second.run, second.rounds) == ("rows", "rows-2", 1)
    assert said(home, "run rows, of another model, is kept at round 2")
    with pytest.raises(CheckpointError, match="run rows belongs to another model"):
        sn.run(ROWS, positive, rounds=1, run="rows", **{**options, "model": other})
    assert sn.run(ROWS, positive, rounds=3, **options).rounds == 3


def test_another_rank_is_refused_and_both_ways_out_are_named(options: dict[str, Any], home: Path) -> None:
    sn.run(ROWS, positive, rounds=1, **options)
    before = adapters(home)
    wider = {**options, "settings": {**SMALL, "policy.lora_rank": 2}}
    with pytest.raises(CheckpointError, match="another rank") as caught:
        sn.run(ROWS, positive, rounds=2, **wider)
    assert "--run NAME" in caught.value.hint and "--fresh" in caught.value.hint
    assert sn.run(ROWS, positive, rounds=2, run="wide", **wider).rounds == 2
    assert before.items() <= adapters(home).items()


def test_starting_over_puts_aside_this_run_alone(options: dict[str, Any], home: Path) -> None:
    sn.run(ROWS, positive, rounds=2, **options)
    sn.run(ROWS, negative, rounds=1, **options)
    anew = sn.run(ROWS, positive, rounds=1, fresh=True, **options)
    assert (anew.run, anew.rounds) == ("rows", 1)
    names = sorted(run.name for run in runs_in(resolve_paths(home).checkpoints))
    assert len(names) == 3 and {"rows", "rows-2"} < set(names)
    assert sn.run(ROWS, negative, rounds=2, **options).rounds == 2


def test_a_checkpoint_of_before_runs_goes_on_with_the_tasks_it_was_measured_on_and_no_others(
    options: dict[str, Any], home: Path
) -> None:
    sn.run(ROWS, positive, rounds=2, **options)
    root = resolve_paths(home).checkpoints
    for file in root.rglob(STATE):
        state = json.loads(file.read_text())
        del state["tasks"]
        file.write_text(json.dumps(state))
    old = f"{Path(state['base_model']).name}-{state['base_fingerprint']}"
    (root / "rows").rename(root / old)

    def letters(seed: int) -> Iterator[tuple[str, str]]:
        yield from ((f"letter {number}=", "a") for number in range(seed, seed + 40))

    other = sn.run(letters, positive, rounds=1, **options)
    assert (other.run, other.rounds) == ("letters", 1)
    same = sn.run(ROWS, positive, rounds=3, **options)
    assert (same.run, same.rounds) == (old, 3)
    assert sn.run(ROWS, negative, rounds=1, **options).run == "rows", "its versions are noted by now"


def test_what_reads_a_checkpoint_takes_the_newest_run_and_says_which_or_the_one_that_is_named(
    options: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    alone = sn.Node(ROWS, positive, rounds=2, **options)
    alone.run()
    assert sn.evaluate(ROWS, positive, **options).policy == "checkpoint of round 2"
    node = sn.Node(ROWS, negative, rounds=1, **options)
    node.run()
    assert (alone.policy.round, node.policy.round) == (2, 1), "a node's policy is of its own run"
    assert sn.evaluate(ROWS, negative, **options).policy == "checkpoint of round 1 of run rows-2"
    named = sn.evaluate(ROWS, positive, run="rows", **options)
    assert named.policy == "checkpoint of round 2 of run rows"
    assert sn.load_policy(run="rows", **options).round == 2
    flags = ("--home", str(home), "--model", str(options["model"]), "--run", "rows")
    flags += ("--set", "rollout.max_tokens=8")
    assert "of round 2 of run rows" in cli("export", str(tmp_path / "adapter"), *flags)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == adapters(home)[
        "rows/round-00000002"
    ]
    with pytest.raises(CheckpointError, match="no run gone in this home") as caught:
        sn.load_policy(run="gone", **options)
    assert "rows-2" in caught.value.hint


def test_a_run_is_not_removed_beneath_a_node_and_the_way_out_is_told(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    load_or_create(paths.identity)
    with IdentityLock(paths.identity):
        done = CliRunner().invoke(app, ["runs", "remove", "rows", "--home", str(tmp_path)])
    assert isinstance(done.exception, IdentityInUse) and "stop that node first" in done.exception.hint


def test_runs_are_listed_with_what_they_came_to_and_removed_by_name(
    options: dict[str, Any], home: Path
) -> None:
    where = ("--home", str(home))
    assert "no runs" in cli("runs", *where)
    first = sn.run(ROWS, positive, rounds=2, **options)
    sn.run(ROWS, negative, rounds=1, **options)
    newest, oldest = json.loads(cli("runs", "--json", *where))
    assert (newest["name"], oldest["name"]) == ("rows-2", "rows")
    assert (oldest["round"], oldest["reward_last"], oldest["tasks"]) == (2, first.reward_last, ["rows"])
    folder = resolve_paths(home).checkpoints / "rows"
    assert oldest["size_bytes"] == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    table = cli("runs", *where).splitlines()
    assert table[0].split()[:3] == ["run", "model", "round"] and "rows-2" in table[1]

    assert "removed run rows of round 2" in cli("runs", "remove", "rows", *where)
    assert [one["name"] for one in json.loads(cli("runs", "--json", *where))] == ["rows-2"]
    assert isinstance(CliRunner().invoke(app, ["runs", "remove", "rows", *where]).exception, CheckpointError)
