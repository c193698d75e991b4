"""Asking whether a node runs disturbs none that starts."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.cli.status import running_nodes
from swarmnode.errors import SwarmnodeError
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import IdentityLock

NOBODY = 65534

HOLD = """
import sys
from pathlib import Path
from swarmnode.node.building.node_process import IdentityLock
with IdentityLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_node_that_starts_is_told_of_and_one_that_was_killed_is_not(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    command = [sys.executable, "-c", HOLD, str(paths.identity)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(SwarmnodeError, match=f"a node is starting: process {holder.pid} "):
            running_nodes(paths)
        holder.kill()
    with pytest.raises(SwarmnodeError, match="no node is running here"):
        running_nodes(paths)


@pytest.mark.parametrize("left", ["", "1\n", "what\n"])
def test_whoever_asks_leaves_the_lock_alone(left: str, tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    lock = IdentityLock(paths.identity).path
    lock.parent.mkdir(parents=True)
    paths.identity.touch()
    lock.write_text(left)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # Whoever takes the lock is refused.
        with pytest.raises(SwarmnodeError, match="no node is running here"):
            running_nodes(paths)
    assert lock.read_text() == left


def test_a_home_that_is_not_ours_to_look_into_is_not_taken_for_an_idle_one(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path)
    paths.state.mkdir()
    user = os.geteuid()
    paths.state.chmod(0)
    os.seteuid(user or NOBODY)  # Root reads everything.
    try:
        with pytest.raises(SwarmnodeError, match=r"permission denied .*running\.json\. run this as the user"):
            running_nodes(paths)
    finally:
        os.seteuid(user)
        paths.state.chmod(0o700)
