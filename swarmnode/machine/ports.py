"""The ports of this machine that a node listens on.

settings, the port of last time -> [choose_port] -> listening -> [remember_port] -> the next start
"""

import logging
import socket
from collections.abc import Sequence

from swarmnode.errors import PortInUse
from swarmnode.machine.storage import Paths
from swarmnode.settings.config import NetworkConfig, NodeConfig

logger = logging.getLogger(__name__)

LARGEST_PORT = 65535
PORT_FILE = "port"
"""Name of the file in the state folder with the port of last time."""


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
        (paths.state / PORT_FILE).write_text(str(port))


def port_of(addresses: Sequence[str]) -> int | None:
    """Returns the TCP port in the first address that has one.

    >>> port_of(["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW..."])
    4001
    """
    return next((int(a.split("/tcp/")[1].split("/")[0]) for a in addresses if "/tcp/" in a), None)


def _remembered_port(paths: Paths) -> int | None:
    try:
        port = int((paths.state / PORT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return port if 0 < port <= LARGEST_PORT else None


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False
