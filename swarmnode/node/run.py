"""One run of a node as a process: lock, parts, signals, screen, and the last line.

cli join -> [run_node] -> assemble.py, node.py
"""

import asyncio
import logging
import os
from contextlib import ExitStack
from pathlib import Path

import msgspec

from swarmnode.config import Config
from swarmnode.errors import IdentityInUse, SwarmnodeError
from swarmnode.identity.keys import NodeKey, load_or_create
from swarmnode.identity.lock import IdentityLock
from swarmnode.models import find_model, remember_model
from swarmnode.node.assemble import (
    build_learner,
    build_network,
    check_addresses,
    check_status_port,
    choose_overlap,
    choose_port,
    load_policy,
    remember_port,
    seed_of,
)
from swarmnode.node.http import StatusServer
from swarmnode.node.monitors import JsonlMonitor, Monitors
from swarmnode.node.node import Node, Summary
from swarmnode.node.running import Running, read_running, remove_running, write_running
from swarmnode.node.screen import Screen
from swarmnode.node.signals import stop_on_signals
from swarmnode.node.status import invitation
from swarmnode.paths import Paths
from swarmnode.tasks.loader import load_tasks

log = logging.getLogger(__name__)


def run_node(config: Config, model: str, model_reason: str, paths: Paths, *, fresh: bool) -> str:
    """Run until done or stopped (SIGINT, SIGTERM); returns the last line to print: the summary as JSON."""
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(paths.logs / "node.log"))
        key = _identity(stack, paths)
        tasks = {task.name: task for task in load_tasks(config.tasks.names)}
        if model != "tiny":
            find_model(model)
        check_addresses(config.network)
        port = choose_port(config.network, paths)
        check_status_port(config.node)
        log.info("this node is %s, peer id %s", key.name, key.peer_id)
        log.info("model %s: %s", model, model_reason)
        seed = seed_of(config, key.peer_id)
        local = load_policy(config, model, paths, screen.progress, seed=seed)
        if config.policy.model == "auto":
            remember_model(paths.model_choice, model)
        if fresh and (archived := local.store.archive()):
            log.info("starting over; earlier checkpoints are kept in %s", archived)
        overlap = choose_overlap(config, local)
        learner = build_learner(config, local, tasks, author=key.peer_id, seed=seed, overlap=overlap)
        network = build_network(config, paths, key, port, tasks, local) if config.exchange.enabled else None
        monitor = Monitors([JsonlMonitor(paths.logs / "metrics.jsonl"), screen.start_monitor()])
        stack.callback(monitor.close)
        node = Node(
            config,
            learner,
            monitor,
            peer_id=key.peer_id,
            name=key.name,
            model=Path(model).name if Path(model).is_dir() else model,
            seed=seed,
            network=network,
            overlap=overlap.on,
        )
        summary = asyncio.run(_serve(node, config, paths))
    return msgspec.json.encode(summary).decode()


def _identity(stack: ExitStack, paths: Paths) -> NodeKey:
    try:
        stack.enter_context(IdentityLock(paths.identity))
    except IdentityInUse as error:
        running = read_running(paths.running)
        address = f" {running.addresses[0]}" if running and running.addresses else ""
        second = f"--home ~/swarmnode-2{address}"
        raise IdentityInUse(
            error.message,
            hint=f'give a second node its own identity: make join ARGS="{second}" or swarmnode join {second}',
        ) from None
    return load_or_create(paths.identity)


async def _serve(node: Node, config: Config, paths: Paths) -> Summary:
    try:
        async with node:
            with StatusServer(lambda: node.status, config.node.http, config.node.http_port) as server:
                _announce(node, server.port, config, paths)
                stop_on_signals(node.request_stop)
                return await node.run()
    except BaseExceptionGroup as group:
        raise _plain_error(group) from group
    finally:
        remove_running(paths.running)


def _announce(node: Node, http_port: int, config: Config, paths: Paths) -> None:
    """Leave a note for `swarmnode status`, and tell the person how others join."""
    status = node.status
    addresses = status.network.addresses
    note = Running(os.getpid(), status.peer_id, config.node.http, http_port, addresses)
    try:
        write_running(paths.running, note)
        remember_port(paths, addresses)
    except OSError as error:
        log.warning("`swarmnode status` will not find this node: cannot write %s (%s)", paths.state, error)
    if (command := invitation(status)) is not None:
        state = "joining" if config.network.seeds else "started"
        log.info("%s swarm %s; another machine joins with:", state, config.swarm.name)
        log.info("  %s", command)


def _plain_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in the group that a person can read, else the group itself."""
    found: BaseException | None = group.subgroup(SwarmnodeError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found or group
