"""Keeps a daemon running: watches it, restarts it with back-off, tells the story.

P2pdHost -> [DaemonSupervisor] -> p2pd_process.py (one life), p2pd_control.py (asking it)

Lost means: it exited, it missed two health probes in a row, or it ended a stream that it should not end.
The next life has the same identity and port; `restore` then gives it back its topics and protocols before
the host counts as up.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from swarmnode.errors import HostDown, NetworkError, PortInUse, SwarmnodeError
from swarmnode.network.host import HostState, HostStatus
from swarmnode.network.p2pd_control import ControlClient
from swarmnode.network.p2pd_process import (
    DaemonOptions,
    DaemonProcess,
    make_socket_folder,
    resolve_port,
    start_daemon,
)

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0
MAX_MISSED_PROBES = 2
"""A frozen daemon is noticed within 1 + 2 * 2 s. One missed probe may be a stall of our own event loop."""

MAX_RESTART_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""A daemon that lived this long is restarted at once again; one that dies sooner waits longer each time."""

PORT_ATTEMPTS = 5
"""Another process may take the port that we picked before the daemon does."""

Hook = Callable[[ControlClient], Awaitable[None]]


def restart_delay_s(short_lives: int) -> float:
    """Seconds to wait before the next start, after so many short lives in a row.

    >>> [restart_delay_s(short_lives) for short_lives in range(5)]
    [0.0, 0.25, 0.5, 1.0, 2.0]
    """
    return 0.0 if short_lives == 0 else min(MAX_RESTART_DELAY_S, 0.25 * 2 ** min(short_lives - 1, 16))


class DaemonSupervisor:
    """`start` the daemon, then keep `run` going; `stop` ends both the daemon and the story."""

    def __init__(self, options: DaemonOptions, *, restore: Hook, observe: Hook) -> None:
        """`restore` prepares each new life after the first; `observe` is called after each passed probe."""
        self._options = options
        self._restore = restore
        self._observe = observe
        self._status = HostStatus("starting", time.time(), 0, "")
        self._process: DaemonProcess | None = None
        self._control: ControlClient | None = None
        self._folder: Path | None = None
        self._trouble = asyncio.Event()
        self._lives = 0
        self._short_lives = 0

    @property
    def control(self) -> ControlClient:
        """Of the present life. Raises HostDown when there is none."""
        if self._control is None:
            detail = self._status.detail or "it is not running"
            raise HostDown(f"the network process is {self._status.state}: {detail}")
        return self._control

    @property
    def status(self) -> HostStatus:
        return self._status

    @property
    def folder(self) -> Path:
        """Where the sockets lie, from `start` to `stop`."""
        assert self._folder is not None, "the supervisor was not started"
        return self._folder

    @property
    def pid(self) -> int | None:
        """Of the daemon. None while there is none."""
        return self._process.pid if self._process and self._control else None

    async def start(self) -> str:
        """Start the first life and return its peer id. Raises PortInUse, IdentityError, NetworkError."""
        self._folder = make_socket_folder()
        try:
            control = await self._begin_on_a_free_port()
            identity = await control.identify()
        except BaseException:
            await self.stop()
            raise
        self._control = control
        self._tell("up", "")
        return identity.peer_id

    async def run(self) -> None:
        """Watch and restart until cancelled."""
        while True:
            born_s = time.monotonic()
            reason = await self._until_lost()
            lost_s = time.monotonic()
            if lost_s - born_s > STABLE_AFTER_S:
                self._short_lives = 0
            self._control = None
            self._tell("restarting", reason)
            logger.warning("lost the network process: %s; restarting it", reason)
            self._control = await self._begin_again(reason)
            self._tell("up", f"restarted: {reason}", restarts=self._status.restarts + 1)
            logger.info("the network process is back after %.1f s", time.monotonic() - lost_s)

    def check_current(self, control: ControlClient) -> None:
        """Raise HostDown when `control` belongs to a past life, of which a new one has inherited nothing."""
        if control is not self._control:
            raise HostDown("the network process was lost meanwhile", hint="try again")

    def suspect(self, control: ControlClient) -> None:
        """Told by whoever held a stream that ended: if it was of the present life, that life is over."""
        if control is self._control:
            self._trouble.set()

    def retire(self) -> None:
        """From now on every call is HostDown. The daemon itself still runs, until `stop`."""
        self._control = None
        self._tell("closed", "")

    async def stop(self) -> None:
        """End the daemon for good."""
        self.retire()
        if self._process is not None:
            await self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _begin_on_a_free_port(self) -> ControlClient:
        wanted = self._options.listen
        attempts = 0
        while True:
            attempts += 1
            self._options = replace(self._options, listen=tuple(resolve_port(address) for address in wanted))
            try:
                return await self._begin_life()
            except PortInUse:
                if self._options.listen == wanted or attempts == PORT_ATTEMPTS:
                    raise

    async def _begin_life(self) -> ControlClient:
        self._lives += 1
        self._trouble.clear()
        # A daemon that was killed leaves its socket file behind, so each life has its own.
        control_socket = self.folder / f"control-{self._lives}.sock"
        self._process = await start_daemon(self._options, control_socket, on_exit=self._trouble.set)
        return ControlClient(control_socket)

    async def _begin_again(self, reason: str) -> ControlClient:
        while True:
            await self._bury()
            await asyncio.sleep(restart_delay_s(self._short_lives))
            self._short_lives += 1
            try:
                control = await self._begin_life()
                await self._restore(control)
            except SwarmnodeError as error:
                self._tell("restarting", f"{reason}; then: {error}")
                delay_s = restart_delay_s(self._short_lives)
                logger.warning("the network process cannot be restarted: %s; again in %.1f s", error, delay_s)
            else:
                return control

    async def _bury(self) -> None:
        if self._process is not None:
            await self._process.kill()
            self._process = None

    async def _until_lost(self) -> str:
        """Returns why the present life is over."""
        missed = 0
        while missed < MAX_MISSED_PROBES:
            try:
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await self._trouble.wait()
            except TimeoutError:
                missed = 0 if await self._probe() else missed + 1
            else:
                return await self._cause_of_trouble()
        return f"it did not answer {MAX_MISSED_PROBES} health probes of {PROBE_TIMEOUT_S:g} s"

    async def _probe(self) -> bool:
        try:
            await self.control.identify(timeout_s=PROBE_TIMEOUT_S)
        except NetworkError:
            return False
        try:
            await self._observe(self.control)
        except NetworkError as error:
            logger.debug("the network process could not be observed: %s", error)
        return True

    async def _cause_of_trouble(self) -> str:
        assert self._process is not None
        try:
            # Streams end a moment before the exit is seen, and the exit says more.
            async with asyncio.timeout(0.5):
                await self._process.exited.wait()
        except TimeoutError:
            return "it closed a stream that it should have kept"
        return f"it {self._process.exit_story}"

    def _tell(self, state: HostState, detail: str, *, restarts: int | None = None) -> None:
        restarts = self._status.restarts if restarts is None else restarts
        self._status = HostStatus(state, time.time(), restarts, detail)
