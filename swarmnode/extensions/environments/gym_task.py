"""Data sets of reasoning-gym as tasks, each judged by its own `score_answer`.

reasoning-gym:NAME?max_digits=3 -> [load_gym] -> GymTask -> draw_round

An example is what reasoning-gym draws for (seed, index), on every node alike: the version of the package, the
parameters and the first questions are part of the task's version, so two installations that draw differently
never exchange. The answer is what stands between <answer> and </answer>, where a completion has
them, else all of it.
"""

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from swarmnode.errors import TaskError, where
from swarmnode.machine.installing import how_to_install
from swarmnode.tasks.drawing.curriculum import MAX_LEVELS, level_of
from swarmnode.tasks.judging.answers import tagged
from swarmnode.tasks.kinds.data import with_system
from swarmnode.tasks.kinds.tables import MAX_ROW_BYTES
from swarmnode.tasks.optional_packages import extra_module
from swarmnode.tasks.rows import read_row
from swarmnode.tasks.specs import TaskSpec
from swarmnode.tasks.task import MAX_INDEX
from swarmnode.tasks.task_source import TaskSource
from swarmnode.types import Example, ExampleKey

OWN_OPTIONS = ("system", "private", "curriculum")
OURS = ("seed", "size")
"""Parameters of every data set that the node sets itself."""

FIRST_ENTRIES = 4
"""Number of first questions whose digest is part of the version."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GymTask:
    """One data set with its parameters. Endless but for MAX_INDEX questions a seed."""

    name: str
    version: str
    gym: Any
    parameters: Mapping[str, Any]
    system: str | None = None
    exchangeable: bool = True
    levels: int = 1
    """Levels that seeds may name; one where no curriculum was asked for."""
    _told: set[str] = field(default_factory=set[str])
    _judges: list[Any] = field(default_factory=list[Any])
    """Data sets that score, made on first use: some take seconds."""

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the questions that the data set draws from this seed. Raises TaskError."""
        entries: dict[int, Any] = {}
        for index in range(MAX_INDEX):
            key = ExampleKey(self.name, self.version, seed, index)
            level = level_of(seed, index, self.levels)
            if level not in entries:
                at = {**self.parameters, "level": level} if self.levels > 1 else self.parameters
                entries[level] = made(self.gym, self.name, at, gym_seed(self.name, seed))
            yield self._example(drawn(entries[level], index, self.name), key)

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the data set's own score of each answer, None if it cannot score one."""
        if not self._judges:
            self._judges.append(made(self.gym, self.name, self.parameters, 0))
        return [{"score_answer": self._score(tagged(text), example.columns)} for text in completions]

    def _example(self, entry: Mapping[str, Any], key: ExampleKey) -> Example:
        question = str(entry["question"])
        if len(question) > MAX_ROW_BYTES:
            raise TaskError(
                f"{self.name} asks a question of {len(question)} characters", hint="make it smaller"
            )
        prompt = question if self.system is None else with_system(self.system, question, self.name)
        return read_row({**entry, "prompt": prompt}, key, self.name)

    def _score(self, answer: str, entry: Mapping[str, Any]) -> float | None:
        try:
            return float(self._judges[0].score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001  an answer that its parser does not expect: unknown, not zero
            what = type(error).__name__
            if what not in self._told:
                self._told.add(what)
                logger.warning("%s cannot score %.80r: %r. %s", self.name, answer, error, where(error))
            return None


def load_gym(spec: TaskSpec) -> GymTask:
    """Loads `reasoning-gym:NAME`, its parameters behind a question mark. Raises TaskError."""
    install = how_to_install("tasks")
    gym = extra_module("reasoning_gym", install, spec)
    known: Mapping[str, Any] = extra_module("reasoning_gym.factory", install, spec).DATASETS
    if spec.name not in known:
        close = difflib.get_close_matches(spec.name, known, n=1)
        raise TaskError(
            f"reasoning-gym has no data set {spec.name!r}",
            hint=f"did you mean {close[0]}?" if close else f"it has {len(known)}, such as {min(known)}",
        )
    parameters = {key: read_value(str(spec.one(key))) for key in spec.options if key not in OWN_OPTIONS}
    for key in OURS:
        if key in parameters:
            raise TaskError(f"{spec}: {key} is set by the node", hint="leave it out: seeds differ by round")
    system = spec.one("system")
    levels = _levels(gym, spec, parameters) if spec.flag("curriculum") else 1
    digest = _digest(gym, spec.name, {**parameters, **({"levels": levels} if levels > 1 else {})}, system)
    may_leave = not spec.flag("private")
    return GymTask(spec.name, digest, gym, parameters, system, exchangeable=may_leave, levels=levels)


def _levels(gym: Any, spec: TaskSpec, parameters: Mapping[str, Any]) -> int:
    """Returns the number of levels in the data set's curriculum. Raises TaskError if it has none."""
    if "level" in parameters:
        raise TaskError(
            f"{spec}: a level is named, but the curriculum changes it", hint="leave out one of the two"
        )
    try:
        attributes = gym.factory.create_curriculum(spec.name).attributes
    except (KeyError, ValueError) as error:
        raise TaskError(f"{spec} has no curriculum: {error}", hint="leave out curriculum") from error
    return min(MAX_LEVELS, max(len(one.levels) for one in attributes.values()))


def made(gym: Any, name: str, parameters: Mapping[str, Any], seed: int) -> Any:
    """Returns the data set of one seed. Raises TaskError for parameters that it does not take."""
    given = {key: value for key, value in parameters.items() if key not in ("level", "levels")}
    try:
        if "level" in parameters:
            given = {**_at_level(gym, name, parameters["level"]), **given}
        return gym.create_dataset(name, **{**given, "seed": seed, "size": MAX_INDEX})
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(
            f"reasoning-gym:{name} does not take {dict(parameters)}: {error}",
            hint="its parameters are `level` and the fields of its configuration in reasoning-gym",
        ) from error


def _at_level(gym: Any, name: str, level: Any) -> dict[str, Any]:
    """Returns the parameters at a level of the data set's curriculum, counted from 0; levels past the highest
    stand for the highest."""
    if isinstance(level, bool) or not isinstance(level, int) or level < 0:
        raise ValueError("level must be a number from 0")
    curriculum = gym.factory.create_curriculum(name)
    curriculum.set_global_level(level)
    configuration: object = curriculum.generate_configuration()
    return dict(vars(configuration))


def drawn(entries: Any, index: int, name: str) -> Mapping[str, Any]:
    """Returns one entry. Raises TaskError."""
    try:
        return entries[index]
    except Exception as error:
        raise TaskError(
            f"reasoning-gym:{name} cannot draw questions: {error!r}", hint=where(error)
        ) from error


def gym_seed(name: str, seed: int) -> int:
    """Returns a seed that suits every generator. reasoning-gym draws number i of seed s from s + i, so seeds
    of ours that follow each other must lie far apart.

    >>> gym_seed("chain_sum", 0) != gym_seed("chain_sum", 1)
    True
    """
    digest = hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**32 - MAX_INDEX)


def read_value(text: str) -> Any:
    """Returns a parameter's value, read as JSON if it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _digest(gym: Any, name: str, parameters: Mapping[str, Any], system: str | None) -> str:
    try:
        package = version("reasoning-gym")
    except PackageNotFoundError:
        package = "unknown"
    entries = made(gym, name, parameters, gym_seed(name, 0))
    first = [drawn(entries, index, name) for index in range(FIRST_ENTRIES)]
    questions = [(entry["question"], entry["answer"]) for entry in first]
    text = repr((package, name, sorted(parameters.items()), system, questions))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


REASONING_GYM = TaskSource(
    load_gym,
    "a data set of reasoning-gym",
    needs="reasoning_gym",
    options=frozenset({"system"}),
    same_hashes=True,  # Some of its data sets draw in the order of a set, and users cannot mend that code.
)
