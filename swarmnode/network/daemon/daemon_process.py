"""One life of the go-libp2p daemon: arguments, start, readiness, end.

daemon_supervisor.py -> [start_daemon] -> p2pd_launch.py -> p2pd
"""

import asyncio
import errno
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarmnode.errors import NetworkError, PortInUse, StorageError
from swarmnode.identity import key_file
from swarmnode.network.daemon.daemon_memory import GO_MEMORY_LIMIT
from swarmnode.network.daemon.hivemind_wheel import find_daemon
from swarmnode.network.multiaddr import format_address, parse_address, split_listen

START_TIMEOUT_S = 30.0
"""Seconds for a start. It takes 0.15 s on a quiet machine; a laptop that is training may need far longer."""

TERMINATE_TIMEOUT_S = 2.0
"""Seconds that the daemon may take to say goodbye to its peers before it is killed."""

MAX_SOCKET_PATH_BYTES = 103
"""The longest path of a Unix socket: 103 on macOS, 107 on Linux, plus the final zero."""

MAX_CONNECTIONS = (192, 256)
"""Low and high mark: over the second, the daemon closes idle connections down to the first. It has no other
limit."""

RELAY_BYTES = 2**30

RELAY_TIME_S = 3600

RELAY_CIRCUITS = 8

RELAY_RESERVATIONS = 32

RELAY_BUFFER_BYTES = 64 * 1024
"""Limits of a relay: bytes each way and seconds of a circuit, circuits of one peer at once, peers with a
reservation, and the buffer in bytes. The daemon's own buffer is 16 MiB for each way of each circuit."""

MAX_OUTPUT_BYTES = 4096
"""Bytes kept of the end of the daemon's output for error messages; it prints nearly nothing."""

_LAUNCHER = Path(__file__).with_name("p2pd_launch.py")

_PEER_ID = re.compile(rb"^Peer ID: (\S+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """The options that a daemon is started with, the same for all of its lives."""

    identity: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    map_port: bool = False
    """True if the daemon asks the router to forward the port (UPnP, NAT-PMP)."""
    relays: tuple[str, ...] | None = None
    """Peers that take connections for us, each an address with /p2p/. Empty: we can dial relayed addresses of
    others, and have none. None: neither."""
    relay_for_others: bool = False
    """True if the daemon takes connections for other peers."""

    def arguments(self, control_socket: Path) -> list[str]:
        """Returns the command line. Without an option the daemon neither dials, maps nor relays anything.
        `-b` is never passed: without an explicit list it would join the public IPFS network."""
        low, high = MAX_CONNECTIONS
        arguments = [
            f"-listen=/unix{control_socket}",
            f"-id={self.identity}",
            f"-hostAddrs={','.join(self.listen)}",
            f"-natPortMap={int(self.map_port)}",
            *self._relaying(),
            "-dhtServer=1",
            *("-pubsub=1", "-pubsubRouter=gossipsub", "-pubsubSign=1", "-pubsubSignStrict=1"),
            *("-connManager=1", f"-connLo={low}", f"-connHi={high}"),
        ]
        return [*arguments, f"-announceAddrs={','.join(self.announce)}"] if self.announce else arguments

    def _relaying(self) -> tuple[str, ...]:
        if self.relay_for_others:
            return (
                *("-autonat=0", "-relay=1", "-relayService=1", "-forceReachabilityPublic=1"),
                f"-relayMaxCircuits={RELAY_CIRCUITS}",
                f"-relayMaxReservations={RELAY_RESERVATIONS}",
                f"-relayBufferSize={RELAY_BUFFER_BYTES}",
                f"-relayDataLimit={RELAY_BYTES}",
                f"-relayTimeLimit={RELAY_TIME_S}s",
            )
        if self.relays is None:
            return "-autonat=0", "-relay=0", "-relayService=0"
        # The daemon punches holes only with -autonat. Without -relayDiscovery=0 it waits for four relays.
        relaying = ("-autonat=1", "-relay=1", "-relayService=0", "-relayDiscovery=0")
        if not self.relays:
            return relaying
        trusted = f"-trustedRelays={','.join(self.relays)}"
        return *relaying, "-autoRelay=1", "-forceReachabilityPrivate=1", trusted


class DaemonProcess(asyncio.SubprocessProtocol):
    """A running daemon, made by `start_daemon`. asyncio calls the methods without docstrings."""

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self.exited = asyncio.Event()
        self._on_exit = on_exit
        self.peer_id: str | None = None
        """None until the daemon is ready."""
        self._output = bytearray()
        self._news = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None

    @property
    def pid(self) -> int:
        return self._running().get_pid()

    @property
    def last_output(self) -> str:
        """Returns the end of the daemon's output, for an error message."""
        return self._output.decode(errors="replace").strip()[-400:] or "it printed nothing"

    @property
    def exit_story(self) -> str:
        """Returns how the daemon ended, in words."""
        code = self._running().get_returncode()
        if code is None:
            return "is running"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._output += data
        match = _PEER_ID.search(self._output)
        if self.peer_id is None and match:
            self.peer_id = match[1].decode()
        del self._output[:-MAX_OUTPUT_BYTES]
        self._news.set()

    def process_exited(self) -> None:
        self.exited.set()
        self._news.set()
        self._on_exit()

    async def ready(self) -> None:
        """Waits until the daemon announces itself or ends."""
        while self.peer_id is None and not self.exited.is_set():
            await self._news.wait()
            self._news.clear()

    async def stop(self) -> None:
        """Ends the daemon, politely at first."""
        if not self.exited.is_set():
            self._running().terminate()
            try:
                async with asyncio.timeout(TERMINATE_TIMEOUT_S):
                    await self.exited.wait()
            except TimeoutError:
                await self.kill()
        self._running().close()

    async def kill(self) -> None:
        """Kills the daemon. A frozen one obeys nothing else."""
        if not self.exited.is_set():
            self._running().kill()
            await self.exited.wait()
        self._running().close()

    def _running(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None
        return self._transport


async def start_daemon(
    options: DaemonOptions, control_socket: Path, on_exit: Callable[[], None]
) -> DaemonProcess:
    """Starts a daemon and waits until it is ready. `on_exit` is called at its end, whatever the cause. Raises
    PortInUse, IdentityError, NetworkError."""
    binary = find_daemon()
    key_file.load(options.identity)  # its errors say more than the daemon's
    for address in options.announce:
        parse_address(address)
    for address in options.listen:
        check_port_is_free(address)
    process = await _spawn([str(binary), *options.arguments(control_socket)], on_exit)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await process.ready()
        if process.peer_id is None:
            raise _start_error(process, options)
    except TimeoutError as error:
        await process.kill()
        raise NetworkError(f"the network process was not ready after {START_TIMEOUT_S:g} s") from error
    except BaseException:
        await process.kill()
        raise
    return process


async def _spawn(command: list[str], on_exit: Callable[[], None]) -> DaemonProcess:
    launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), GO_MEMORY_LIMIT]
    try:
        _, process = await asyncio.get_running_loop().subprocess_exec(
            lambda: DaemonProcess(on_exit),
            *launcher,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in our terminal must not reach the daemon. It has no session of its own, because Linux
            # would then give it as much of the processor as all of ours together (autogroup), and its
            # niceness would mean nothing.
            process_group=0,
        )
    except OSError as error:
        raise NetworkError(f"cannot start the network process: {error.strerror}") from error
    return process


def make_socket_folder() -> Path:
    """Returns a new private folder (0700) whose path is short enough for a Unix socket. The caller removes
    it."""
    # A pid has at most 7 digits, mkdtemp adds 8 random characters, our sockets at most 24 more.
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len("/swarmnode-1234567-") + 8 + 24 > MAX_SOCKET_PATH_BYTES:
        parent = Path("/tmp")
    _sweep_folders_of_the_dead(parent)
    try:
        return Path(tempfile.mkdtemp(prefix=f"swarmnode-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise StorageError(
            f"cannot create a folder for the network sockets in {parent}: {error.strerror}"
        ) from error


def _sweep_folders_of_the_dead(parent: Path) -> None:
    """Removes the folders that killed nodes of this user left behind."""
    for folder in parent.glob("swarmnode-*-*"):
        pid = folder.name.split("-")[1]
        with suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def check_port_is_free(address: str) -> None:
    """Raises PortInUse if another process listens there, and NetworkError if we may not.

    The daemon would not tell: it sets SO_REUSEPORT and would share the port with another node of this user.
    """
    host, transport, port = split_listen(address)
    try:
        _bind(host, transport, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} ({transport}) is taken by another process",
                hint="stop it, or listen on another port (0: any free one)",
            ) from error
        raise NetworkError(f"cannot listen on {address}: {error.strerror}") from error


def resolve_port(address: str) -> str:
    """Returns the address with a free port in place of port 0, and other addresses unchanged. We pick the
    port, not the daemon, so that all of its lives have the same one."""
    host, transport, port = split_listen(address)
    if port != 0:
        return address
    try:
        with _bind(host, transport, 0) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        raise NetworkError(f"cannot listen on {address}: {error.strerror}") from error
    family, _, *rest = parse_address(address)
    return format_address((family, (transport, str(port)), *rest))


def _bind(host: str, transport: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if transport == "tcp":
            # Connections of the previous life in TIME_WAIT do not make the port taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def _start_error(process: DaemonProcess, options: DaemonOptions) -> NetworkError:
    if "address already in use" in process.last_output:
        return PortInUse(f"a port of {', '.join(options.listen)} is taken by another process")
    return NetworkError(f"the network process {process.exit_story} while starting: {process.last_output}")
