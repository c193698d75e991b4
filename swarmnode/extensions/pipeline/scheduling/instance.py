"""The input of scheduling: nodes with speeds and slots, links, stages, and the rules of skipping.

measured costs, or a file -> [Instance] -> schedule -> Plan -> simulate

A node is its index; a stage is a tuple of nodes that hold equal weights. Stage 0 holds the embedding, the
first layers, the head and the loss: every micro-batch starts and ends at one of its nodes, its data node.
All times are seconds of one micro-batch.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path

import msgspec

from swarmnode.errors import ConfigError

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Bound of an instance file: enough digits for a matrix of MAX_NODES x MAX_NODES."""

MAX_NODES = 512
"""Largest number of nodes. Planning for more would take minutes: split them into two pipelines."""

MAX_AGENTS = 8192
"""Largest number of micro-batches in flight in one plan, so that an announcement cannot make us compute for a
long time."""

Matrix = tuple[tuple[float, ...], ...]

Route = tuple[int, ...]
"""The nodes of an agent in order of visit, starting with its data node."""


@dataclass(frozen=True, slots=True)
class Instance:
    """The complete input of a plan. Raises ConfigError on construction if it contradicts itself.

    >>> link = ((0.0, 1.0), (1.0, 0.0))
    >>> Instance(("a", "b"), (1.0, 1.0), link, (1, 1), stages=((0,), (1,)), path_length=2, waves=1).node_count
    2
    """

    names: tuple[str, ...]
    """Names of the nodes, for people."""
    forward_s: tuple[float, ...]
    """By node, the seconds of one micro-batch's forward pass through the node's stage."""
    hop_s: Matrix
    """[i][j]: seconds to send one activation, or its gradient, from node i to node j. Links do not slow each
    other down."""
    memory: tuple[int, ...]
    """By node, its slots: micro-batches between their forward and backward passes."""
    stages: tuple[tuple[int, ...], ...]
    """The nodes of each stage. Stage 0 consists of the data nodes. A node may be in no stage."""
    path_length: int
    """Number of stages that a micro-batch visits, including stage 0."""
    waves: int
    """Micro-batches of each agent in one iteration, one after the other on the same path."""
    backward_factor: float = 1.5
    """Backward time divided by forward time."""
    loss_factor: float = 0.25
    """Time of head and loss at the data node, divided by its forward time."""
    gap_s: float = 0.13
    """Seconds after each task during which a node is not available: launches, copies."""
    first_gap_s: float = 0.09
    """The same gap after a data node's first forward pass of a micro-batch."""
    max_gap: int = 4
    """Largest step between the numbers of consecutive visited stages."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ConfigError(f"not a pipeline instance: {problem}")

    @property
    def node_count(self) -> int:
        return len(self.names)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each node; -1 for a node in no stage."""
        return stage_of(self.stages, self.node_count)

    @property
    def gap_binds(self) -> bool:
        """True if `max_gap` forbids some sets of stages that have the right number."""
        return self.max_gap < len(self.stages) - self.path_length + 1

    def slots(self, stage: int) -> int:
        """Return the number of micro-batches that the nodes of a stage can hold at once."""
        return sum(self.memory[node] for node in self.stages[stage])

    def by_stage(self) -> list[int]:
        """Return all nodes by stage, in the order listed within each stage. Nodes in no stage come last."""
        placed = [node for nodes in self.stages for node in nodes]
        return placed + sorted(set(range(self.node_count)) - set(placed))


@lru_cache(maxsize=64)
def stage_of(stages: tuple[tuple[int, ...], ...], node_count: int) -> tuple[int, ...]:
    """Return the stage of each node; -1 for a node in no stage."""
    found = [-1] * node_count
    for stage, nodes in enumerate(stages):
        for node in nodes:
            found[node] = stage
    return tuple(found)


def agents(instance: Instance) -> tuple[int, ...]:
    """Return the data node of every agent, i.e. of every micro-batch in flight: as many as the slots allow.

    A data node has an agent for each of its slots. If the other stages cannot hold the visits of that many
    agents, the data nodes with the most agents give some up, the last of them first. A agents need
    A * (path_length - 1) visits, at most one per agent and stage, hence sum over stages of min(slots, A) >=
    A * (path_length - 1).
    """
    counts = [instance.memory[node] for node in instance.stages[0]]
    others = [instance.slots(stage) for stage in range(1, len(instance.stages))]
    while sum(min(s, sum(counts)) for s in others) < sum(counts) * (instance.path_length - 1):
        most = max(counts)
        counts[max(i for i, count in enumerate(counts) if count == most)] -= 1
    return tuple(node for node, count in zip(instance.stages[0], counts, strict=True) for _ in range(count))


def turns_of(data_nodes: Iterable[int]) -> list[int]:
    """Return each agent's turn (0, 1, ...) among the agents of the same data node."""
    seen: Counter[int] = Counter()
    turns: list[int] = []
    for node in data_nodes:
        turns.append(seen[node])
        seen[node] += 1
    return turns


def least_visits(instance: Instance, agent_count: int) -> tuple[int, ...]:
    """Return the visits per wave that each stage needs to learn as fast as the others. All agents visit
    stage 0.

    The visits beyond stage 0 are divided evenly and rounded down. A stage with fewer slots than that needs
    only as many visits as it has slots.
    """
    others = len(instance.stages) - 1
    share = agent_count * (instance.path_length - 1) // others if others else 0
    return (agent_count, *(min(share, instance.slots(stage)) for stage in range(1, others + 1)))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of an instance file, JSON or TOML, mapped to the fields of `Instance`."""

    hop_s: Matrix = msgspec.field(name="delays")
    forward_s: tuple[float, ...] = msgspec.field(name="comp")
    memory: int | tuple[int, ...]
    path_length: int = msgspec.field(name="path_len")
    stages: tuple[tuple[int, ...], ...]
    waves: int = 1
    about: str = ""
    names: tuple[str, ...] = msgspec.field(name="locations", default=())
    backward_factor: float = 1.5
    loss_factor: float = 0.25
    gap_s: float = 0.13
    first_gap_s: float = 0.09
    max_gap: int = 4


def load_instance(path: Path) -> Instance:
    """Read an instance: `delays` [i][j] s, `comp` s, `memory`, `path_len`, `stages`, `waves`, `locations`.

    The file is TOML if its name ends in .toml, otherwise JSON. The other keys are the fields of `Instance`
    under their own names. Raises ConfigError if the file cannot be read, is too large, has an unknown key or
    contradicts itself.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="that is no instance")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the instance {path}: {error.strerror}",
            hint="name a JSON or TOML file, such as benchmarks/instances/geo20_skip33.json",
        ) from error
    return parse_instance(data, toml=path.suffix == ".toml", where=str(path))


def parse_instance(data: bytes, *, toml: bool = False, where: str = "the instance") -> Instance:
    """Read an instance from bytes, like `load_instance`. Raises ConfigError."""
    try:
        if toml:
            return _from_file(msgspec.convert(tomllib.loads(data.decode()), _File))
        return _from_file(msgspec.json.decode(data, type=_File))
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "keys: delays, comp, memory, path_len, stages, waves (see benchmarks/instances)"
        raise ConfigError(f"{where}: {error}", hint=hint) from error


def _from_file(file: _File) -> Instance:
    fields = msgspec.structs.asdict(file)
    del fields["about"]
    count = len(file.forward_s)
    fields["names"] = file.names or tuple(f"node{i}" for i in range(count))
    if isinstance(file.memory, int):
        fields["memory"] = (file.memory,) * count
    return Instance(**fields)


def _problems(instance: Instance) -> Iterator[str]:
    count = len(instance.names)
    if not 1 <= count <= MAX_NODES:
        yield f"{count} nodes, there may be 1 to {MAX_NODES}"
    if len(instance.forward_s) != count or len(instance.memory) != count:
        yield f"{count} names, {len(instance.forward_s)} speeds, {len(instance.memory)} memories"
    if not _is_square(instance.hop_s, count):
        yield f"the links are no {count} x {count} matrix of finite seconds >= 0"
    if not all(isfinite(s) and s > 0 for s in instance.forward_s):
        yield "a forward time is not a positive number of seconds"
    if not all(m >= 1 for m in instance.memory):
        yield "every node needs memory for at least one micro-batch"
    scalars = (instance.backward_factor, instance.loss_factor, instance.gap_s, instance.first_gap_s)
    if not all(isfinite(s) and s >= 0 for s in scalars):
        yield "a factor or a gap is negative or not finite"
    if instance.max_gap < 1 or instance.waves < 1:
        yield "max_gap and waves must be >= 1"
    yield from _stage_problems(instance, count)


def _stage_problems(instance: Instance, count: int) -> Iterator[str]:
    placed = [node for nodes in instance.stages for node in nodes]
    if not instance.stages or not all(instance.stages):
        yield "there is no stage, or one without a node"
    if not all(0 <= node < count for node in placed):
        yield f"a stage names a node outside 0..{count - 1}"
    if len(set(placed)) != len(placed):
        yield "a node is in two stages"
    if not 1 <= instance.path_length <= len(instance.stages):
        yield f"path_length {instance.path_length}, but there are {len(instance.stages)} stages"
    if sum(instance.memory[node] for node in instance.stages[0]) > MAX_AGENTS:
        yield f"more than {MAX_AGENTS} micro-batches in flight"


def _is_square(matrix: Matrix, count: int) -> bool:
    return len(matrix) == count and all(
        len(row) == count and all(isfinite(value) and value >= 0 for value in row) for row in matrix
    )
