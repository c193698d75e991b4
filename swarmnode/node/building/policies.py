"""Several policies in one process: a seat for each, their ports, and one ending for all.

config, paths -> [config_of] -> a Seat per policy -> run.py -> a NodeLoop per policy -> [ending]
                                                    |
                                      [choose_port], ports that are free

Each policy takes part in the exchange like any other node, with its own identity, ports, tasks, seed and
checkpoints. They share the loaded base model, one rollout engine and one training batch, and dial each other
first.
"""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from swarmnode.errors import ConfigError, PortInUse, StorageError, SwarmnodeError
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import Paths
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.node_status import Summary
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.settings.config import Config, NetworkConfig, NodeConfig
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.task import Task
from swarmnode.training.checkpoints.run_folders import runs_in, trained_model

logger = logging.getLogger(__name__)

LARGEST_PORT = 65535
SEEDS = 2**31
"""The number of seeds, from 0 on."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One policy's place in a process, before anything is loaded."""

    number: int
    config: Config
    """The settings of this policy."""
    paths: Paths
    key: NodeKey
    seed: int
    tasks: Mapping[str, Task]
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where each setting comes from."""

    @property
    def label(self) -> str:
        return label_of(self.number)


def label_of(number: int) -> str:
    """Returns the name of a policy in this process."""
    return f"policy-{number}"


@dataclass(slots=True)
class PolicyNode:
    """The node of one policy, once it is built, and the way to tell its neighbours here that it is gone."""

    seat: Seat
    loop: Callable[..., NodeLoop]
    """Makes the loop from these settings and this network."""
    network: Callable[[Seat], NetworkParts | None]
    """Called right before the start: only then is it known where the others listen."""
    leave: Callable[[], None]
    close_engine: Callable[[], None]
    """Releases its part of the engine; may wait for a step of the others. A built node does so itself."""
    stopping: bool = False
    node: NodeLoop | None = None

    def built(self, seat: Seat) -> NodeLoop:
        """Returns the node on its seat, which by now knows the others' addresses."""
        self.node = self.loop(seat.config, network=self.network(seat))
        if self.stopping:
            self.node.request_stop()
        return self.node

    def request_stop(self) -> None:
        self.stopping = True
        if self.node is not None:
            self.node.request_stop()


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run: the last line to print, and the process's exit code."""

    line: str
    exit_code: int = 0


def config_of(config: Config, number: int) -> Config:
    """Returns one policy's settings: its own tasks, seed and ports. Raises ConfigError if no port is left."""
    network, node, tasks = config.network, config.node, config.tasks
    if tasks.mixes:
        names = tuple(name.strip() for name in tasks.mixes[number % len(tasks.mixes)].split(","))
        tasks = tasks.model_copy(update={"names": names})
    if number:
        ports = [port + number if port else 0 for port in (network.port, node.http_port)]
        if max(ports) > LARGEST_PORT:
            raise ConfigError(
                f"policy {number} would listen on port {max(ports)}",
                hint="choose a smaller --port or node.http_port, or leave it out",
            )
        # An announced address is a forwarded port, and one port leads to one policy.
        network = network.model_copy(update={"port": ports[0], "announce": ()})
        seed = None if node.seed is None else (node.seed + number) % SEEDS
        node = node.model_copy(update={"seed": seed, "http_port": ports[1]})
    return config.model_copy(update={"network": network, "node": node, "tasks": tasks})


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


def check_policies(config: Config) -> None:
    """Raises ConfigError if settings contradict each other across the policies."""
    network, node, mixes = config.network, config.node, config.tasks.mixes
    if len(mixes) > node.policies:
        raise ConfigError(
            f"tasks.mixes has {len(mixes)} entries for {node.policies} "
            + ("policies" if node.policies > 1 else "policy"),
            hint=f"pass --policies {len(mixes)} to train one on each, or shorten tasks.mixes",
        )
    if network.port and node.http_port and abs(network.port - node.http_port) < node.policies:
        raise ConfigError(
            f"--port {network.port} and node.http_port = {node.http_port} are too close: policy k uses"
            " both plus k",
            hint=f"keep them at least {node.policies} apart",
        )


def introduced(seat: Seat, addresses: Sequence[str]) -> Seat:
    """Returns a seat that dials the running policies of this process, so they meet even if they are alone."""
    network = seat.config.network
    network = network.model_copy(update={"seeds": (*network.seeds, *addresses)})
    return replace(seat, config=seat.config.model_copy(update={"network": network}))


def local_address(seat: Seat, addresses: Sequence[str]) -> str | None:
    """Returns the address by which others in this process reach a policy that listens on `addresses`."""
    network = seat.config.network
    host = "127.0.0.1" if network.listen == "0.0.0.0" else network.listen
    # A configured port comes first: if something is announced, the addresses are a router's.
    port = network.port or port_of(addresses)
    return f"/ip4/{host}/tcp/{port}/p2p/{seat.key.peer_id}" if port else None


def ending(seats: Sequence[Seat], outcomes: Sequence[Summary | BaseException]) -> Ending:
    """Returns the last line: one policy's summary, or for several the outcome of each and the totals.

    If no policy ended well, raises the error of one of them: a defect of ours rather than an error that
    people can do something about. Otherwise the exit code is that of the worst outcome.
    """
    errors = [plain_error(one) for one in outcomes if isinstance(one, BaseException)]
    defects = [error for error in errors if not isinstance(error, SwarmnodeError)]
    done = [one for one in outcomes if isinstance(one, Summary)]
    if not done:
        raise [*defects, *errors][0]
    code = StorageError.exit_code if any(summary.not_saved for summary in done) else 0
    if len(seats) == 1:
        return Ending(msgspec.json.encode(done[0]).decode(), code)
    policies = [_entry(seat, outcome) for seat, outcome in zip(seats, outcomes, strict=True)]
    totals = {
        "rounds": sum(summary.rounds for summary in done),
        "tokens": sum(summary.tokens for summary in done),
        "seconds": max(summary.seconds for summary in done),
        "failed": len(errors),
    }
    code = 1 if defects else next((e.exit_code for e in errors if isinstance(e, SwarmnodeError)), code)
    return Ending(msgspec.json.encode({"policies": policies, "totals": totals}).decode(), code)


def plain_error(error: BaseException) -> BaseException:
    """Returns the first error of a group that is meant for people, else its first error.

    >>> plain_error(ExceptionGroup("two tasks", [ExceptionGroup("one", [ValueError("7")]), KeyError(8)]))
    ValueError('7')
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast(BaseExceptionGroup[BaseException], error)
    return plain_error((group.subgroup(SwarmnodeError) or group).exceptions[0])


def _entry(seat: Seat, outcome: Summary | BaseException) -> dict[str, Any]:
    if isinstance(outcome, Summary):
        return asdict(outcome)
    error = plain_error(outcome)
    text = str(error) if isinstance(error, SwarmnodeError) else f"{type(error).__name__}: {error}"
    return {"peer": seat.key.peer_id, "error": text}


# ---- ports ----


def check_status_port(node: NodeConfig) -> None:
    """Raises PortInUse if the status port is taken, before the model is loaded for nothing."""
    if node.http_port and not _is_free(node.http, node.http_port):
        raise PortInUse(
            f"the status page cannot listen on {node.http}:{node.http_port}",
            hint="choose another port: --set node.http_port=..., or 0 for any free one",
        )


def choose_port(network: NetworkConfig, paths: Paths) -> int:
    """Returns the port to listen on: the configured one, else last time's if it is free, else 0 for any.

    Call it right before listening. Raises PortInUse if a configured port is taken. A steady port keeps
    remembered addresses valid.
    """
    if not _is_free(network.listen, network.port):
        raise PortInUse(
            f"port {network.port or '(any)'} on {network.listen} is in use or not allowed",
            hint="choose another --port, or leave it out for any free one; network.listen must be an address"
            " of this machine",
        )
    if network.port:
        return network.port
    remembered = _remembered_port(paths)
    if remembered and _is_free(network.listen, remembered):
        return remembered
    if remembered:
        logger.info("port %d, used last time, is taken; listening on another one", remembered)
    return 0


def remember_port(paths: Paths, addresses: tuple[str, ...]) -> None:
    """Stores the TCP port that the host listens on, for the next start."""
    if (port := port_of(addresses)) is not None:
        paths.state.mkdir(parents=True, exist_ok=True)
        _port_file(paths).write_text(str(port))


def port_of(addresses: Sequence[str]) -> int | None:
    """Returns the TCP port in the first address that has one.

    >>> port_of(["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW..."])
    4001
    """
    return next((int(a.split("/tcp/")[1].split("/")[0]) for a in addresses if "/tcp/" in a), None)


def _remembered_port(paths: Paths) -> int | None:
    try:
        port = int(_port_file(paths).read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port < 65536 else None


def _port_file(paths: Paths) -> Path:
    return paths.state / "port"


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False
