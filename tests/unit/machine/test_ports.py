"""Which port a node listens on, and when that is refused."""

import socket
from pathlib import Path

import pytest

from swarmnode.errors import PortInUse
from swarmnode.machine.ports import choose_port, remember_port
from swarmnode.machine.storage import resolve_paths
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import load_config


def settings(*assignments: str) -> Config:
    return load_config(environ={}, assignments=assignments).config


def test_a_port_that_is_set_and_taken_is_refused_whatever_was_free_last_time(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        remember_port(paths, (f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}",))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        network = settings("network.listen=127.0.0.1", f"network.port={taken.getsockname()[1]}").network
        with pytest.raises(PortInUse, match="is in use or not allowed"):
            choose_port(network, paths)


def test_an_address_of_another_machine_is_no_address_to_listen_on(tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match=r"port \(any\) on 203\.0\.113\.9"):
        choose_port(settings("network.listen=203.0.113.9").network, resolve_paths(tmp_path))
