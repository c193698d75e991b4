"""A bootstrap node: the steady address through which others find their swarm. No model, no tasks, no torch.

cli seed -> [run_seed] -> SeedNode -> host, discovery, the swarm's rollout topics, bodies of connected authors

It is on the topics of rollouts, requests for help and receipts because GossipSub forwards only what a node
is subscribed to: members that so far know nobody but the seed hear each other through it. Members behind
routers cannot be dialled, but they have dialled the seed: it fetches the bodies that others ask for over
those connections and hands them on (exchange/bodies/holder.py), within its limits of memory and upload.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Self

from swarmnode.errors import NetworkError, Rejected, plain_error
from swarmnode.exchange.bodies.body_transfer import BodyTransfer
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.header_gossip import HeaderGossip, receipts_topic_of, topic_of
from swarmnode.exchange.gossip.helping import help_topic_of
from swarmnode.exchange.limits import TOTAL_HEADERS_BURST, TOTAL_HEADERS_PER_S
from swarmnode.exchange.peers.connection_gate import ConnectionGate
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.exchange.peers.reputation import Reputation
from swarmnode.exchange.peers.swarm_health import SwarmHealth
from swarmnode.exchange.validation.header_check import open_header
from swarmnode.machine.ports import check_status_port, choose_port
from swarmnode.machine.storage import Paths
from swarmnode.network.finding.discovery import Discovery
from swarmnode.network.host import Host, Message
from swarmnode.network.multiaddr import scope_of
from swarmnode.node.building.assemble import ANYWHERE, build_discovery, build_host, check_network
from swarmnode.node.building.node_process import remove_running
from swarmnode.node.building.policies import Seat
from swarmnode.node.building.run import forget_earlier_runs, leave_note, take_identity
from swarmnode.node.run_control import RunControl
from swarmnode.node.showing.board import StatusBoard
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import NodeStatus, Sharing, invitation, joins_from, swarm_of
from swarmnode.node.showing.page import open_page
from swarmnode.node.showing.screen import LOG_FILE, Screen
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.node.workers import supervise
from swarmnode.settings.config import Config, NetworkConfig
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

SEED_PORT = 4001
"""Port of a seed unless told otherwise: an address that others write down must not change."""

LOOK_EVERY_S = 0.5
RETRY_S = 1.0
"""Pause before we subscribe again on a host that was down when we started."""


class SeedNode:
    """A member that only connects others. `async with SeedNode(...) as seed: await seed.run()`."""

    def __init__(self, config: Config, host: Host, discovery: Discovery, *, peer_id: str, name: str) -> None:
        settings = ExchangeSettings(
            swarm=config.swarm.name,
            upload_bytes_per_s=config.exchange.upload_mb_per_s * 1e6,
        )
        self._host = host
        self._discovery = discovery
        self._settings = settings
        swarm = config.swarm.name
        beside = {help_topic_of(swarm): self._count, receipts_topic_of(swarm): self._count}
        self._headers = HeaderGossip(host, {topic_of(swarm): self._hear, **beside})
        self._gate = ConnectionGate(host)
        self._ledger = Ledger(Reputation(), time.time, on_ban=self._gate.bar)
        self._bodies = BodyTransfer(host, settings, self._ledger, clock=time.time, rng=random.Random())
        self._health = SwarmHealth(swarm, time.time)
        self._pace = TokenBucket(TOTAL_HEADERS_PER_S, TOTAL_HEADERS_BURST)
        """Headers that are looked into; all are passed on."""
        self._stop = asyncio.Event()
        self._stack = AsyncExitStack()
        self._board = StatusBoard(config, peer_id=peer_id, name=name, model="none", learns=False)

    @property
    def status(self) -> NodeStatus:
        return self._board.status

    def request_stop(self) -> None:
        self._stop.set()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host)
            await self._reach_host()
            await self._board.look_at(self._host, self._discovery.reach)
            self._stack = stack.pop_all()
        self._board.enter("connecting others")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Connect others until asked to stop."""
        services = {
            "screen and peers": self._keep_looking,
            "discovery": self._discovery.run,
            "relay": self._relay,
            "bodies": self._bodies.run,
            "keep banned peers out": self._gate.run,
        }
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supervise(name, service)) for name, service in services.items()]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
        self._board.enter("stopped", "stopped on request")

    async def _relay(self) -> None:
        while not await self._reach_host():  # noqa: ASYNC110  a Host has no event to wait for
            await asyncio.sleep(RETRY_S)
        await self._headers.run()

    async def _reach_host(self) -> bool:
        """Subscribe and serve; False when the host is down. It keeps both through a restart."""
        try:
            await self._bodies.serve()
            await self._headers.subscribe()
        except NetworkError as error:
            logger.info("not connecting others yet: %s", error)
            return False
        return True

    def _hear(self, message: Message) -> None:
        self._count(message)
        self._bodies.holder.note_announcement(message)
        if self._pace.take(now=time.time()):
            with suppress(Rejected):
                author, header = open_header(message.data)
                if author == message.sender:
                    self._health.note_header(author, header)

    def _count(self, message: Message) -> None:
        self._ledger.headers_seen += 1
        self._ledger.bytes_in += len(message.data)

    def _sharing(self) -> Sharing:
        ledger = self._ledger
        return Sharing(
            headers=ledger.headers_seen,
            served=ledger.served,
            pulled=self._bodies.holder.pulled,
            bytes_in=ledger.bytes_in,
            bytes_out=ledger.bytes_out,
            upload_mb_per_s=self._settings.upload_bytes_per_s / 1e6,
            dropped=dict(ledger.dropped),
            banned_peers=len(ledger.reputation.banned_peers(time.time())),
        )

    async def _keep_looking(self) -> None:
        while True:
            await self._board.look_at(self._host, self._discovery.reach)
            health = self._health.figures((), lambda peer: self._bodies.routes.reaches(peer, time.time()))
            self._board.show(exchange=self._sharing(), health=health)
            await asyncio.sleep(LOOK_EVERY_S)


def run_seed(config: Config, paths: Paths, tell: Callable[[str], None]) -> None:
    """Run until stopped (SIGINT, SIGTERM). `tell` is given the address that others join with, once."""
    with ExitStack() as stack:
        stack.enter_context(Screen(paths.logs / LOG_FILE))
        check_network(config.network)
        check_status_port(config.node)
        key = take_identity(stack, paths)
        forget_earlier_runs(paths)
        logger.info("this seed is %s, peer id %s", key.name, key.peer_id)
        asyncio.run(_serve(Seat(0, config, paths, key, 0, {}), tell))


def seed_network(network: NetworkConfig) -> NetworkConfig:
    """The network's settings with a port that does not change from start to start, and as a relay.

    >>> seed_network(NetworkConfig()).port, seed_network(NetworkConfig(port=4100)).port
    (4001, 4100)
    """
    relays = network.relay_for_others
    if relays is None:
        relays = scope_of(f"/ip4/{network.listen}") != "machine" or network.listen == ANYWHERE
    return network.model_copy(update={"port": network.port or SEED_PORT, "relay_for_others": relays})


async def _serve(seat: Seat, tell: Callable[[str], None]) -> None:
    network = seed_network(seat.config.network)
    config, paths = seat.config.model_copy(update={"network": network}), seat.paths
    host = build_host(config, paths, choose_port(network, paths))
    node = SeedNode(
        config, host, build_discovery(config, paths, host), peer_id=seat.key.peer_id, name=seat.key.name
    )
    try:
        async with node:
            stop = partial(asyncio.get_running_loop().call_soon_threadsafe, node.request_stop)
            control = RunControl(stop, ("stop",), stopping="stopping now")
            with open_page(NodeSource(lambda: node.status, control, config, {}, paths)) as page:
                leave_note(node.status, seat, page)
                # Before anybody is told that we are there: whoever reads the address may stop us at once.
                STOP_SIGNALS.hand_to(node.request_stop, "stopping: saying goodbye to peers")
                _announce(node.status, tell)
                await node.run()
    except BaseExceptionGroup as group:
        raise plain_error(group) from group
    finally:
        remove_running(paths.running)


def _announce(status: NodeStatus, tell: Callable[[str], None]) -> None:
    logger.info("seed of swarm %s; %s joins with:", swarm_of(status), joins_from(status))
    logger.info("  %s", invitation(status))
    for address in status.network.addresses[:1]:
        tell(address)
