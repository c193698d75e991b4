"""swarmnode as a library: what a script of five lines can do, and what it is told where it cannot."""

import asyncio
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import swarmnode as sn
from swarmnode.errors import CheckpointError, ConfigError, TaskError
from swarmnode.node.status import NodeStatus

SMALL = {
    "exchange.enabled": False,
    "rollout.groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 8,
    "rollout.overlap": "off",
    "node.eval_every": 0,
    "tasks.eval_examples": 2,
}


def letters(seed: int) -> Iterator[tuple[str, str]]:
    for number in range(40):
        yield f"letter {(seed + number) % 26}=", "abcdefghijklmnopqrstuvwxyz"[(seed + number) % 26]


def length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def round_of(said: NodeStatus) -> int:
    return said.progress.round


@pytest.fixture
def options(quick_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {"model": quick_model, "home": tmp_path / "home", "settings": SMALL}


def test_a_script_trains_a_policy_asks_it_and_measures_it(options: dict[str, Any]) -> None:
    seen: list[int] = []
    node = sn.Node(letters, length, rounds=2, **options, on_round=lambda said: seen.append(round_of(said)))
    done = node.run()
    assert (done.rounds, done.saved_round, seen) == (2, 2, [1, 2])
    assert node.status is not None and node.status.progress.round == 2

    assert node.policy.round == 2
    texts = node.policy.generate(["letter 3=", "letter 4="], temperature=0)
    assert texts == [node.policy.generate(f"letter {number}=", temperature=0) for number in (3, 4)]
    assert node.policy.generate("letter 3=", seed=1) == node.policy.generate("letter 3=", seed=1)

    assert sn.evaluate(letters, length, greedy=True, **options).per_task.keys() == {"letters"}
    model, tokenizer = sn.load_adapter(**options)
    assert model.peft_config and tokenizer.decode(tokenizer.encode("a"))


def test_the_same_node_goes_on_where_it_was_and_fresh_starts_over(options: dict[str, Any]) -> None:
    assert sn.run(letters, rounds=1, **options).rounds == 1
    assert sn.run(letters, rounds=2, **options).rounds == 2
    assert sn.run(letters, rounds=1, fresh=True, **options).rounds == 1


def test_a_callback_may_stop_the_run_and_what_it_raises_ends_it(options: dict[str, Any]) -> None:
    node = sn.Node(letters, rounds=50, on_round=lambda said: node.stop(), **options)
    done = node.run()
    assert done.stopped == "stopped on request" and done.saved_round == done.rounds < 50

    def fails(said: NodeStatus) -> None:
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        sn.run(letters, rounds=50, on_round=fails, **options)


def test_a_reward_that_fails_is_one_error_with_the_line_that_failed(options: dict[str, Any]) -> None:
    def leaves(completions: list[str], **columns: object) -> list[float]:
        sys.exit(4)

    with pytest.raises(TaskError, match=r"leaves failed: SystemExit\(4\). see .*test_api.py") as caught:
        sn.run(letters, leaves, rounds=1, **options)
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("Traceback") == 2 and "Group" not in told
    assert told.endswith("sys.exit(4)\nSystemExit: 4\n") and len(told.splitlines()) < 25


async def test_a_notebook_runs_a_node_though_its_thread_has_a_loop(options: dict[str, Any]) -> None:
    assert sn.run(letters, rounds=1, **options).rounds == 1
    assert (await sn.Node(letters, rounds=2, **options).serve()).rounds == 2


async def test_who_no_longer_waits_for_a_node_has_it_stopped_in_order(options: dict[str, Any]) -> None:
    begun = threading.Event()
    node = sn.Node(letters, on_round=lambda said: begun.set(), **options)
    serving = asyncio.ensure_future(node.serve())
    await asyncio.to_thread(begun.wait)
    with pytest.raises(ConfigError, match="runs already"):
        node.run()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert node.status is not None and node.status.checkpoint.round == node.status.progress.round


def test_a_task_with_a_name_may_have_another_judge(options: dict[str, Any]) -> None:
    seen: list[float | None] = []
    sn.run("rev", length, rounds=1, on_round=lambda said: seen.append(said.reward.own), **options)
    assert seen[0] is not None and seen[0] > 0


def test_a_data_set_is_a_task_by_its_name_alone_and_found_again_with_the_checkpoint(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "sums.jsonl"
    rows = (f'{{"question": "{number}+1=", "answer": {number + 1}}}\n' for number in range(60))
    path.write_text("".join(rows))
    assert sn.run(str(path), rounds=1, **options).rounds == 1
    assert sn.evaluate(**options).per_task.keys() == {"sums"}


def test_a_task_of_a_module_is_one_by_its_import_path(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def digits(seed):\n    return [(f'{n}=', str(n)) for n in range(60)]\n")
    assert sn.evaluate(f"{path}:digits", base=True, **options).per_task.keys() == {"digits"}


def test_what_cannot_be_is_refused_before_anything_runs(options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="no task"):
        sn.Node(3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout\.grops.*the script"):
        sn.Node(letters, home=options["home"], settings={"rollout.grops": 3})
    with pytest.raises(ConfigError, match="one policy"):
        sn.Node(letters, home=options["home"], settings={"node.policies": 2})
    with pytest.raises(CheckpointError, match="nothing to evaluate"):
        sn.evaluate(letters, **options)


def test_what_was_trained_on_a_scripts_task_is_not_measured_on_others_by_mistake(
    options: dict[str, Any],
) -> None:
    sn.run(letters, rounds=1, **options)
    with pytest.raises(TaskError, match=r"letters.*script"):
        sn.evaluate(**options)


def test_the_names_are_few_documented_and_loaded_when_they_are_used() -> None:
    assert all(getattr(sn, name).__doc__ for name in sn.__all__) and set(sn.__all__) <= set(dir(sn))
    with pytest.raises(AttributeError, match="no attribute 'Nod'"):
        _ = sn.Nod  # type: ignore[attr-defined]
    probe = "import swarmnode, sys; print([name for name in sys.modules if 'swarmnode.' in name])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
