"""The runs of a home. Each is one policy and the tasks it is trained on, with a name and a folder.

data/checkpoints/NAME/round-* -> [runs_in] -> [choose_run] -> local_policy.py -> CheckpointStore
                                           -> [newest_run] -> offline.py (eval, export, task try)
                                           -> `swarmnode runs`

A start continues the run of the same base model and the same tasks, including rewards; other tasks get a run
of their own, which begins with the base policy. So nothing is mixed and nothing is lost. A person who names a
run decides otherwise: it continues with any tasks it is given, and its learner reports the change.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.errors import CheckpointError
from swarmnode.settings.config_layers import Settings
from swarmnode.training.records import STATE, State, read_state

PREFIX = "round-"
STAGES = "pipeline-"
"""Prefix of the folders in which members of a pipeline keep their own stages."""
TINY_FOLDER = re.compile(r"tiny-[0-9a-f]{12}")
"""Names of folders of the tiny policy, which contain its digest."""
ASIDE = re.compile(r".*\.\d{8}-\d{6}")
"""Names of runs that `--fresh` put aside."""
MOST_IN_NAME = 3
"""The most tasks that are spelt out in the name of a run; a run with more has only their number."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run on disk, by its newest readable checkpoint."""

    folder: Path
    state: State | None
    """None: no checkpoint can be read."""
    written_at: float
    """Seconds since the epoch."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def put_aside(self) -> bool:
        """True if `--fresh` started over without this run: it continues only if it is named."""
        return ASIDE.fullmatch(self.name) is not None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks it is trained on; empty if they were not recorded."""
        return () if self.state is None else tuple(sorted(self.state.tasks)) or self.state.measure.tasks

    def is_of(self, tasks: Mapping[str, str]) -> bool:
        """Returns True if the run is trained on these versions of these tasks, as far as its state records
        them."""
        if self.state is not None and self.state.tasks:
            return self.state.tasks == tasks
        return not self.tasks or set(self.tasks) == set(tasks)

    def difference(self, tasks: Mapping[str, str]) -> str:
        """Returns the difference between these tasks and those that the run is trained on, in a sentence."""
        if set(self.tasks) != set(tasks):
            before, now = (", ".join(sorted(names)) or "unknown" for names in (self.tasks, tasks))
            return f"the tasks were {before} and are {now} now"
        noted = {} if self.state is None else self.state.tasks
        changed = ", ".join(sorted(name for name in tasks if noted.get(name) != tasks[name]))
        return f"the examples or the reward of {changed} changed"


@dataclass(frozen=True, slots=True)
class Choice:
    """The run that a start continues or begins, and the reason in a sentence, if there is something to
    say."""

    name: str
    reason: str = ""


def runs_in(root: Path) -> list[TrainingRun]:
    """Returns the runs in a folder of checkpoints, most recently written first."""
    folders = (folder for folder in root.glob("*") if not folder.name.startswith("."))
    found = [run for folder in folders if (run := _read_run(folder)) is not None]
    return sorted(found, key=lambda run: run.written_at, reverse=True)


def choose_run(
    known: Sequence[TrainingRun],
    fingerprint: str,
    tasks: Mapping[str, str],
    *,
    named: str = "",
    old_name: str = "",
) -> Choice:
    """Returns the run that a start belongs to. `known`: newest first; `fingerprint`: of the base model;
    `tasks`: version by name; `named`: by a person; `old_name`: the name that earlier versions gave the only
    run of this base.

    Raises CheckpointError if the named run is of another model.
    """
    if named:
        return _named(known, fingerprint, named)
    label = label_of(tasks)
    automatic = re.compile(rf"{re.escape(label)}(-[0-9]+)?")
    candidates = [run for run in known if automatic.fullmatch(run.name) or run.name == old_name]
    ours = [run for run in candidates if run.state is None or run.state.base_fingerprint == fingerprint]
    # An unreadable run may be of these tasks: then its reader reports the problem.
    for run in sorted(ours, key=lambda run: run.state is None):
        if run.is_of(tasks):
            return Choice(run.name)
    taken = {run.name for run in known}
    names = (label if number == 1 else f"{label}-{number}" for number in range(1, len(known) + 2))
    name = next(name for name in names if name not in taken)
    others = [run for run in known if run.state is not None and not run.put_aside]
    same_tasks = [run for run in others if set(run.tasks) == set(tasks)]
    return Choice(name, _told(name, fingerprint, tasks, [*same_tasks, *others]))


def newest_run(known: Sequence[TrainingRun], fingerprint: str, *, named: str = "") -> str | None:
    """Returns the run to evaluate or export: the named one, otherwise the most recently written one of this
    base model. Raises CheckpointError if the named run is of another model."""
    if named:
        return _named(known, fingerprint, named).name
    fitting = (run for run in known if run.state is not None and run.state.base_fingerprint == fingerprint)
    return next((run.name for run in fitting if not run.put_aside), None)


def only_model(known: Sequence[TrainingRun]) -> str | None:
    """Returns the base model of these runs, by the name a person would use, if all have the same one."""
    bases = {run.state.base_model for run in known if run.state is not None and not run.put_aside}
    named = set(map(spoken_name, bases))
    return named.pop() if len(named) == 1 else None


def spoken_name(base_model: str) -> str:
    """Returns the name by which a person would request a base model: the tiny policy, whose name alone brings
    its preset, is `tiny`.

    >>> spoken_name("/cache/models/tiny-e0f9931f736b"), spoken_name("/models/tiny-gpt2")
    ('tiny', '/models/tiny-gpt2')
    """
    return "tiny" if TINY_FOLDER.fullmatch(Path(base_model).name) else base_model


def with_trained_model(load: Callable[[str | None], Settings], number: int = 0) -> Settings:
    """Returns the settings with the model that was trained here if they name none. `load`: returns the
    settings for a model, which has its own preset; None: for the one that they name. `number`: of the
    policy."""
    settings = load(None)
    if settings.config.policy.model != "auto":
        return settings
    runs = runs_in(settings.paths.policy(number).checkpoints)
    trained = trained_model(runs, settings.model, named=settings.config.node.run)
    gone = Path(trained).is_absolute() and not Path(trained).is_dir()
    if trained == settings.model or gone:
        return settings
    return replace(load(trained), model_reason="trained in this home earlier; --model takes another")


def trained_model(known: Sequence[TrainingRun], model: str, *, named: str = "") -> str:
    """Returns the base model to evaluate or export if nobody named one: `model`, which a node would train,
    or, if no run is of it, that of the named run or the one that all runs share."""
    meant = [run for run in known if run.name == named] if named else known
    if not meant or is_trained(meant, model):
        return model
    return only_model(meant) or model


def is_trained(known: Sequence[TrainingRun], model: str, *, named: str = "") -> bool:
    """Returns True if there is a `trained_run`. Raises CheckpointError if no run has the name."""
    return trained_run(known, model, named=named) is not None


def trained_run(known: Sequence[TrainingRun], model: str, *, named: str = "") -> TrainingRun | None:
    """Returns the run that `newest_run` will find, as far as is known before the model is loaded. Raises
    CheckpointError if no run has the name."""
    if named and named not in {run.name for run in known}:
        raise no_such_run(named, known)
    # The tiny policy's folder has its digest in its name.
    wanted = Path(model).name

    def fits(run: TrainingRun) -> bool:
        if named or run.state is None or run.put_aside:
            return run.name == named
        base = Path(run.state.base_model).name
        return base == wanted or base.startswith(f"{wanted}-")

    return next(filter(fits, known), None)


def no_such_run(name: str, known: Iterable[TrainingRun]) -> CheckpointError:
    """Returns the error for a name that no run has."""
    names = ", ".join(run.name for run in known)
    hint = f"runs here: {names}" if names else "train first (`swarmnode join`, sn.run) in the same home"
    return CheckpointError(f"no {f'run {name}' if name else 'run'} in this home", hint=hint)


def label_of(tasks: Iterable[str]) -> str:
    """Returns the beginning of the name of a run that nobody named.

    >>> label_of(["sort", "my task"]), label_of("abcdefgh")
    ('my-task-sort', '8-tasks')
    """
    names = sorted(tasks)
    label = "-".join(names) if len(names) <= MOST_IN_NAME else f"{len(names)}-tasks"
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in label)
    return kept[:40].strip("-_") or "run"


def name_of_base(model: str, fingerprint: str) -> str:
    """Returns the name of a run that is named after its base: a pipeline's, or an old one.

    >>> name_of_base("owner/Some model", "1f2e")
    'Some-model-1f2e'
    """
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in Path(model).name if c.isascii())
    return f"{name[:40] or 'model'}-{fingerprint}"


def _named(known: Sequence[TrainingRun], fingerprint: str, name: str) -> Choice:
    run = next((run for run in known if run.name == name), None)
    if run is None:
        return Choice(name, f"run {name} starts from the base policy")
    if run.state is not None and run.state.base_fingerprint != fingerprint:
        raise CheckpointError(
            f"run {name} belongs to another model: {run.state.base_model}",
            hint="pass the model it was trained with (--model, model=), or another run",
        )
    return Choice(name)


def _told(name: str, fingerprint: str, tasks: Mapping[str, str], others: Sequence[TrainingRun]) -> str:
    """Returns the reason why a run begins, and what happens to the run that was most likely meant."""
    begins = f"run {name} starts from the base policy"
    if not others or others[0].state is None:
        return begins
    other, state = others[0], others[0].state
    kept = f"is kept at round {state.counters.round}; `swarmnode runs` lists it"
    if state.base_fingerprint != fingerprint:
        return f"{begins}; run {other.name}, of another model, {kept}"
    kept += f"; --run {other.name} continues it"
    if other.is_of(tasks):
        return f"{begins}; run {other.name}, with the same tasks, was named explicitly and {kept}"
    return f"{begins}: {other.difference(tasks)}; run {other.name} {kept}"


def _read_run(folder: Path) -> TrainingRun | None:
    """Returns the run in a folder. None: it holds no checkpoint of a whole policy."""
    rounds = sorted(folder.glob(f"{PREFIX}*"), reverse=True)
    for checkpoint in rounds:
        with suppress(CheckpointError, OSError):
            return TrainingRun(folder, read_state(checkpoint), (checkpoint / STATE).stat().st_mtime)
    with suppress(OSError):
        return TrainingRun(folder, None, folder.stat().st_mtime) if rounds else None
    return None
