"""A real swarm on one machine: one `swarmnode join` process per node, on loopback.

cli swarm -> [run_local_swarm] -> N processes -> their last lines and metrics -> swarm_story.py

Keys and ports are made beforehand, so that every node knows the first one's address before it is up. Unless a
model or tasks are named, the nodes are specialists: each knows other things
(extensions/trial_swarm/specialists.py). They are built once, into the folder where nodes keep their models.

With `homes` each node runs behind a router of its own (nat_lab.py) and knows only a seed between.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.extensions.trial_swarm.nat_lab import Lab, stop
from swarmnode.extensions.trial_swarm.swarm_story import lines_of, read_story
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import make_folder, resolve_paths
from swarmnode.settings.config_layers import load_config

PROGRAM = (sys.executable, "-P", "-m", "swarmnode")
"""-P: a file called random.py where the person happens to be must not be taken for the library's."""
LAST_LINES = 20
"""Kept of each node, to show when it fails."""
REPORTED = ("peer", "reward_first", "reward_last", "external_groups_trained")
ALONE = ("exchange.enabled=false",)
"""A node without the others, at its best: it replays its own right answers as it would replay theirs."""


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    nodes: int
    rounds: int
    seed: int
    model: str | None = None
    tasks: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()
    compare_alone: bool = False
    """Each node is run once more without the others."""
    homes: bool = False
    """Each node in a home of its own, which nobody can dial."""

    @property
    def specialists(self) -> bool:
        """True if each node starts from a policy of its own, taught on some of the built-in tasks."""
        return not (self.model or self.tasks)


@dataclass(slots=True)
class LocalNode:
    """One member: where it lives, and its process once started."""

    home: Path
    key: NodeKey
    port: int
    model: str
    """A folder, or what else `join` takes for one."""
    label: str
    """The word before each of its lines."""
    prefix: tuple[str, ...] = ()
    """Words before its command line: where it runs."""
    process: subprocess.Popen[str] | None = None
    last_line: str = ""
    story: deque[str] = field(default_factory=lambda: deque[str](maxlen=LAST_LINES))

    @property
    def logs(self) -> Path:
        return resolve_paths(self.home).logs

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.key.peer_id}"


def run_local_swarm(plan: SwarmPlan, home: Path | None, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all nodes to their end; returns their results in order. Raises SwarmnodeError when one fails; then
    none is run alone."""
    if load_config(assignments=plan.assignments).config.node.policies > 1:
        raise ConfigError(
            "each node of a local swarm has one policy",
            hint="leave out node.policies and raise --nodes, or use `swarmnode join --policies`",
        )
    with ExitStack() as stack:
        root = stack.enter_context(_folder(home))
        lab = stack.enter_context(Lab()) if plan.homes else None
        models = _models(plan, home, show)
        nodes = [_prepare(root / f"node-{number}", model) for number, model in enumerate(models)]
        seed = None
        if lab is not None:
            seed = stack.enter_context(_seed(lab, root / "seed"))
            for node in nodes:
                node.prefix = lab.home()[0].prefix
        _run(nodes, [arguments(plan, nodes, number, seed) for number in range(plan.nodes)], show)
        for node in nodes:
            _summary(node)
        if not plan.compare_alone:
            return [_result(node, None, show) for node in nodes]
        show("now each node on its own")
        twins = [
            _prepare(root / f"alone-{number}", node.model, f"{node.key.name}, alone,")
            for number, node in enumerate(nodes)
        ]
        _run(twins, [arguments_alone(plan, twins, number) for number in range(plan.nodes)], show)
        return [_result(node, twin, show) for node, twin in zip(nodes, twins, strict=True)]


def arguments(plan: SwarmPlan, nodes: list[LocalNode], number: int, seed: str | None = None) -> list[str]:
    """The `join` command line of one node. All know the seed's address; without a seed all but the first know
    the first one's."""
    if seed is not None:
        settings = ["network.wait_for_peers=1", *plan.assignments]
        return [seed, *_arguments(plan, nodes[number], number, settings)]
    settings = ["network.listen=127.0.0.1", f"network.wait_for_peers={len(nodes) - 1}", *plan.assignments]
    address = [nodes[0].address] if number else []
    return [*address, *_arguments(plan, nodes[number], number, settings)]


def arguments_alone(plan: SwarmPlan, twins: list[LocalNode], number: int) -> list[str]:
    """Returns the `join` command line of a node without the others: same model, seed and settings."""
    return _arguments(plan, twins[number], number, [*plan.assignments, *ALONE])


def _arguments(plan: SwarmPlan, node: LocalNode, number: int, settings: Sequence[str]) -> list[str]:
    return [
        *("--home", str(node.home), "--port", str(node.port), "--model", node.model),
        *(["--preset", "tiny"] if plan.model in (None, "tiny") else []),
        *("--rounds", str(plan.rounds), "--seed", str(plan.seed + number)),
        *[part for task in plan.tasks for part in ("--task", task)],
        *[part for setting in settings for part in ("--set", setting)],
    ]


def _run(nodes: list[LocalNode], options: list[list[str]], show: Callable[[str], None]) -> None:
    """All of them at once, to their end."""
    try:
        readers = [
            thread for node, its in zip(nodes, options, strict=True) for thread in _start(node, its, show)
        ]
        for thread in readers:
            thread.join()
        for node in nodes:
            assert node.process is not None
            node.process.wait()
    finally:
        stop(*(node.process for node in nodes if node.process is not None))


@contextmanager
def _folder(home: Path | None) -> Generator[Path, None, None]:
    if home is not None:
        yield home.expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-") as temporary:
        yield Path(temporary)


def _prepare(home: Path, model: str, label: str | None = None) -> LocalNode:
    key = load_or_create(resolve_paths(home).identity)
    return LocalNode(home, key, _free_port(), model, label or key.name)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def _seed(lab: Lab, home: Path) -> Generator[str, None, None]:
    """A seed on a public machine; gives its address. Raises SwarmnodeError."""
    make_folder(home)
    with (home / "errors.log").open("w") as errors:
        process = lab.public().start(
            [*PROGRAM, "seed", "--home", str(home)], stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                address = process.stdout.readline().strip()
                if not address:
                    raise SwarmnodeError("the seed did not start", hint=f"see {home / 'errors.log'}")
                yield address
            finally:
                stop(process)


def _models(plan: SwarmPlan, home: Path | None, show: Callable[[str], None]) -> list[str]:
    """The model of each node. Those that are built lie where the next run finds them."""
    if plan.model not in (None, "tiny"):
        return [plan.model] * plan.nodes
    folder = resolve_paths(None if home is None else home / "shared").models
    if plan.specialists:
        from swarmnode.extensions.trial_swarm.specialists import build_specialists

        show("building policies that know different things, unless cached from an earlier run")
        return [str(path) for path in build_specialists(folder, plan.nodes)]
    from swarmnode.extensions.demonstration.tiny import build_tiny

    show("building the tiny policy, once for all nodes")
    return [str(build_tiny(folder))] * plan.nodes


def _start(node: LocalNode, options: list[str], show: Callable[[str], None]) -> list[threading.Thread]:
    node.process = subprocess.Popen(
        [*node.prefix, *PROGRAM, "join", *options],
        # A Ctrl-C in the terminal is for us; the nodes are then asked once, by us.
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def keep_last(line: str) -> None:
        node.last_line = line

    def tell(line: str) -> None:
        node.story.append(line)
        show(f"{node.label}  {line}")

    threads = [
        threading.Thread(target=_read_lines, args=(stream, use), daemon=True)
        for stream, use in ((node.process.stdout, keep_last), (node.process.stderr, tell))
    ]
    for thread in threads:
        thread.start()
    return threads


def _read_lines(stream: Any, use: Callable[[str], None]) -> None:
    for line in stream:
        if line.strip():
            use(line.rstrip())


def _result(node: LocalNode, twin: LocalNode | None, show: Callable[[str], None]) -> dict[str, Any]:
    """Returns the result of one node, and tells it in words."""
    summary, of_twin = _summary(node), None if twin is None else _summary(twin)
    story = read_story(node.logs, summary["run"])
    alone = None if twin is None or of_twin is None else read_story(twin.logs, of_twin["run"])
    for line in lines_of(node.key.name, story, alone):
        show(line)
    result = {name: summary[name] for name in REPORTED}
    result |= {"knew": story.knew, "learnt": story.learnt, "answers_of_others": story.replayed_from_others}
    return result if of_twin is None else result | {"alone_reward_last": of_twin["reward_last"]}


def _summary(node: LocalNode) -> dict[str, Any]:
    """The last line that a node printed. Raises SwarmnodeError when it failed."""
    assert node.process is not None
    if node.process.returncode != 0:
        last = node.story[-1] if node.story else "it printed nothing"
        raise SwarmnodeError(
            f"node {node.label} ended with exit code {node.process.returncode}: {last}",
            hint=f"its log is in {node.logs}",
        )
    return json.loads(node.last_line)
