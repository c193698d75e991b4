"""Builds the parts of a node that reach others from its settings: host, discovery, exchange.

config, paths -> [build_host, build_discovery, build_exchange] -> [build_network] -> NetworkParts -> run.py
                                       -> seed_node.py, run_pipeline.py
"""

import hashlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swarmnode.exchange.exchange import Exchange
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.ports import choose_port
from swarmnode.machine.storage import Paths, builtin_folder
from swarmnode.network.admission import admission_to
from swarmnode.network.finding.discovery import Discovery, LocalSearch
from swarmnode.network.finding.peer_book import PeerBook
from swarmnode.network.finding.seed_addresses import Seeds, read_seeds
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import is_relayed, parse_address, scope_of, split_peer
from swarmnode.network.streams import StreamHost, transport_of
from swarmnode.node.building.machine_memory import longest_sequence
from swarmnode.node.building.policies import Seat
from swarmnode.node.swarm_member import NetworkParts
from swarmnode.registry import first, made
from swarmnode.rollout.renderer import Renderer
from swarmnode.settings.config import Config, NetworkConfig
from swarmnode.tasks.task import Task
from swarmnode.training.rules.rules import groups_wanted, uses_library

if TYPE_CHECKING:
    from swarmnode.node.building.local_policy import LocalPolicy

ANYWHERE = "0.0.0.0"
"""The address that listens on every interface."""

LEAST_BUFFER, BUFFERED_ROUNDS = 256, 32
"""Bounds of the buffer of accepted groups for later rounds: the least size, and the rounds it must cover."""


def build_network(
    seat: Seat, tasks: Mapping[str, Task], local: "LocalPolicy", neighbourhood: Neighbourhood
) -> NetworkParts | None:
    """Returns host, exchange and discovery, not yet started, or None if nothing is shared. `neighbourhood`:
    the one that the policies of this process share."""
    config, paths, base = seat.config, seat.paths, local.base
    if not config.exchange.enabled:
        return None
    host = build_host(config, paths, choose_port(config.network, paths))
    longest = longest_sequence(config, base.name, base.max_positions)
    exchange = build_exchange(
        config,
        host,
        seat.key,
        tasks,
        local.renderer,
        family=base.family,
        parameters=base.parameters,
        longest_prompt=longest - config.rollout.max_tokens,
        neighbourhood=neighbourhood,
        record=paths.exchange_record,
        library=paths.library,
    )
    return NetworkParts(host, exchange, build_discovery(config, paths, host))


def build_host(config: Config, paths: Paths, port: int) -> StreamHost:
    """Returns the unstarted host of the node, a private one if its home has the key of the swarm."""
    network = config.network
    transport = partial(
        transport_of(network.transport),
        paths.identity,
        listen=(f"/ip4/{network.listen}/tcp/{port}",),
        announce=network.announce,
        map_port=network.map_port,
        relays=relays_of(config, paths),
        relay_for_others=bool(network.relay_for_others),
    )
    host = made("transport", network.transport, transport, StreamHost)
    admission = admission_to(paths, config.swarm.name)
    return host if admission is None else admission.host(host)


def relays_of(config: Config, paths: Paths) -> tuple[str, ...] | None:
    """Returns the relays that take connections for us. Empty: none, but we dial relayed addresses. None:
    neither.

    It looks up no DNS names, since the daemon needs its relays when it starts."""
    network = config.network
    wanted = network.relays
    if network.relay_for_others or wanted == ("none",) or (wanted == ("auto",) and not config.pipeline.name):
        return None
    if wanted == ("auto",):
        public = any(scope_of(f"/ip4/{ip}") == "public" for ip in _own_ips(network))
        wanted = () if public or network.announce or network.map_port else ("seeds",)
    if wanted != ("seeds",):
        return wanted
    seeds = _all_seeds(config, paths).addresses
    return tuple(dict.fromkeys(seed for seed in seeds if not is_relayed(seed)))


def _own_ips(network: NetworkConfig) -> Iterator[str]:
    """Yields the IPv4 addresses that we listen on."""
    if network.listen != ANYWHERE:
        yield network.listen
        return
    for addresses in psutil.net_if_addrs().values():
        yield from (address.address for address in addresses if address.family == socket.AF_INET)


def build_discovery(config: Config, paths: Paths, host: Host) -> Discovery:
    """Returns the discovery that finds and keeps the peers of the swarm."""
    network, book = config.network, PeerBook.load(paths.peers)
    namespace = f"/swarmnode/1/{config.swarm.name}"
    seeds = _all_seeds(config, paths)
    return Discovery(
        host,
        book,
        seeds.addresses,
        namespace,
        names=seeds.names,
        local_peers=local_peers_of(network),
        interfaces=_interfaces(network),
        asks_router=network.map_port,
    )


def local_peers_of(network: NetworkConfig) -> LocalSearch | None:
    """Returns the search for peers on the local network. None: it is off, we listen elsewhere, or no
    installed part provides one. Raises ConfigError."""
    in_lan = network.listen == ANYWHERE or scope_of(f"/ip4/{network.listen}") == "lan"
    return first("local_peers") if network.mdns and in_lan else None


def build_exchange(
    config: Config,
    host: Host,
    key: NodeKey,
    tasks: Mapping[str, Task],
    renderer: Renderer,
    *,
    family: str,
    parameters: int,
    longest_prompt: int,
    neighbourhood: Neighbourhood | None = None,
    record: Path | None = None,
    library: Path | None = None,
) -> Exchange:
    """Returns the exchange for a policy of this family and size. `library`: the file of its library."""
    return Exchange(
        host,
        key,
        tasks=tasks,
        encode=renderer.encode_completion,
        encode_turns=renderer.encode_turns,
        prompt_ids=renderer.prompt_ids,
        settings=replace(exchange_settings(config, longest_prompt), publishers=host.may_publish),
        model_family=family,
        model_size=parameters,
        neighbourhood=neighbourhood,
        record=record,
        shelf=Shelf(library) if library is not None and uses_library(config) else None,
    )


def exchange_settings(config: Config, longest_prompt: int) -> ExchangeSettings:
    """Returns the settings of the exchange, derived from those of the node."""
    wanted, download = groups_wanted(config), config.exchange.download_mb_per_s
    return ExchangeSettings(
        swarm=config.swarm.name,
        upload_bytes_per_s=config.exchange.upload_mb_per_s * 1e6,
        download_bytes_per_s=None if download is None else download * 1e6,
        max_prompt_tokens=longest_prompt,
        max_tokens=config.rollout.max_tokens,
        buffer_groups=max(LEAST_BUFFER, BUFFERED_ROUNDS * wanted),
        prefetch_groups=wanted,
        fetch_concurrency=max(4, min(wanted, 16)),
        private=config.tasks.private,
    )


def _interfaces(network: NetworkConfig) -> tuple[str, ...]:
    """Returns the interfaces for multicast DNS. Empty: every local network."""
    return () if network.listen == ANYWHERE else (network.listen,)


def seeds_of(network: NetworkConfig) -> Seeds:
    """Returns the peers to dial first. Raises NetworkError or ConfigError for an invalid seed."""
    return read_seeds(network.seeds, builtin_folder("configs") / "seeds.txt")


def _all_seeds(config: Config, paths: Paths) -> Seeds:
    """Returns the peers to dial first, with those of an invitation to a private swarm."""
    seeds, admission = seeds_of(config.network), admission_to(paths, config.swarm.name)
    return seeds if admission is None else Seeds((*seeds.addresses, *admission.seeds), seeds.names)


def seed_of(config: Config, peer_id: str) -> int:
    """Returns the configured seed, else the node's own: strangers should not ask the same questions."""
    if config.node.seed is not None:
        return config.node.seed
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 1


def check_network(network: NetworkConfig) -> None:
    """Raises ConfigError for an unavailable transport, and NetworkError for an invalid seed, relay or
    announced address, before any work is done."""
    transport_of(network.transport)
    seeds_of(network)
    for relay in network.relays:
        if network.relays not in (("auto",), ("seeds",), ("none",)):
            split_peer(relay)
    for address in network.announce:
        parse_address(address)
