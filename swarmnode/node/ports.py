"""Which TCP ports a node listens on.

config, paths -> [ports] -> run.py
"""

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from swarmnode.config import NetworkConfig, NodeConfig
from swarmnode.errors import PortInUse
from swarmnode.paths import Paths

logger = logging.getLogger(__name__)


def check_status_port(node: NodeConfig) -> None:
    """Raises PortInUse for a status port that is taken, before the model is loaded for nothing."""
    if node.http_port and not _is_free(node.http, node.http_port):
        raise PortInUse(
            f"the status page cannot listen on {node.http}:{node.http_port}",
            hint="choose another --set node.http_port=..., or 0 for any free one",
        )


def choose_port(network: NetworkConfig, paths: Paths) -> int:
    """The port to listen on: the one that is set, else last time's if it is free, else 0: any.

    To be asked right before listening. Raises PortInUse for a set port that is taken. A steady port keeps
    remembered addresses valid.
    """
    remembered = _remembered_port(paths)
    for port in (network.port, remembered):
        if port and _is_free(network.listen, port):
            return port
    if network.port:
        raise PortInUse(
            f"port {network.port} on {network.listen} is in use or not allowed",
            hint="choose another --port, or leave it out for any free one",
        )
    if remembered:
        logger.info("port %d of last time is taken; listening on another one", remembered)
    return 0


def remember_port(paths: Paths, addresses: tuple[str, ...]) -> None:
    """Keep the TCP port that the host listens on for the next start."""
    if (port := port_of(addresses)) is not None:
        paths.state.mkdir(parents=True, exist_ok=True)
        _port_file(paths).write_text(str(port))


def port_of(addresses: Sequence[str]) -> int | None:
    """The TCP port in the first address that has one.

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
