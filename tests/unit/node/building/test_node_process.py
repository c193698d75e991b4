import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.errors import IdentityError, IdentityInUse
from swarmnode.node.building.node_process import IdentityLock

HOLD = """
import sys, time
from pathlib import Path
from swarmnode.node.building.node_process import IdentityLock
with IdentityLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def test_a_second_process_is_told_who_holds_the_identity_and_what_to_do(tmp_path: Path):
    holder = start_holder(tmp_path / "node.key")
    try:
        with pytest.raises(IdentityInUse) as caught, IdentityLock(tmp_path / "node.key"):
            pass
        assert str(holder.pid) in caught.value.message
        assert "swarmnode join --home DIR" in caught.value.hint
    finally:
        end(holder)


def test_a_killed_process_holds_nothing(tmp_path: Path):
    end(start_holder(tmp_path / "node.key"))
    assert (tmp_path / "node.key.lock").exists()
    with IdentityLock(tmp_path / "node.key") as lock:
        assert lock.path.read_text().strip() == str(os.getpid())


def test_the_lock_is_free_again_after_the_block_even_when_it_fails(tmp_path: Path):
    with pytest.raises(RuntimeError), IdentityLock(tmp_path / "node.key"):
        raise RuntimeError
    with IdentityLock(tmp_path / "node.key"):
        pass


def test_one_process_cannot_hold_it_twice(tmp_path: Path):
    with (
        IdentityLock(tmp_path / "node.key"),
        pytest.raises(IdentityInUse, match=str(os.getpid())),
        IdentityLock(tmp_path / "node.key"),
    ):
        pass


def test_two_identities_do_not_disturb_each_other(tmp_path: Path):
    with IdentityLock(tmp_path / "a" / "node.key"), IdentityLock(tmp_path / "b" / "node.key"):
        pass


def test_a_longer_pid_of_a_former_holder_leaves_no_trace(tmp_path: Path):
    (tmp_path / "node.key.lock").write_text("1234567890123\n")
    with IdentityLock(tmp_path / "node.key") as lock:
        assert lock.path.read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made_is_an_error_with_a_hint(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(IdentityError, match="cannot open the lock"),
        IdentityLock(tmp_path / "file" / "node.key"),
    ):
        pass
