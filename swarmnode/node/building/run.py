"""One run of a node as a process: locks, parts, signals, screen, and the last line.

cli join -> [run_node] -> policies.py (seats) -> members.py (what is on them) -> a NodeLoop per policy

A single policy has everything to itself. Several share process, base model, engine and training batch. A
fault in one of them (its tasks, its network, its checkpoints) ends only its own membership, and the others
continue. An error of the engine or of a common training batch ends every policy that took part in it.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress

from swarmnode.errors import IdentityInUse, ModelError, SwarmnodeError, plain_error
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.ports import check_status_port, choose_port, remember_port
from swarmnode.machine.storage import Paths
from swarmnode.models import find_model
from swarmnode.network.admission import admission_to
from swarmnode.network.finding.seed_addresses import Seeds
from swarmnode.node.building.assemble import check_network, local_peers_of, seed_of, seeds_of
from swarmnode.node.building.guards import open_guards
from swarmnode.node.building.machine_memory import check_loadable, plan_for
from swarmnode.node.building.node_process import (
    IdentityLock,
    RunningNode,
    remove_running,
    write_running,
)
from swarmnode.node.building.page_client import status_here
from swarmnode.node.building.policies import PolicyNode, Seat, check_policies, config_of, local_address
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.node.node import NodeLoop
from swarmnode.node.showing.board import Watcher, policy_label
from swarmnode.node.showing.ending import Ending, ending
from swarmnode.node.showing.kept_rollouts import FILE
from swarmnode.node.showing.monitors import Monitor, make_monitors
from swarmnode.node.showing.node_source import NodeSource
from swarmnode.node.showing.node_status import NodeStatus, Summary, invitation, joins_from, swarm_of
from swarmnode.node.showing.page import Page, open_page
from swarmnode.node.showing.screen import LOG_FILE, Screen
from swarmnode.node.showing.used_settings import keep_settings
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.registry import Kind, first
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.task import Task

logger = logging.getLogger(__name__)


class Company:
    """The policies of this process. They start one after another, and each dials those before it."""

    def __init__(self, members: Sequence[PolicyNode], *, takes_signals: bool = True) -> None:
        """`takes_signals`: SIGINT and SIGTERM stop the policy if it is the only one."""
        self.members = members
        self.takes_signals = takes_signals and len(members) == 1
        self.addresses: list[str] = []
        """Addresses of the policies that are running."""
        self.announced = False
        """True once the log has said how another machine joins."""
        self.left = 0
        self.starting = asyncio.Lock()
        self.leaves_garbage_alone = gc.get_freeze_count() > 0
        """True if the surrounding program has frozen garbage-collected objects; these are left alone."""

    @property
    def others_go_on(self) -> bool:
        """True if other policies go on, asked for a policy that ends and is not counted yet."""
        return self.left + 1 < len(self.members)

    def request_stop(self) -> None:
        for member in self.members:
            member.request_stop()


def run_node(settings: Settings, *, fresh: bool) -> Ending:
    """Run until done or stopped (SIGINT, SIGTERM). Returns the last line to print, the summary as JSON."""
    with prepared(settings, Screen(settings.paths.logs / LOG_FILE), fresh=fresh) as members:
        peers = [member.seat.key.peer_id for member in members]
        STOP_SIGNALS.check()
        if len(members) > 1:
            return ending(peers, asyncio.run(serve_several(members)))
        # The only policy: its error is that of the process.
        return ending(peers, [asyncio.run(serve(members[0], Company(members)))])


@contextmanager
def prepared(
    settings: Settings,
    screen: Screen,
    *,
    fresh: bool,
    tasks: Mapping[str, Task] | None = None,
    watch: Watcher | None = None,
    monitors: Sequence[Monitor] = (),
    demonstrations: Demonstrations | None = None,
) -> Generator[list[PolicyNode]]:
    """Yields the policies of a run, loaded and ready to be served, and releases what they hold at the end.

    `tasks`: used instead of those in the settings. `watch`: a watcher beside the screen. `monitors`: beside
    those in the settings. `demonstrations`: in addition to those of the tasks. Raises SwarmnodeError.
    """
    config, model = settings.config, settings.model
    with ExitStack() as stack:
        stack.enter_context(screen)
        _find_parts(config, screen)
        seats = _take_seats(stack, settings, tasks)
        # Each policy has its own. A missing package is reported before a model is loaded for nothing.
        of_seats = [[*make_monitors(config.node.monitors), *monitors] for _ in seats]
        logger.info("model %s: %s", model, settings.model_reason)
        _check_memory(config, model)
        given = demonstrations or Demonstrations()
        check_loadable(config, model)
        STOP_SIGNALS.check()
        from swarmnode.node.building.members import build_members

        STOP_SIGNALS.check()
        yield build_members(
            stack, screen, model, seats, fresh=fresh, watch=watch, monitors=of_seats, demonstrations=given
        )


def _find_parts(config: Config, screen: Screen) -> None:
    """Imports the extension parts that are needed once the model is loaded. Raises ConfigError."""
    screen.panel()
    kinds: tuple[Kind, ...] = ("rollouts", "contribution")
    for kind in (*kinds, "receipts", "reach") if config.exchange.enabled else kinds:
        first(kind)
    if config.exchange.enabled:
        local_peers_of(config.network)


def _take_seats(stack: ExitStack, settings: Settings, given: Mapping[str, Task] | None) -> list[Seat]:
    """Takes identities, tasks and ports, to find errors before a model is loaded for nothing. `given`: tasks
    that are loaded already."""
    config, paths = settings.config, settings.paths
    check_policies(config)
    seats: list[Seat] = []
    for number in range(config.node.policies):
        own, place = config_of(config, number), paths.policy(number)
        check_network(own.network)
        if own.exchange.enabled:
            admission_to(place, own.swarm.name)
        key = take_identity(stack, place)
        if number == 0:
            forget_earlier_runs(paths)
        tasks = start_tasks(stack, own.tasks, paths.home) if given is None else given
        if settings.model != "tiny":
            find_model(settings.model)
        if own.network.port:
            choose_port(own.network, place)
        check_status_port(own.node)
        seat = Seat(number, own, place, key, seed_of(own, key.peer_id), tasks, settings.origins)
        logger.info("%s is %s, peer id %s", _name_of(seat), key.name, key.peer_id)
        if config.node.policies > 1:
            logger.info("%s trains on the tasks %s", _name_of(seat), ", ".join(tasks))
        seats.append(seat)
    return seats


def forget_earlier_runs(paths: Paths) -> None:
    """Deletes the notes of earlier runs: the holder of the first identity is the only node here."""
    for place in paths.policies():
        with suppress(OSError):
            place.running.unlink(missing_ok=True)


def _check_memory(config: Config, model: str) -> None:
    planned = plan_for(config, model)
    logger.info("memory: %s", planned.describe())
    if planned.fits is False and config.limits.memory_gb is not None:
        raise ModelError(f"limits.memory_gb is too small: {planned.describe()}", hint=planned.advice)
    if planned.fits is False:
        logger.warning("%s", planned.advice)


def take_identity(stack: ExitStack, paths: Paths) -> NodeKey:
    """Locks this folder's identity until the stack is closed. Raises IdentityInUse."""
    try:
        stack.enter_context(IdentityLock(paths.identity))
    except IdentityInUse as error:
        second = f"to run a second node with its own identity: {_second_node_command(paths)}"
        raise IdentityInUse(error.message, hint=second) from None
    return load_or_create(paths.identity)


def _second_node_command(paths: Paths) -> str:
    """Returns the command for another node here to join the swarm and the pipeline of the running one."""
    status = status_here(paths)
    command = (None if status is None else invitation(status)) or "swarmnode join"
    return command.replace("swarmnode join", "swarmnode join --home ~/swarmnode-2", 1)


def _name_of(seat: Seat) -> str:
    return "this node" if seat.config.node.policies == 1 else f"policy {seat.number}"


async def serve(member: PolicyNode, company: Company) -> Summary:
    """Runs the node of one policy from start to end."""
    paths = member.seat.paths
    if company.takes_signals:
        STOP_SIGNALS.hand_to(member.request_stop)
    try:
        async with AsyncExitStack() as stack:
            async with company.starting:
                node = member.build(company.addresses)
                await stack.enter_async_context(node)
                if not company.leaves_garbage_alone:
                    _keep_what_is_loaded(stack)
                source = _source_of(node, member.seat)
                page = stack.enter_context(open_page(source))
                await open_guards(stack, source)
                node.show_page(page.address)
                _announce(node, page, member.seat, company)
                if run := node.status.run:
                    keep_settings(paths.checkpoints / run, member.seat.config, member.seat.origins)
            try:
                return await node.run()
            finally:
                # The node then waits for the current work, which may itself wait only for us.
                member.leave()
    except BaseExceptionGroup as group:
        error = plain_error(group)
        # A group of one would only repeat its error.
        raise error from (group if len(group.exceptions) > 1 else error.__cause__)
    finally:
        remove_running(paths.running)
        if member.node is None:  # The engine sleeps only if nobody has an awake part of it.
            await asyncio.to_thread(member.close_engine)


def _keep_what_is_loaded(stack: AsyncExitStack) -> None:
    """Excludes what a start creates (libraries, model, tasks) from garbage collection while the node runs:
    scanning half a million objects takes a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)


def _source_of(node: NodeLoop, seat: Seat) -> NodeSource:
    rollouts = seat.paths.checkpoints / node.status.run / FILE if node.status.run else None
    return NodeSource(lambda: node.status, node.control, seat.config, seat.origins, seat.paths, rollouts)


async def serve_several(members: Sequence[PolicyNode]) -> list[Summary | BaseException]:
    """Runs all policies to their end, even if some fail. Returns their outcomes in the order of `members`."""
    company = Company(members)
    STOP_SIGNALS.hand_to(company.request_stop)
    served = (_serve_beside_others(member, company) for member in members)
    return list(await asyncio.gather(*served, return_exceptions=True))


async def _serve_beside_others(member: PolicyNode, company: Company) -> Summary:
    policy_label.set(f"policy {member.seat.number}: ")
    try:
        return await serve(member, company)
    except Exception as error:
        rest = "; the other policies continue" if company.others_go_on else ""
        if isinstance(error, SwarmnodeError):
            logger.error("stopped: %s%s", error, rest)
        else:
            logger.exception("stopped by an internal error%s", rest)
        raise
    finally:
        company.left += 1
        member.leave()


def leave_note(status: NodeStatus, seat: Seat, page: Page) -> None:
    """Writes the note by which `swarmnode status` finds this node, and the port to take next time."""
    paths, addresses = seat.paths, status.network.addresses
    note = RunningNode(os.getpid(), status.peer_id, seat.config.node.http, page.port, addresses, page.token)
    try:
        write_running(paths.running, note)
        remember_port(paths, addresses)
    except OSError as error:
        logger.warning(
            "cannot write %s (%s), so `swarmnode status` will not find this node", paths.state, error
        )


def _announce(node: NodeLoop, page: Page, seat: Seat, company: Company) -> None:
    """Leaves a note for `swarmnode status`; tells people and the other policies how to reach this node."""
    status, config = node.status, seat.config
    addresses = status.network.addresses
    leave_note(status, seat, page)
    if page.address:
        logger.info("the page of this node: %s", page.address)
    if (address := local_address(seat, addresses)) is not None and addresses:
        company.addresses.append(address)
    # A node that joins one of several policies finds the others through it.
    if not company.announced and (command := invitation(status)) is not None:
        company.announced = True
        state = "joining" if seeds_of(config.network) != Seeds() else "started"
        logger.info("%s swarm %s; %s joins with:", state, swarm_of(status), joins_from(status))
        logger.info("  %s", command)
