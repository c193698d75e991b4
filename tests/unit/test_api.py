"""swarmnode as a library: what a script of five lines can do, and what it is told where it cannot."""

import asyncio
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import import_module
from inspect import Signature, isfunction, signature
from pathlib import Path
from typing import Any, get_args

import pytest

import swarmnode as sn
from swarmnode import api
from swarmnode.errors import CheckpointError, ConfigError, ModelError, TaskError
from swarmnode.node.showing.node_status import NodeStatus
from tests.monitored import Remembers

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
    for refused, why in (
        ({"temperature": -1.0}, "temperature is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 9999}, "this engine holds"),
    ):
        with pytest.raises(ModelError, match=why):
            node.policy.generate("letter 3=", **refused)
    with pytest.raises(CheckpointError, match="has not started"):
        print(sn.Node(letters, **options).policy)
    assert sn.Node(letters, run=done.run, **options).policy.round == 2

    assert sn.evaluate(letters, length, greedy=True, **options).per_task.keys() == {"letters"}
    model, tokenizer = sn.load_adapter(**options)
    assert model.peft_config and tokenizer.decode(tokenizer.encode("a"))


def test_the_same_node_goes_on_where_it_was_and_fresh_starts_over(options: dict[str, Any]) -> None:
    assert sn.run(letters, rounds=1, **options).rounds == 1
    assert sn.run(letters, rounds=2, **options).rounds == 2
    assert sn.run(letters, rounds=1, fresh=True, **options).rounds == 1


def capitals(completions: list[str], **columns: object) -> list[float]:
    return [float(text.isupper()) for text in completions]


def test_fresh_starts_over_where_two_runs_are_of_the_same_task(options: dict[str, Any]) -> None:
    assert sn.run(letters, capitals, rounds=1, **options).run == "letters"
    assert sn.run(letters, length, rounds=2, **options).run == "letters-2"
    # A person has the first go on with the other reward: now both are of it.
    assert sn.run(letters, length, rounds=3, run="letters", **options).rounds == 3
    begun: list[int] = []
    done = sn.run(
        letters, length, rounds=1, fresh=True, on_round=lambda said: begun.append(round_of(said)), **options
    )
    assert (done.run, done.rounds, begun) == ("letters", 1, [1])
    aside = (options["home"] / "data/checkpoints").glob("*.*")
    kept = sorted(folder.name.partition(".")[0] for folder in aside)
    assert kept == ["letters", "letters-2"], "nothing is deleted"


def test_a_sweep_over_settings_is_no_loop_over_one_result(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rates = [{**options, "settings": {**SMALL, "training.learning_rate": rate}} for rate in (1e-3, 1e-2)]
    assert sn.run(letters, length, rounds=1, **rates[0]).rounds == 1
    assert sn.run(letters, length, rounds=1, **rates[0]).stopped.startswith("nothing to do: 1 of 1 rounds")
    with pytest.raises(ConfigError, match=r"training.learning_rate was 0.001, is 0.01 now") as caught:
        sn.run(letters, length, rounds=1, **rates[1])
    assert "run=" in caught.value.hint and "fresh=True" in caught.value.hint
    done = [sn.run(letters, length, rounds=1, run=f"lr-{n}", **one) for n, one in enumerate(rates)]
    assert [(one.run, one.rounds) for one in done] == [("lr-0", 1), ("lr-1", 1)]
    # Where rounds are left a run goes on with the other rate, and says so; then it is trained with that.
    assert sn.run(letters, length, rounds=2, **rates[1]).rounds == 2
    log = (options["home"] / "state/logs/node.log").read_text()
    assert log.count("continues with changed settings: training.learning_rate was 0.001, is 0.01 now") == 1
    assert sn.run(letters, length, rounds=2, **rates[1]).stopped.startswith("nothing to do")


def own_model(path: Path, folder: Path) -> Any:
    """A model of 96 positions: fewer than rollout.max_tokens asks for by itself."""
    from transformers import AutoModelForCausalLM

    # Under another name than the tiny policy's, which is looked for by itself.
    model = AutoModelForCausalLM.from_pretrained(shutil.copytree(path, folder / "mine"))
    model.config.max_position_embeddings = 96
    return model


def test_what_was_trained_on_a_model_of_ones_own_is_found_by_its_home(
    options: dict[str, Any], quick_model: Path, tmp_path: Path
) -> None:
    home, model = options["home"], own_model(quick_model, tmp_path)
    node = sn.Node(letters, length, rounds=1, **{**options, "model": model})
    node.run()
    assert node.home == home
    assert sn.load_policy(home=node.home).round == 1
    assert sn.load_adapter(home=home)[0].peft_config
    assert sn.load_adapter(home=home, run="letters", model=model)[0].peft_config
    few = {"tasks.eval_examples": 2}
    for asked in ({}, {"base": True}, {"model": model}):
        assert sn.evaluate(letters, length, home=home, settings=few, **asked).mean is not None


def test_a_script_is_told_in_its_own_words_that_nothing_was_trained(tmp_path: Path) -> None:
    for ask, verb in ((sn.load_policy, "load"), (sn.load_adapter, "load"), (sn.evaluate, "evaluate")):
        with pytest.raises(CheckpointError, match=f"nothing to {verb}: no checkpoint") as caught:
            ask(home=tmp_path)
        assert "--" not in caught.value.hint and "sn.run" in caught.value.hint


def test_the_same_seed_in_another_home_gives_the_same_numbers(quick_model: Path, tmp_path: Path) -> None:
    """As docs/library.md has it."""
    same = {**SMALL, "node.seed": 0, "rollout.mode": "sync", "rollout.overlap": "off"}
    seen: list[list[tuple[object, ...]]] = [[], []]
    for home, numbers in enumerate(seen):

        def note(said: NodeStatus, numbers: list[tuple[object, ...]] = numbers) -> None:
            numbers.append((said.reward.own, said.training.loss, said.training.grad_norm))

        sn.run(
            letters,
            length,
            rounds=3,
            on_round=note,
            model=quick_model,
            home=tmp_path / str(home),
            settings=same,
        )
    assert seen[0] == seen[1] and len(set(seen[0])) == 3


def short(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text) < 4) for text in completions]


def test_a_script_is_followed_by_monitors_and_its_rewards_are_measured_one_by_one(
    options: dict[str, Any],
) -> None:
    told, broken = Remembers(), Remembers()
    broken.broken = True
    weighed = {**options, "settings": {**SMALL, "tasks.reward_weights": [1, 0.5]}}
    done = sn.run(letters, [length, short], rounds=2, monitors=[told, broken], **weighed)
    assert done.rounds == 2, "a monitor that fails stops nothing"
    assert [number for event, number in told.rounds if event == "round"] == [1, 2]
    assert told.runs[0].settings["tasks.reward_weights"] == [1.0, 0.5]
    assert told.summaries == [done]
    last = [values for (event, _), values in zip(told.rounds, told.values, strict=True) if event == "round"][
        -1
    ]
    whole = last["reward.parts.length"] + 0.5 * last["reward.parts.short"]
    assert last["reward.own"] == pytest.approx(whole)
    assert last["reward.parts_std.length"] >= 0 and last["training.learning_rate"] == 1e-4

    logs = options["home"] / "state" / "logs"
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    assert [line["progress.round"] for line in lines if line["event"] == "round"] == [1, 2]
    (rollouts,) = (options["home"] / "data" / "checkpoints").glob("*/rollouts.jsonl")
    kept = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert {one["round"] for one in kept} == {1, 2} and {one["author"] for one in kept} == {"own"}
    for one in kept:
        assert one["reward"] == one["rewards"]["length"] + 0.5 * one["rewards"]["short*0.5"]
        assert one["prompt"].startswith("letter ")


def test_a_falling_learning_rate_goes_on_where_it_was_after_a_restart(options: dict[str, Any]) -> None:
    seen: list[tuple[int, float | None]] = []

    def rate(status: NodeStatus) -> None:
        before = status.progress.policy_version - (status.training.optimizer_steps > 0)
        seen.append((before, status.training.learning_rate))

    falling = {
        **SMALL,
        "training.schedule": "linear",
        "training.learning_rate": 1e-3,
        "training.inner_epochs": 2,
    }
    node = sn.Node(letters, length, rounds=4, on_round=lambda said: (rate(said), node.stop()),
                   **{**options, "settings": falling})  # fmt: skip
    assert node.run().rounds < 4
    sn.run(letters, length, rounds=4, on_round=rate, **{**options, "settings": falling})
    assert len(seen) == 4 and seen[0] == (0, 1e-3)
    assert [found for _, found in seen] == pytest.approx([1e-3 * (4 - done) / 4 for done, _ in seen])


def test_what_is_no_monitor_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="is not a monitor"):
        sn.Node("rev", monitors=[object()])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no such monitor"):
        sn.Node("rev", monitors=["wandbb"])


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
    assert isinstance(caught.value.__cause__, SystemExit), "a debugger gets to the line that failed"
    assert told.count("Traceback") == 3 and "Group" not in told
    assert told.endswith("sys.exit(4)\nSystemExit: 4\n") and len(told.splitlines()) < 32


def test_a_summary_tells_of_rewards_that_failed_or_were_none_though_nothing_is_printed(
    options: dict[str, Any],
) -> None:
    answered: list[int] = []

    def fails_once(completions: list[str], **columns: object) -> list[float]:
        answered.append(1)
        if len(answered) == 2:
            raise KeyError("boom")
        return [1.0] * len(completions)

    def none(completions: list[str], **columns: object) -> list[None]:
        return [None] * len(completions)

    failed = sn.run(letters, fails_once, rounds=1, log=False, **options)
    assert (
        failed.advice
        == "groups without a reward: 1, the last because reward fails_once failed: KeyError('boom')"
    )
    assert "no answer to letters had a reward" in sn.run(letters, none, rounds=2, log=False, **options).advice
    assert not sn.run(letters, length, rounds=1, log=False, **options).advice


async def test_a_notebook_runs_a_node_though_its_thread_has_a_loop(options: dict[str, Any]) -> None:
    assert sn.run(letters, rounds=1, **options).rounds == 1
    assert (await sn.Node(letters, rounds=2, **options).serve()).rounds == 2


async def test_who_no_longer_waits_for_a_node_has_it_stopped_in_order(options: dict[str, Any]) -> None:
    begun = threading.Event()
    node = sn.Node(letters, on_round=lambda said: begun.set(), **options)
    serving = asyncio.ensure_future(node.serve())
    await asyncio.to_thread(begun.wait)
    with pytest.raises(ConfigError, match="already running"):
        node.run()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert node.status is not None and node.status.checkpoint.round == node.status.progress.round


def test_the_level_of_the_logger_says_what_a_script_shows_and_the_file_has_it_all(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = logging.getLogger("swarmnode")
    ours.setLevel(logging.WARNING)
    try:
        sn.run(letters, rounds=1, **options)
        assert ours.level == logging.WARNING and capsys.readouterr().err == ""
    finally:
        ours.setLevel(logging.NOTSET)
    assert "rollout engine" in next(options["home"].rglob("node.log")).read_text()
    sn.run(letters, rounds=2, **options)
    assert ours.level == logging.NOTSET and "rollout engine" in capsys.readouterr().err


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
    with pytest.raises(TaskError, match="not a task"):
        sn.Node(3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout\.grops.*the script"):
        sn.Node(letters, home=options["home"], settings={"rollout.grops": 3})
    with pytest.raises(ConfigError, match="is not callable"):
        sn.Node(letters, on_round=3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a list"):
        sn.Node(letters, peers="/ip4/127.0.0.1/tcp/1/p2p/X", **options)
    with pytest.raises(ConfigError, match=r"monitors must be a list, got 'wandb'.*\['wandb'\]"):
        sn.Node(letters, monitors="wandb", **options)
    with pytest.raises(ConfigError, match="one policy"):
        sn.Node(letters, home=options["home"], settings={"node.policies": 2})
    with pytest.raises(ConfigError, match="home must be a path, got 5"):
        sn.Node(letters, home=5)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nothing to evaluate"):
        sn.evaluate(letters, **options)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("roundz", "'rounds'"),
        ("learning_rate", "settings="),
        ("num_generations", "'rollout.group_size'"),
        ("train_dataset", "task="),
        ("reward_funcs", "reward="),
        ("peft_config", "policy.lora_rank"),
        ("output_dir", "home="),
    ],
)
def test_an_argument_that_a_node_does_not_take_is_answered_with_the_one_that_is_meant(
    given: str, meant: str
) -> None:
    for made in (sn.Node, sn.run):
        with pytest.raises(ConfigError, match=f"unknown argument '{given}'") as caught:
            made(letters, **{given: 3})
        assert meant in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [({"rounds": 100}, "node.rounds"), ({"model": "tiny"}, "policy.model"), ({"task": "rev"}, "tasks.names")],
    ids=str,
)
def test_what_an_argument_and_a_setting_both_say_is_refused(
    arguments: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"'{setting}'.*as an argument"):
        sn.Node(home=tmp_path, settings={setting: 5}, **arguments)
    section, key = setting.split(".")
    with pytest.raises(ConfigError, match=f"'{setting}'.*as an argument"):
        sn.Node(home=tmp_path, settings={section: {key: 5}}, **arguments)


def test_a_run_that_shows_nothing_still_reaches_a_programs_own_logging(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours = logging.getLogger("swarmnode")
    sn.run(letters, length, rounds=1, log=False, **options)
    quiet = len(caplog.records)
    assert quiet > 0 and ours.propagate
    sn.run(letters, length, rounds=2, **options)
    assert len(caplog.records) == quiet and ours.propagate


def test_a_policy_is_loaded_as_quietly_as_a_program_asks(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert logging.getLogger().level == logging.WARNING
    sn.load_policy(base=True, **options)
    assert caplog.messages == []


def test_a_summary_tells_that_the_gradient_was_not_finite(options: dict[str, Any]) -> None:
    options["settings"] = {**SMALL, "training.loss": "tests.own_losses:nowhere_finite"}
    assert "the gradient is not finite" in sn.run(letters, length, rounds=1, **options).advice


def test_run_has_the_parameters_of_a_node() -> None:
    assert signature(sn.run).parameters == signature(sn.Node).parameters
    assert "rounds" in signature(sn.run).parameters


@pytest.mark.parametrize("reward", [3, [3]])
def test_what_judges_nothing_is_no_reward(reward: Any) -> None:
    with pytest.raises(TaskError, match="not a reward"):
        sn.Node(letters, reward)


def test_a_script_ends_quietly_with_a_policy_that_nobody_closed(options: dict[str, Any]) -> None:
    given = {**options, "home": str(options["home"]), "model": str(options["model"]), "base": True}
    script = f"import swarmnode as sn; policy = sn.load_policy(**{given!r}); print(policy.closed)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, "Exception ignored" in done.stderr) == ("False\n", False), done.stderr


def test_a_policy_is_asked_with_messages_as_with_a_text(options: dict[str, Any]) -> None:
    policy = sn.load_policy(base=True, **options)
    asked = [{"role": "user", "content": "letter 3="}]
    told = policy.generate("letter 3=", temperature=0)
    assert policy.generate(asked, temperature=0) == told
    assert policy.generate([asked, "letter 3="], temperature=0) == [told, told]
    assert policy.generate((one for one in ["letter 3="] * 2), temperature=0) == [told, told]  # type: ignore[call-overload]
    assert policy.generate((part for part in asked), temperature=0) == told  # type: ignore[call-overload]
    hot = {policy.generate("letter 3=", temperature=2.0, max_tokens=8) for _ in range(8)}
    assert len(hot) > 1
    with pytest.raises(TaskError, match="does not end with a user message"):
        policy.generate([{"role": "assistant", "content": "letter 3="}])
    with pytest.raises(ModelError, match="100000 new ones, this engine holds") as caught:
        policy.generate("letter 3=", max_tokens=100_000)
    assert "max_tokens" in caught.value.hint
    with pytest.raises(TaskError, match="a non-empty string"):
        policy.generate("")
    for odd in ({"prompt": "letter 3="}, 3, b"abc"):
        with pytest.raises(TaskError, match="not a prompt"):
            policy.generate(odd)  # type: ignore[call-overload]


def test_what_was_trained_on_a_scripts_task_is_measured_on_others_where_they_are_named(
    options: dict[str, Any],
) -> None:
    sn.run(letters, None, rounds=1, **options)
    with pytest.raises(TaskError, match=r"letters.*script"):
        sn.evaluate(**options)
    assert set(sn.evaluate(["rev", "sort"], **options).per_task) == {"rev", "sort"}


def test_a_list_of_names_is_that_many_tasks_and_a_list_with_a_prompt_in_it_is_rows(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (tmp_path / "mine.py").touch()
    file, function = tmp_path / "data.jsonl", f"{tmp_path}/mine.py:task"
    for names in ["rev"], ("rev", "builtin"), ["sort", file], ["rev", function]:
        node = sn.Node(names, length, **options)
        assert node.config.tasks.names == tuple(map(str, names))
    long = "x" * 5000
    for rows in (
        ["rev", "Say it backwards."],
        ["1/2 + 1/2 =", "sort"],
        ["gone.jsonl"],
        ["Is a?b", long],
        ["Why does x.py:12 fail?"],
    ):
        assert sn.Node(rows, length, **options).config.tasks.names == ("builtin",)
    with pytest.raises(TaskError, match=r"a named task \(rev, sort\)"):
        sn.Node(["rev", "sort"], tools=[length], **options)


def test_the_names_are_few_documented_and_loaded_when_they_are_used() -> None:
    assert issubclass(sn.errors.ConfigError, sn.errors.SwarmnodeError)
    assert all(getattr(sn, name).__doc__ for name in sn.__all__) and set(sn.__all__) <= set(dir(sn))
    # A prompt completes what is for users, and help(Node) tells of every attribute.
    assert [name for name in dir(sn) if name not in sn.__all__] == ["__version__"]
    assert all(getattr(sn.Node, name).__doc__ for name in ("config", "home", "policy", "status"))
    with pytest.raises(AttributeError, match="no attribute 'Nod'"):
        _ = sn.Nod  # type: ignore[attr-defined]
    probe = "import swarmnode, sys; print([name for name in sys.modules if 'swarmnode.' in name])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def types_of_ours(annotation: object) -> set[type]:
    parts = [part for arg in get_args(annotation) for part in (arg if isinstance(arg, list) else [arg])]
    found = set[type]().union(*map(types_of_ours, parts))
    if isinstance(annotation, type) and annotation.__module__.startswith("swarmnode"):
        found.add(annotation)
    return found


def signatures_of(public: object) -> Iterator[Signature]:
    """Of a function, or of what a class has for its users."""
    if not isinstance(public, type):
        yield from [signature(public)] if callable(public) else []
        return
    for name, member in vars(public).items():
        called = member.fget if isinstance(member, property) else member
        if isfunction(called) and (not name.startswith("_") or name == "__init__"):
            yield signature(called)


def test_a_script_can_import_each_type_that_its_annotations_need() -> None:
    given = [getattr(sn, name) for name in sn.__all__ if name != "errors"]
    # The methods of what a script writes itself count, too.
    public = [one for one in given if getattr(one, "__module__", "") in (sn.__name__, api.__name__)]
    needed = {
        found
        for one in (*public, sn.Monitor, sn.Task)
        for called in signatures_of(one)
        for annotation in (
            *(each.annotation for each in called.parameters.values()),
            called.return_annotation,
        )
        for found in types_of_ours(annotation)
    }
    assert {found for found in needed if found not in given} == set()
    assert {sn.Summary, sn.NodeStatus, sn.Task, sn.Example, sn.Monitor, sn.RunInfo, sn.Config} <= needed


def test_the_parts_that_a_user_may_write_have_their_types_where_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "extending.md"
    named = re.findall(r"`(\w+)`[^`|]*\(`swarmnode/([\w/]+)\.py`\)", page.read_text())
    assert {"EngineRecord", "Engine", "Learner", "Loss", "Rule", "Task", "Monitor", "JudgeConfig"} <= {
        name for name, _ in named
    }
    modules = {name: import_module(f"swarmnode.{path.replace('/', '.')}") for name, path in named}
    assert [name for name, module in modules.items() if not hasattr(module, name)] == []


def test_rows_are_measured_whole_while_a_node_trains_and_after(options: dict[str, Any]) -> None:
    asked: list[str] = []

    def same(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        asked.extend(prompts)
        return [float(len(text)) for text in completions]

    rows = [{"question": f"{number} + 1 =", "answer": number + 1} for number in range(40)]
    tests = [{"question": f"{number} + 2 =", "answer": number + 2} for number in range(9)]
    done = sn.run(iter(rows), same, rounds=1, eval_dataset=tests, **options)
    assert done.evaluated_round == 1
    assert {row["question"] for row in tests} <= set(asked)
    asked.clear()
    measured = sn.evaluate(tests, same, **options)
    assert measured.examples == 9 and sorted(asked) == sorted(str(row["question"]) for row in tests)
    assert sn.evaluate({"train": rows, "test": tests}, same, **options).examples == 9


def test_a_data_set_in_a_file_is_measured_on_another(options: dict[str, Any], tmp_path: Path) -> None:
    for name, count in (("train", 40), ("test", 9)):
        rows = (f'{{"question": "{name} {number}+1=", "answer": {number + 1}}}\n' for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    measured = f"{tmp_path / 'train.jsonl'}?evaluation={tmp_path / 'test.jsonl'}"
    assert sn.run(measured, rounds=1, **options).evaluated_round == 1
    # The checkpoint knows both files.
    assert sn.evaluate(**options).examples == 9
    with pytest.raises(TaskError, match=r"a named task \(.*train"):
        sn.Node(tmp_path / "train.jsonl", eval_dataset=["?"], **options)


def test_a_model_that_is_loaded_is_trained_as_the_folder_of_its_weights_is(
    options: dict[str, Any], quick_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quick_model)
    loaded = AutoModelForCausalLM.from_pretrained(quick_model)
    given = {**options, "model": loaded}
    sn.run(letters, length, rounds=1, **given)
    policy = sn.load_policy(**given)
    assert policy.round == 1 and policy.generate("letter 3=", seed=0) == sn.load_policy(**given).generate(
        "letter 3=", seed=0
    )
    # The same weights are the same folder, others are another, with checkpoints of their own.
    again = sn.Node(letters, length, tokenizer=tokenizer, **given)
    assert again.home is not None
    assert [again.config.policy.model] == [str(one) for one in again.home.glob("cache/models/*")]
    loaded.get_input_embeddings().weight.data.mul_(1.5)
    with pytest.raises(CheckpointError):
        sn.load_policy(**given)


def test_what_is_no_model_of_its_own_is_refused_with_the_way_out(
    options: dict[str, Any], quick_model: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoModelForCausalLM

    def refused(model: Any, **more: Any) -> str:
        with pytest.raises((ModelError, ConfigError)) as caught:
            sn.Node(letters, **{**options, "model": model}, **more)
        return str(caught.value)

    assert "Linear is not a model" in refused(torch.nn.Linear(2, 2))
    assert "cannot generate" in refused(AutoModel.from_pretrained(quick_model))
    nameless = AutoModelForCausalLM.from_pretrained(quick_model)
    nameless.config.name_or_path = ""
    assert "pass tokenizer=" in refused(nameless)
    assert "not a tokenizer" in refused(nameless, tokenizer=3)
    assert "needs a loaded model" in refused(quick_model, tokenizer=3)
    adapted = get_peft_model(nameless, LoraConfig(target_modules=["q_proj"]))
    assert "is not a model" in refused(adapted) and "merge_and_unload" in refused(adapted)
    assert "adapter" in refused(nameless)
    adapted.save_pretrained(options["home"] / "adapter")
    with pytest.raises(ModelError, match=r"has no config\.json") as caught:
        sn.run(letters, **{**options, "model": options["home"] / "adapter"})
    assert "it is an adapter: pass its base" in caught.value.hint


def test_rows_of_which_none_is_held_out_say_so_once(options: dict[str, Any]) -> None:
    rows = [{"prompt": "x=", "answer": str(number)} for number in range(9)]
    seen = {**options, "settings": {**SMALL, "node.eval_every": 1}}
    assert sn.run(rows, length, rounds=2, **seen).reward_last is None
    log = (options["home"] / "state/logs/node.log").read_text()
    assert log.count("task rows has no held-out prompts (one in five") == 1
    assert "eval_dataset=" in log


@pytest.mark.parametrize("raised", [StopIteration("enough"), OSError("the disk is full"), ValueError("odd")])
def test_an_error_of_on_round_ends_the_run(raised: Exception, options: dict[str, Any]) -> None:
    seen: list[int] = []

    def fails(said: NodeStatus) -> None:
        seen.append(round_of(said))
        raise raised

    with pytest.raises((RuntimeError, ValueError), match=str(raised)):
        sn.run(letters, length, rounds=2, on_round=fails, **options)
    assert seen == [1]


def test_rewards_given_as_a_generator_judge_a_named_task_too(options: dict[str, Any]) -> None:
    found = sn.evaluate("rev", (one for one in [length]), base=True, **options)  # type: ignore[arg-type]
    assert found.judged_by == {"rev": ("length",)}
