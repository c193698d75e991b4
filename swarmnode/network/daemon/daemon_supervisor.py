"""Keeps a daemon running: watches it, restarts it with back-off, and reports its state."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.errors import HostDown, NetworkError, PortInUse, SwarmnodeError
from swarmnode.network.daemon.control_client import ControlClient, PeerAddresses
from swarmnode.network.daemon.daemon_memory import MEMORY_INTERVAL_S, DaemonMemory, resident_bytes
from swarmnode.network.daemon.daemon_process import (
    DaemonOptions,
    DaemonProcess,
    make_socket_folder,
    resolve_port,
    start_daemon,
)
from swarmnode.network.daemon.relaying import grants_what_was_asked, on_this_machine
from swarmnode.network.host import HostState, HostStatus
from swarmnode.network.skip_counters import SkipCounters

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0

PROBE_TIMEOUT_S = 2.0

MAX_MISSED_PROBES = 2
"""Missed probes in a row after which a daemon counts as frozen: noticed within 1 + 2 * 2 s. A single one may
be a stall of our own event loop."""

MAX_RESTART_DELAY_S = 30.0

STABLE_AFTER_S = 60.0
"""Seconds of life after which a daemon is restarted at once; for one that dies sooner, the delay grows each
time."""

RELIEF_TIMEOUT_S = 0.5
"""Seconds allowed for relief. A flooded daemon answers late, and grows meanwhile."""

MEMORY_RESTART_DELAY_S = 0.5
"""Seconds between two lives that both ended for their size within STABLE_AFTER_S, regardless of their
number."""

PORT_ATTEMPTS = 5
"""Most starts with newly picked ports: another process may take one before the daemon does."""

RELAY_STARTS = 12
"""Most starts as a relay. About every second start has our limits (relaying.py)."""

Hook = Callable[[ControlClient], Awaitable[None]]


def restart_delay_s(short_lives: int) -> float:
    """Returns the seconds to wait before the next start, given the number of short lives in a row.

    >>> [restart_delay_s(short_lives) for short_lives in range(5)]
    [0.0, 0.25, 0.5, 1.0, 2.0]
    """
    return 0.0 if short_lives == 0 else min(MAX_RESTART_DELAY_S, 0.25 * 2 ** min(short_lives - 1, 16))


@dataclass(frozen=True, slots=True)
class EndOfLife:
    """The reason for the end of a life."""

    reason: str
    by_memory: bool = False


class DaemonSupervisor:
    """Starts the daemon (`start`), keeps it alive (`run`), and ends it for good (`stop`)."""

    def __init__(
        self,
        options: DaemonOptions,
        *,
        skipped: SkipCounters,
        restore: Hook,
        observe: Hook,
        guard: Hook,
        relieve: Hook,
    ) -> None:
        """`restore` prepares each new life after the first; `observe` is called after each passed probe.
        `guard` is called several times a second, and `relieve` when the daemon grows: it should end the
        cause."""
        self._options = options
        self._skipped = skipped
        self._restore = restore
        self._observe = observe
        self._guard = guard
        self._relieve = relieve
        self._memory = DaemonMemory()
        self._swollen: EndOfLife | None = None
        self._status = HostStatus("starting", time.time(), 0, "")
        self._process: DaemonProcess | None = None
        self._control: ControlClient | None = None
        self._folder: Path | None = None
        self._trouble = asyncio.Event()
        self._lives = 0
        self._short_lives = 0
        self._large_lives = 0

    @property
    def control(self) -> ControlClient:
        """Returns the control client of the present life. Raises HostDown if there is none."""
        if self._control is None:
            detail = self._status.detail or "it is not running"
            raise HostDown(f"the network process is {self._status.state}: {detail}")
        return self._control

    @property
    def status(self) -> HostStatus:
        return self._status

    @property
    def folder(self) -> Path:
        """Folder of the sockets, existing from `start` to `stop`."""
        assert self._folder is not None, "the supervisor was not started"
        return self._folder

    @property
    def listen(self) -> tuple[str, ...]:
        """Addresses that every life listens on, with the picked port."""
        return self._options.listen

    @property
    def relays_for_others(self) -> bool:
        """True if the daemon is a relay with the limits that we asked for."""
        return self._options.relay_for_others and self._control is not None

    @property
    def pid(self) -> int | None:
        """Process id of the daemon. None while there is none."""
        return self._process.pid if self._process and self._control else None

    async def start(self) -> str:
        """Starts the first life and returns its peer id. Raises PortInUse, IdentityError, NetworkError."""
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
        """Watches and restarts the daemon until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_memory())
            tasks.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        while True:
            born_s = time.monotonic()
            loss = await self._until_lost()
            lost_s = time.monotonic()
            if lost_s - born_s > STABLE_AFTER_S:
                self._short_lives = self._large_lives = 0
            self._control = None
            self._tell("restarting", loss.reason)
            if loss.by_memory:
                logger.warning("%s; replacing it, training continues", loss.reason)
            else:
                logger.warning("lost the network process: %s; restarting it", loss.reason)
            self._control = await self._begin_again(loss)
            self._tell("up", f"restarted: {loss.reason}", loss)
            logger.info("the network process is back after %.1f s", time.monotonic() - lost_s)

    def check_current(self, control: ControlClient) -> None:
        """Raises HostDown if `control` belongs to a past life, whose state the new one lacks."""
        if control is not self._control:
            raise HostDown("the network process was lost in the meantime", hint="try again")

    def suspect(self, control: ControlClient) -> None:
        """Called by the holder of a stream that ended. If the stream was of the present life, that life is
        over."""
        if control is self._control:
            self._trouble.set()

    def retire(self) -> None:
        """Makes every call raise HostDown from now on. The daemon itself runs on until `stop`."""
        self._control = None
        self._tell("closed", "")

    async def stop(self) -> None:
        """Ends the daemon for good."""
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
        for _ in range(RELAY_STARTS if self._options.relay_for_others else 0):
            control = await self._start_process()
            if await self._relays_as_asked(control):
                return control
            await self._kill_process()
        if self._options.relay_for_others:
            logger.warning("not a relay for others: the network process did not accept our limits")
            self._options = replace(self._options, relay_for_others=False)
        return await self._start_process()

    async def _relays_as_asked(self, control: ControlClient) -> bool:
        where = tuple(on_this_machine(address) for address in self._options.listen)
        return await grants_what_was_asked(
            PeerAddresses((await control.identify()).peer_id, where), self.folder
        )

    async def _start_process(self) -> ControlClient:
        self._lives += 1
        self._trouble.clear()
        # A daemon that was killed leaves its socket file behind, so each life has its own.
        control_socket = self.folder / f"control-{self._lives}.sock"
        self._memory, self._swollen = DaemonMemory(), None
        self._process = await start_daemon(self._options, control_socket, on_exit=self._trouble.set)
        return ControlClient(control_socket, self._skipped)

    async def _begin_again(self, loss: EndOfLife) -> ControlClient:
        await self._kill_process()
        if loss.by_memory:
            await asyncio.sleep(MEMORY_RESTART_DELAY_S if self._large_lives else 0)
            self._large_lives += 1
        else:
            await asyncio.sleep(restart_delay_s(self._short_lives))
            self._short_lives += 1
        while True:
            try:
                control = await self._begin_life()
                await self._restore(control)
            except SwarmnodeError as error:
                self._tell("restarting", f"{loss.reason}; then: {error}")
                delay_s = restart_delay_s(self._short_lives)
                logger.warning("cannot restart the network process: %s; retrying in %.1f s", error, delay_s)
                await self._kill_process()
                await asyncio.sleep(delay_s)
                self._short_lives += 1
            else:
                return control

    async def _kill_process(self) -> None:
        if self._process is not None:
            await self._process.kill()
            self._process = None

    async def _until_lost(self) -> EndOfLife:
        missed = 0
        while missed < MAX_MISSED_PROBES:
            try:
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await self._trouble.wait()
            except TimeoutError:
                missed = 0 if await self._probe() else missed + 1
            else:
                cause = await self._cause_of_trouble()
                return self._swollen or EndOfLife(cause)
        return EndOfLife(f"it did not answer {MAX_MISSED_PROBES} health probes of {PROBE_TIMEOUT_S:g} s")

    async def _watch_memory(self) -> None:
        """Checks the size of every life, even during a probe, and ends lives that grew too large."""
        looked_at_s = float("-inf")
        while True:
            # Time that the guard took counts towards the interval.
            await asyncio.sleep(max(0.0, looked_at_s + MEMORY_INTERVAL_S - time.monotonic()))
            looked_at_s = time.monotonic()
            process = self._process
            if process is None or self._control is None:
                continue
            resident = resident_bytes(process.pid)
            verdict = "calm" if resident is None else self._memory.judge(resident)
            grown_mib = self._memory.grown_bytes / 2**20
            # Relief comes before the end, too: the peers that ended this life should not meet the next one.
            await self._ask_soon(self._guard if verdict == "calm" else self._relieve)
            if verdict == "over" and process is self._process:
                story = f"the network process grew by {grown_mib:.0f} MiB, more than honest peers need"
                self._swollen = EndOfLife(story, by_memory=True)
                await process.kill()

    async def _ask_soon(self, hook: Hook) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RELIEF_TIMEOUT_S):
                await self._call(hook)

    async def _call(self, hook: Hook) -> None:
        try:
            await hook(self.control)
        except NetworkError as error:
            logger.debug("cannot query the network process: %s", error)

    async def _probe(self) -> bool:
        try:
            await self.control.identify(timeout_s=PROBE_TIMEOUT_S)
        except NetworkError:
            return False
        await self._call(self._observe)
        return True

    async def _cause_of_trouble(self) -> str:
        assert self._process is not None
        try:
            # Streams end a moment before the exit is noticed, and the exit says more.
            async with asyncio.timeout(0.5):
                await self._process.exited.wait()
        except TimeoutError:
            return "it closed a stream that it should have kept"
        return f"it {self._process.exit_story}"

    def _tell(self, state: HostState, detail: str, survived: EndOfLife | None = None) -> None:
        """Updates the status. `survived`: the end of the life before the present one."""
        restarts, memory_restarts = self._status.restarts, self._status.memory_restarts
        if survived is not None:
            restarts += not survived.by_memory
            memory_restarts += survived.by_memory
        self._status = HostStatus(state, time.time(), restarts, detail, memory_restarts)
