"""The parts of the hivemind wheel that we use: the daemon's executable and its messages.

[find_daemon] -> daemon_process.py;   [load_messages] -> control_client.py
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from swarmnode.errors import NetworkError
from swarmnode.machine.installing import how_to_install


def find_daemon() -> Path:
    """Returns the p2pd executable. Raises NetworkError when hivemind, or its daemon for this platform, is
    missing."""
    return _find("hivemind_cli/p2pd", "the go-libp2p daemon (p2pd)")


@cache
def load_messages() -> Any:
    """Returns the module with the daemon's protobuf messages (p2pd_pb2). It is generated code without
    types."""
    path = _find("proto/p2pd_pb2.py", "the messages of the go-libp2p daemon (p2pd_pb2.py)")
    spec = importlib.util.spec_from_file_location("swarmnode_p2pd_pb2", path)
    if spec is None or spec.loader is None:
        raise NetworkError(f"{path} cannot be loaded", hint=how_to_install("pipeline"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find(relative: str, what: str) -> Path:
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise NetworkError(f"{what} is missing: hivemind is not installed", hint=how_to_install("pipeline"))
    path = Path(spec.origin).parent / relative
    if not path.is_file():
        raise NetworkError(f"{what} is missing: {path} does not exist", hint=how_to_install("pipeline"))
    return path
