"""Measures a checkpoint while no node runs.

cli eval, api.py -> [evaluate_offline] -> [load_checkpoint] -> local_policy.py, training/evaluation.py
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from swarmnode.errors import CheckpointError, ConfigError, TaskError
from swarmnode.node.building.machine_memory import check_loadable
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.node.showing.screen import Screen
from swarmnode.rollout.engine import SamplingParams
from swarmnode.settings.config import Config, TasksConfig
from swarmnode.settings.config_layers import ENV_PREFIX, Settings
from swarmnode.tasks.judging.own_judge import OwnJudge
from swarmnode.tasks.specs import parse_spec
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.run_folders import STAGES, is_trained, runs_in, trained_run
from swarmnode.training.evaluation import PASSING_REWARD, conversation_rules, evaluate
from swarmnode.training.records import Evaluation

if TYPE_CHECKING:
    from swarmnode.node.building.local_policy import LocalPolicy
    from swarmnode.training.checkpoints.checkpoint import Checkpoint
    from swarmnode.training.checkpoints.checkpoint_store import CheckpointStore

Purpose = Literal["eval", "export", "serve", "evaluate", "load"]
"""Why a checkpoint is needed: three commands, and two calls of scripts."""

NOTHING_YET: Mapping[Purpose, tuple[str, str]] = {
    "eval": (
        "evaluate",
        "train first (`swarmnode join`), use the same --model and --home, or measure the base model:"
        " `swarmnode eval --base`",
    ),
    "export": ("export", "train first (`swarmnode join`), use the same --model and --home"),
    "serve": (
        "talk to",
        "train first (`swarmnode join`), use the same --model and --home, or ask the base model: --base",
    ),
    "evaluate": (
        "evaluate",
        "train first (sn.run), pass the same model= and home=, or measure the base model: base=True",
    ),
    "load": ("load", "train first (sn.run), and pass the same model= and home="),
}
"""For each purpose, its verb and the advice if there is no checkpoint."""

NAMED_HERE = ("--set", "--config", "command line", "the script")
"""Prefixes of the origins of settings that were given for this one evaluation."""

AS_TRAINED = ("max_tokens", "temperature", "top_p")
"""Settings of rollout that change the measurement and that checkpoints record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineEvaluation(Evaluation):
    """The figures that `swarmnode eval` prints. Rewards are means over held-out examples; None: no example
    was scored."""

    model: str
    policy: str
    sampling: str
    examples: int
    """Number of examples asked; with several tasks, that of the task with the most."""
    samples: int
    """Answers to each example."""
    max_tokens: int
    """Longest answer in tokens."""
    passing_reward: float


def evaluate_offline(
    settings: Settings,
    *,
    base: bool = False,
    best: bool = False,
    greedy: bool = False,
    samples: int = 1,
    passing_reward: float = PASSING_REWARD,
    tasks: Mapping[str, Task] | None = None,
    screen: Screen | None = None,
    purpose: Purpose = "eval",
) -> OfflineEvaluation:
    """Measures the newest or the best checkpoint, or the base model if `base`.

    It measures on `tasks` if they are given; else on those that the node trained on, unless this evaluation
    names its own (NAMED_HERE). Answers are sampled `as_trained`. If there is nothing to measure, it says so
    before a model is loaded.
    """
    if greedy and samples > 1:
        raise ConfigError(
            "greedy decoding always gives the same answer", hint="leave out --samples (samples=)"
        )
    settings = as_trained(settings)
    with ExitStack() as stack:
        loading = load_checkpoint(settings, base=base, best=best, screen=screen, purpose=purpose)
        local, checkpoint = stack.enter_context(loading)
        config = with_room(settings.config, local)
        temperature = 0.0 if greedy else config.rollout.temperature
        sampling = SamplingParams(config.rollout.max_tokens, temperature, config.rollout.top_p)
        if tasks is None:
            newest = checkpoint or _store_of(settings, local).latest()
            named_here = settings.origins["tasks.names"].startswith(NAMED_HERE)
            named = config.tasks if named_here else _trained_on(config.tasks, newest)
            tasks = start_tasks(stack, named, settings.paths.home)
        judge = OwnJudge(tasks, config.tasks.score_timeout_s, max_failures=config.tasks.max_failures)
        result = evaluate(
            local.engine,
            local.renderer,
            judge.tasks,
            sampling,
            examples=config.tasks.eval_examples,
            samples=samples,
            passing_reward=passing_reward,
            conversations=conversation_rules(judge.tasks, config),
        )
    assert result is not None, "only an interrupted evaluation has no result"
    return OfflineEvaluation(
        model=settings.model,
        policy="base model" if checkpoint is None else f"checkpoint {of_round(checkpoint)}",
        sampling="greedy" if greedy else f"sampled at temperature {temperature:g}",
        examples=max(result.asked.values(), default=0),
        samples=samples,
        max_tokens=sampling.max_tokens,
        passing_reward=passing_reward,
        **{figure.name: getattr(result, figure.name) for figure in fields(result)},
    )


@contextmanager
def load_checkpoint(
    settings: Settings,
    *,
    base: bool,
    best: bool,
    screen: Screen | None = None,
    apply: bool = True,
    purpose: Purpose = "eval",
) -> "Generator[tuple[LocalPolicy, Checkpoint | None]]":
    """Context of the policy of the newest or the best checkpoint, with an engine to sample from it, which is
    closed at the end. With `base`: the base model, and no checkpoint. Raises CheckpointError before a model
    is loaded for nothing.

    Without `apply` it is the base model until `apply_checkpoint`.
    """
    if base and best:
        raise ConfigError("base and best are two different policies", hint="leave out one of them")
    with ExitStack() as stack:
        with screen or Screen() as shown:
            if not base:
                _check_trained(settings, purpose)
            check_loadable(settings.config, settings.model)
            from swarmnode.node.building.local_policy import load_policy

            local = load_policy(settings.config, settings.model, settings.paths, shown.progress, trains=False)
            stack.callback(local.engine.close)
            store = _store_of(settings, local)
            checkpoint = None if base else _chosen(store, purpose, best=best)
            if checkpoint is not None and apply:
                apply_checkpoint(local, checkpoint)
        yield local, checkpoint


def as_trained(settings: Settings) -> Settings:
    """Returns the settings with the answer length and sampling of the run in question, unless this command
    sets them (NAMED_HERE, or the environment). Raises CheckpointError if the run does not exist or its
    settings are invalid."""
    run = trained_run(runs_in(settings.paths.checkpoints), settings.model, named=settings.config.node.run)
    noted = {} if run is None or run.state is None else run.state.settings
    taken = {
        name: value
        for name in AS_TRAINED
        if isinstance(value := noted.get(key := f"rollout.{name}"), int | float)
        and not settings.origins.get(key, "default").startswith((*NAMED_HERE, ENV_PREFIX))
    }
    try:
        return replace(settings, config=_rolled_out(settings.config, **taken))
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint's sampling settings are invalid: {error}") from error


def with_room(config: Config, local: "LocalPolicy") -> Config:
    """Returns the settings with answers that leave room for a prompt: as configured, or half of what the
    model takes if that is too long for it."""
    limit = local.base.max_positions
    if limit is None or config.rollout.max_tokens < limit:
        return config
    return _rolled_out(config, max_tokens=limit // 2)


def _rolled_out(config: Config, **changed: float) -> Config:
    rollout = type(config.rollout).model_validate({**config.rollout.model_dump(), **changed})
    return config.model_copy(update={"rollout": rollout})


def apply_checkpoint(local: "LocalPolicy", checkpoint: "Checkpoint") -> None:
    """Sets the policy and its engine to those of a checkpoint. Raises CheckpointError."""
    local.policy.load_adapter(checkpoint.adapter)
    local.policy.version = checkpoint.state.policy_version
    local.engine.set_policy(local.policy.update())


def _trained_on(tasks: TasksConfig, checkpoint: "Checkpoint | None") -> TasksConfig:
    """Returns the tasks of a checkpoint if it names them. Raises TaskError if one of their files is gone, or
    if they were objects of a script."""
    specs = () if checkpoint is None else checkpoint.state.task_specs
    measured = () if checkpoint is None else checkpoint.state.measure.tasks
    if measured and not specs:
        raise TaskError(
            f"the checkpoint was trained on {', '.join(measured)}, which a script passed in",
            hint="pass it again: swarmnode.evaluate(task, reward), or other tasks: --task",
        )
    if not specs:
        return tasks
    parsed = [parse_spec(spec) for spec in specs]
    gone = [spec.name for spec in parsed if spec.name.startswith("/") and not Path(spec.path).exists()]
    if gone:
        raise TaskError(
            f"the checkpoint was trained on {gone[0]}, which is gone",
            hint="pass the file's new path, or other tasks: `swarmnode eval --task FILE`",
        )
    # The names contain the settings of data sets.
    return tasks.model_copy(update={"names": specs, "reward": (), "system_prompt": ""})


def of_round(checkpoint: "Checkpoint") -> str:
    """Returns a checkpoint's round in words, with the run's name if its home has several."""
    run = checkpoint.folder.parent
    several = len(runs_in(run.parent)) > 1
    return f"of round {checkpoint.state.counters.round}" + (f" of run {run.name}" if several else "")


def _check_trained(settings: Settings, purpose: Purpose) -> None:
    """Raises CheckpointError, before a model is loaded for nothing, if no run is of this model."""
    folder, model = settings.paths.checkpoints, settings.model
    known = runs_in(folder)
    if is_trained(known, model, named=settings.config.node.run):
        return
    if not known and any(folder.glob(f"{STAGES}*")):
        raise CheckpointError(
            f"nothing to {NOTHING_YET[purpose][0]}: {folder} has one stage of a pipeline's model,"
            " not an adapter of the whole model",
            hint="use the home of the member that last held the data: it has checkpoints of the whole model",
        )
    others = sorted({Path(run.state.base_model).name for run in known if run.state is not None})
    there = f"; found checkpoints of {', '.join(others)}" if others else ""
    verb, way_out = NOTHING_YET[purpose]
    raise CheckpointError(f"nothing to {verb}: no checkpoint of {model} in {folder}{there}", hint=way_out)


def _store_of(settings: Settings, local: "LocalPolicy") -> "CheckpointStore":
    """Returns the checkpoints of the run to evaluate. Raises CheckpointError if it does not exist."""
    from swarmnode.node.building.local_policy import checkpoint_store

    return checkpoint_store(settings.config, settings.model, settings.paths, local.base)


def _chosen(store: "CheckpointStore", purpose: Purpose, *, best: bool) -> "Checkpoint":
    """Returns the newest or the best checkpoint. Raises CheckpointError if there is none with an adapter."""
    from swarmnode.training.checkpoints.checkpoint import check_has_adapter

    checkpoint = store.best() if best else store.latest()
    if checkpoint is None and best:
        raise CheckpointError(
            f"no checkpoint in {store.folder} has been evaluated",
            hint="set node.eval_every=10 when training, or leave out best for the newest checkpoint",
        )
    if checkpoint is None:
        raise CheckpointError(f"no checkpoint in {store.folder}", hint=NOTHING_YET[purpose][1])
    check_has_adapter(checkpoint)
    return checkpoint
