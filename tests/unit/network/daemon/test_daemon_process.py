"""Starting the go-libp2p daemon: what is checked, what is told when it fails, and that it dies with us."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path

import psutil
import pytest

from swarmnode.errors import IdentityError, NetworkError, PortInUse
from swarmnode.identity import key_file
from swarmnode.network.daemon.daemon_process import (
    MAX_SOCKET_PATH_BYTES,
    DaemonOptions,
    check_port_is_free,
    make_socket_folder,
    resolve_port,
    start_daemon,
)
from swarmnode.network.daemon.daemon_supervisor import MAX_RESTART_DELAY_S, restart_delay_s
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.daemon.p2pd_host import P2pdHost
from swarmnode.network.daemon.p2pd_launch import NICENESS
from swarmnode.network.multiaddr import split_listen

needs_daemon = pytest.mark.skipif(util.find_spec("hivemind") is None, reason="hivemind is not installed")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    key_file.load_or_create(tmp_path / "node.key")
    return tmp_path / "node.key"


@pytest.fixture
def damaged_key(tmp_path: Path) -> Path:
    path = tmp_path / "damaged.key"
    path.write_bytes(b"something else")
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def started(options: DaemonOptions, folder: Path) -> str:
    process = await start_daemon(options, folder / "control.sock", on_exit=lambda: None)
    try:
        assert process.peer_id is not None
        return process.peer_id
    finally:
        await process.stop()


def test_a_daemon_never_dials_maps_or_relays_by_itself(tmp_path: Path):
    options = DaemonOptions(tmp_path / "node.key", ("/ip4/0.0.0.0/tcp/4001",), ())
    arguments = options.arguments(tmp_path / "control.sock")
    assert {"-natPortMap=0", "-autonat=0", "-relay=0", "-relayService=0"} <= set(arguments)
    assert {"-pubsubSign=1", "-pubsubSignStrict=1", "-dhtServer=1"} <= set(arguments)
    assert not any(argument.split("=")[0] in ("-b", "-bootstrapPeers") for argument in arguments)
    assert not any(argument.startswith("-announceAddrs") for argument in arguments)
    asked = replace(options, map_port=True).arguments(tmp_path / "control.sock")
    assert {"-natPortMap=1", "-autonat=0", "-relay=0", "-relayService=0"} <= set(asked)


async def test_a_missing_identity_is_told_by_name(tmp_path: Path):
    options = DaemonOptions(tmp_path / "absent.key", ("/ip4/127.0.0.1/tcp/0",), ())
    with pytest.raises(IdentityError, match=r"absent\.key"):
        await started(options, tmp_path)


async def test_a_file_that_is_no_key_is_not_taken_for_one(tmp_path: Path, damaged_key: Path):
    with pytest.raises(IdentityError):
        await started(DaemonOptions(damaged_key, ("/ip4/127.0.0.1/tcp/0",), ()), tmp_path)


async def test_a_taken_port_is_named(tmp_path: Path, key: Path, taken_port: int):
    with pytest.raises(PortInUse, match=str(taken_port)):
        await started(DaemonOptions(key, (f"/ip4/127.0.0.1/tcp/{taken_port}",), ()), tmp_path)


@needs_daemon
async def test_two_nodes_cannot_share_a_port(tmp_path: Path, key: Path):
    key_file.load_or_create(tmp_path / "other.key")
    async with P2pdHost(key) as host:
        listen = (await host.addresses())[0].partition("/p2p/")[0]
        with pytest.raises(PortInUse, match=str(split_listen(listen)[2])):
            async with P2pdHost(tmp_path / "other.key", listen=(listen,)):
                pass


@pytest.mark.parametrize("listen", ["/ip4/192.0.2.7/tcp/4001", "/dns4/localhost/tcp/0", "0.0.0.0:4001"])
async def test_an_address_that_is_not_ours_to_listen_on_is_refused(key: Path, listen: str):
    with pytest.raises(NetworkError):
        async with P2pdHost(key, listen=(listen,)):
            pass


def test_port_zero_becomes_a_free_port_and_others_stay():
    host, transport, port = split_listen(resolve_port("/ip4/127.0.0.1/udp/0/quic-v1"))
    assert (host, transport) == ("127.0.0.1", "udp")
    assert port > 0
    assert resolve_port("/ip4/0.0.0.0/tcp/4001") == "/ip4/0.0.0.0/tcp/4001"


def test_a_port_with_only_past_connections_is_free():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemon does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # the closing side is left in TIME_WAIT
        with pytest.raises(PortInUse):
            check_port_is_free(f"/ip4/127.0.0.1/tcp/{port}")
    check_port_is_free(f"/ip4/127.0.0.1/tcp/{port}")


def test_the_socket_folder_is_private_and_its_path_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = make_socket_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder / "control-99999999.sock")) <= MAX_SOCKET_PATH_BYTES
    finally:
        folder.rmdir()


def test_folders_of_killed_nodes_are_swept_and_those_of_living_ones_stay(monkeypatch: pytest.MonkeyPatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f"swarmnode-{gone.pid}-aaaa", f"swarmnode-{os.getppid()}-bbbb", "swarmnode-notes", "other-1-x"]
    # Not tmp_path: its name is too long for a socket.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: short)
        for name in names:
            Path(short, name).mkdir()
        made = make_socket_folder()
        assert {path.name for path in Path(short).iterdir()} == {*names[1:], made.name}


def test_without_hivemind_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(NetworkError, match=r"hivemind is not installed\. pip install"):
        find_daemon()


@needs_daemon
async def test_a_daemon_that_fails_at_its_start_is_quoted(tmp_path: Path, key: Path):
    with pytest.raises(NetworkError, match=r"exited with code 1 .*absent/control\.sock"):
        await started(DaemonOptions(key, ("/ip4/127.0.0.1/tcp/0",), ()), tmp_path / "absent")


@needs_daemon
async def test_the_daemon_has_the_identity_of_the_key(tmp_path: Path, key: Path):
    peer_id = await started(DaemonOptions(key, ("/ip4/127.0.0.1/tcp/0",), ()), tmp_path)
    assert peer_id == key_file.load(key).peer_id


async def test_a_malformed_announced_address_is_refused(key: Path):
    with pytest.raises(NetworkError, match="malformed"):
        async with P2pdHost(key, announce=("node.example.org:4001",)):
            pass


@needs_daemon
async def test_announced_addresses_replace_those_we_listen_on(key: Path):
    async with P2pdHost(key, announce=("/dns4/node.example.org/tcp/4001",)) as host:
        assert await host.addresses() == (f"/dns4/node.example.org/tcp/4001/p2p/{host.peer_id}",)


@needs_daemon
async def test_nothing_is_left_after_a_host_is_closed(
    key: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    async with P2pdHost(key) as host:
        pid = host.daemon_pid
        assert pid is not None
        assert psutil.Process(pid).name() == "p2pd"
        assert os.listdir(sockets)
    assert not psutil.pid_exists(pid)
    assert os.listdir(sockets) == []


@needs_daemon
async def test_a_daemon_that_is_kept_busy_leaves_the_processor_to_the_node(key: Path):
    async with P2pdHost(key) as host:
        pid = host.daemon_pid
        assert pid is not None
        assert psutil.Process(pid).nice() == min(19, os.nice(0) + NICENESS)
        # In another session Linux would not compare their niceness; in our group Ctrl-C would end it.
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid


@needs_daemon
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
async def test_a_killed_node_takes_its_daemon_along_and_never_imported_torch(
    key: Path, tmp_path_factory: pytest.TempPathFactory
):
    node = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from swarmnode.network.daemon.p2pd_host import P2pdHost

        async def main():
            async with P2pdHost(Path(sys.argv[1])) as host:
                assert not {"torch", "hivemind"} & sys.modules.keys()
                print(host.daemon_pid, flush=True)
                await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    env = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("s"))}  # nobody is left to remove its sockets
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", node, str(key), stdout=PIPE, env=env)
    assert process.stdout is not None
    daemon = psutil.Process(int(await process.stdout.readline()))
    os.kill(process.pid, signal.SIGKILL)
    await process.communicate()
    async with asyncio.timeout(10):
        while True:
            if not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE:
                return
            await asyncio.sleep(0.02)


def test_the_first_restart_is_immediate_and_later_ones_are_capped():
    assert restart_delay_s(0) == 0.0
    assert 0 < restart_delay_s(1) < 1
    assert restart_delay_s(1_000_000) == MAX_RESTART_DELAY_S
