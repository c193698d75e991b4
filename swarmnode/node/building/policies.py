"""Several policies in one process: a seat for each, and its node.

config, paths -> [config_of] -> a Seat per policy -> members.py -> [PolicyNode.build] -> a NodeLoop per policy

Each policy takes part in the exchange like any other node, with its own identity, ports, tasks, seed and
checkpoints. They share the loaded base model, one rollout engine and one training batch, and dial each other
first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnode.errors import ConfigError
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.ports import LARGEST_PORT, port_of
from swarmnode.machine.storage import Paths
from swarmnode.node.node import NodeLoop
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.settings.config import Config
from swarmnode.tasks.task import Task

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

    def with_seeds(self, addresses: Sequence[str]) -> "Seat":
        """Returns a seat that dials the running policies of this process, so they meet even if they are
        alone."""
        network = self.config.network
        network = network.model_copy(update={"seeds": (*network.seeds, *addresses)})
        return replace(self, config=self.config.model_copy(update={"network": network}))


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

    def build(self, addresses: Sequence[str]) -> NodeLoop:
        """Returns the node, which dials the policies of this process at these addresses."""
        seat = self.seat.with_seeds(addresses)
        self.node = self.loop(seat.config, network=self.network(seat))
        if self.stopping:
            self.node.request_stop()
        return self.node

    def request_stop(self) -> None:
        self.stopping = True
        if self.node is not None:
            self.node.request_stop()


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


def local_address(seat: Seat, addresses: Sequence[str]) -> str | None:
    """Returns the address by which others in this process reach a policy that listens on `addresses`."""
    network = seat.config.network
    host = "127.0.0.1" if network.listen == "0.0.0.0" else network.listen
    # A configured port comes first: if something is announced, the addresses are a router's.
    port = network.port or port_of(addresses)
    return f"/ip4/{host}/tcp/{port}/p2p/{seat.key.peer_id}" if port else None
