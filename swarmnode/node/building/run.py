"""One run of a node as a process: locks, parts, signals, screen, and the last line.

cli join -> [run_node] -> policies.py, assemble.py, machine_memory.py, a NodeLoop per policy

With one policy there is one of everything. Several share process, base model, engine and training batch. What
goes wrong with one alone (its tasks, its network, its checkpoints) ends its own membership, and the others go
on; an error of the engine or of a common training batch ends all who had something in it.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swarmnode.errors import IdentityInUse, SwarmnodeError
from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.identity.key_file import load_or_create
from swarmnode.identity.node_key import NodeKey
from swarmnode.machine.storage import Paths
from swarmnode.models import find_model, remember_model
from swarmnode.network.finding.seed_addresses import Seeds
from swarmnode.node.building.assemble import (
    LocalPolicy,
    build_learner,
    build_network,
    check_addresses,
    checkpoint_store,
    load_policy,
    seed_of,
    seeds_of,
    start_tasks,
    tasks_for_strangers,
)
from swarmnode.node.building.machine_memory import build_forward, choose_overlap, plan_for
from swarmnode.node.building.node_process import (
    IdentityLock,
    RunningNode,
    read_running,
    remove_running,
    stop_on_signals,
    write_running,
)
from swarmnode.node.building.policies import (
    Ending,
    Seat,
    check_policies,
    check_status_port,
    choose_port,
    cohort_of,
    config_of,
    ending,
    introduced,
    local_address,
    plain_error,
    policies_beside,
    remember_port,
)
from swarmnode.node.learner import Learner
from swarmnode.node.node import KeepCompletions, NodeLoop
from swarmnode.node.showing.board import Watcher, Watchers, policy_label
from swarmnode.node.showing.http import StatusServer
from swarmnode.node.showing.monitors import CompletionLog, Monitor, MonitorFeed, make_monitors, run_info
from swarmnode.node.showing.node_status import NodeStatus, Summary, invitation, joins_from, swarm_of
from swarmnode.node.showing.screen import Screen
from swarmnode.settings.config import Config
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.task import Task

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PolicyNode:
    """One policy's node, once it is built, and how its neighbours in this process hear that it is gone."""

    seat: Seat
    build: Callable[[Seat], NodeLoop]
    """Right before it starts: only then is it known where the others listen."""
    leave: Callable[[], None]
    stopping: bool = False
    node: NodeLoop | None = None

    def built(self, seat: Seat) -> NodeLoop:
        self.node = self.build(seat)
        if self.stopping:
            self.node.request_stop()
        return self.node

    def request_stop(self) -> None:
        self.stopping = True
        if self.node is not None:
            self.node.request_stop()


class Company:
    """The policies of this process: they start one after the other, and each dials those before it."""

    def __init__(self, members: Sequence[PolicyNode], *, takes_signals: bool = True) -> None:
        """`takes_signals`: SIGINT and SIGTERM stop the only policy, from when others can reach it."""
        self.members = members
        self.takes_signals = takes_signals and len(members) == 1
        self.addresses: list[str] = []
        """Addresses of the policies that are up."""
        self.announced = False
        """Another machine was told how to join."""
        self.left = 0
        self.starting = asyncio.Lock()

    @property
    def others_go_on(self) -> bool:
        """Whether others go on, asked by a policy that ends and has not been counted yet."""
        return self.left + 1 < len(self.members)

    def request_stop(self) -> None:
        for member in self.members:
            member.request_stop()


def run_node(config: Config, model: str, model_reason: str, paths: Paths, *, fresh: bool) -> Ending:
    """Run until done or stopped (SIGINT, SIGTERM); the summary as JSON is the last line to print."""
    screen = Screen(paths.logs / "node.log")
    with prepared(config, model, model_reason, paths, screen, fresh=fresh) as members:
        seats = [member.seat for member in members]
        if len(members) > 1:
            return ending(seats, asyncio.run(serve_several(members)))
        # The only policy: its error is the process's.
        return ending(seats, [asyncio.run(serve(members[0], Company(members)))])


@contextmanager
def prepared(
    config: Config,
    model: str,
    model_reason: str,
    paths: Paths,
    screen: Screen,
    *,
    fresh: bool,
    tasks: Mapping[str, Task] | None = None,
    watch: Watcher | None = None,
    monitors: Sequence[Monitor] = (),
    demonstrations: Demonstrations | None = None,
) -> Generator[list[PolicyNode]]:
    """The policies of a run, loaded and ready to be served; what they hold is given back at the end.

    `tasks`: instead of those that the settings name. `watch`: told beside the screen. `monitors`: beside
    those that the settings name. `demonstrations`: besides those that the tasks bring. Raises
    SwarmnodeError.
    """
    with ExitStack() as stack:
        stack.enter_context(screen)
        seats = _take_seats(stack, config, model, paths, tasks)
        # Each policy has its own: what is not installed is said before a model is loaded for nothing.
        told = [[*make_monitors(config.node.monitors), *monitors] for _ in seats]
        logger.info("model %s: %s", model, model_reason)
        _say_what_it_takes(config, model)
        shown = demonstrations or Demonstrations()
        yield _build_members(
            stack, screen, model, seats, fresh=fresh, watch=watch, monitors=told, demonstrations=shown
        )


def _take_seats(
    stack: ExitStack, config: Config, model: str, paths: Paths, given: Mapping[str, Task] | None
) -> list[Seat]:
    """Identities, tasks, ports: what can be wrong is found before a model is loaded for nothing. `given`:
    tasks that need no loading."""
    check_policies(config)
    seats: list[Seat] = []
    for number in range(config.node.policies):
        own, place = config_of(config, number), paths.policy(number)
        key = take_identity(stack, place)
        if number == 0:
            forget_earlier_runs(paths)
        tasks = start_tasks(stack, own.tasks, paths.home) if given is None else given
        if model != "tiny":
            find_model(model)
        check_addresses(own.network)
        if own.network.port:
            choose_port(own.network, place)
        check_status_port(own.node)
        seat = Seat(number, own, place, key, seed_of(own, key.peer_id), tasks)
        logger.info("%s is %s, peer id %s", _who(seat), key.name, key.peer_id)
        if config.node.policies > 1:
            logger.info("%s has the tasks %s", _who(seat), ", ".join(tasks))
        seats.append(seat)
    return seats


def forget_earlier_runs(paths: Paths) -> None:
    """Whoever has the first policy's identity is the only one here: notes that are left are of the dead."""
    for place in paths.policies():
        with suppress(OSError):
            place.running.unlink(missing_ok=True)


def _say_what_it_takes(config: Config, model: str) -> None:
    planned = plan_for(config, model)
    logger.info("memory: %s", planned.describe())
    if planned.fits is False:
        logger.warning("%s", planned.advice)


def _build_members(
    stack: ExitStack,
    screen: Screen,
    model: str,
    seats: Sequence[Seat],
    *,
    fresh: bool,
    watch: Watcher | None = None,
    monitors: Sequence[Sequence[Monitor]],
    demonstrations: Demonstrations,
) -> list[PolicyNode]:
    """Load the base once and put a node on it for each seat."""
    first = seats[0]
    config = first.config
    loaded = load_policy(
        config, model, first.paths, screen.progress, seed=first.seed, policies=config.node.policies
    )
    if config.policy.model == "auto":
        remember_model(first.paths.model_choice, model)
    policies = policies_beside(loaded, seats)
    forward = build_forward(config, loaded, first.paths)
    overlap = choose_overlap(config, loaded, forward.budget)
    cohort, neighbourhood = cohort_of(seats), Neighbourhood()
    if fresh:
        _put_checkpoints_aside(seats, model, loaded)
    members: list[PolicyNode] = []
    shown_as = Path(model).name if Path(model).is_dir() else model
    screens = screen.start_watchers(len(seats))
    for seat, local, own_screen, told in zip(seats, policies, screens, monitors, strict=True):
        local = replace(
            local, store=checkpoint_store(seat.config, model, seat.paths, loaded.base, seat.tasks)
        )
        about = run_info(
            seat.config,
            name=seat.key.name,
            peer_id=seat.key.peer_id,
            model=shown_as,
            folder=seat.paths.logs,
            run=local.store.folder.name,
        )
        own = [MonitorFeed(about, told), own_screen]
        watcher = Watchers(own if watch is None else [*own, watch])
        stack.callback(watcher.close)
        tasks_of_others = tasks_for_strangers(stack, seat.tasks)
        learner = build_learner(
            seat.config,
            local,
            seat.tasks,
            author=seat.key.peer_id,
            seed=seat.seed,
            overlap=overlap,
            forward=forward,
            train_jointly=None if cohort is None else cohort.of(seat.label),
            tasks_of_others=tasks_of_others,
        )
        learner.demonstrated = demonstrations
        build = partial(
            _build_node,
            learner=learner,
            watcher=watcher,
            local=local,
            model=shown_as,
            keep_completions=CompletionLog(
                seat.paths.logs / "completions.jsonl", learner.credit, seat.seed
            ).keep,
            overlap=overlap.on,
            neighbours=[other.key.peer_id for other in seats if other is not seat],
            neighbourhood=neighbourhood,
            tasks_of_others=tasks_of_others,
        )
        leave = (lambda: None) if cohort is None else cohort.leaving(seat.label)
        members.append(PolicyNode(seat, build, leave))
    return members


def _build_node(
    seat: Seat,
    *,
    learner: Learner,
    watcher: Watcher,
    local: LocalPolicy,
    model: str,
    overlap: bool,
    neighbours: Sequence[str],
    neighbourhood: Neighbourhood,
    tasks_of_others: Mapping[str, Task],
    keep_completions: KeepCompletions | None = None,
) -> NodeLoop:
    network = None
    if seat.config.exchange.enabled:
        port = choose_port(seat.config.network, seat.paths)
        network = build_network(
            seat.config, seat.paths, seat.key, port, tasks_of_others, local, neighbourhood
        )
    return NodeLoop(
        seat.config,
        learner,
        watcher,
        peer_id=seat.key.peer_id,
        name=seat.key.name,
        model=model,
        run=local.store.folder.name,
        seed=seat.seed,
        network=network,
        overlap=overlap,
        policy=seat.number,
        neighbours=neighbours,
        keep_completions=keep_completions,
    )


def _put_checkpoints_aside(seats: Sequence[Seat], model: str, loaded: LocalPolicy) -> None:
    """Archives every run that this start could go on with, of all policies that ever were here: half of them
    would otherwise be older than the others' start."""
    for number, place in enumerate(seats[0].paths.policies()):
        seat = seats[number % len(seats)]
        open_run = partial(checkpoint_store, seat.config, model, place, loaded.base, seat.tasks, tells=False)
        # Several may be of these tasks: once the first is aside, a start would go on with the next.
        while archived := open_run().archive():
            logger.info("starting over; earlier checkpoints are kept in %s", archived)


def take_identity(stack: ExitStack, paths: Paths) -> NodeKey:
    """Lock this folder's identity until the stack is closed. Raises IdentityInUse."""
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


def _who(seat: Seat) -> str:
    return "this node" if seat.config.node.policies == 1 else f"policy {seat.number}"


async def serve(member: PolicyNode, company: Company) -> Summary:
    """One policy's node from its start to its end."""
    settings, paths = member.seat.config.node, member.seat.paths
    try:
        async with AsyncExitStack() as stack:
            async with company.starting:
                node = member.built(introduced(member.seat, company.addresses))
                await stack.enter_async_context(node)
                page = StatusServer(lambda: node.status, settings.http, settings.http_port)
                port = stack.enter_context(page).port
                node.serves(page.address)
                _announce(node, port, member.seat, company)
            if company.takes_signals:
                stop_on_signals(member.request_stop)
            try:
                return await node.run()
            finally:
                # Before the node waits for the work in hand, which may wait for nobody but us.
                member.leave()
    except BaseExceptionGroup as group:
        error = plain_error(group)
        # A group of one says the same once more.
        raise error from (group if len(group.exceptions) > 1 else error.__cause__)
    finally:
        remove_running(paths.running)


async def serve_several(members: Sequence[PolicyNode]) -> list[Summary | BaseException]:
    """All to their end, whatever becomes of the others. In the order of `members`."""
    company = Company(members)
    stop_on_signals(company.request_stop)
    served = (_serve_beside_others(member, company) for member in members)
    return list(await asyncio.gather(*served, return_exceptions=True))


async def _serve_beside_others(member: PolicyNode, company: Company) -> Summary:
    policy_label.set(f"policy {member.seat.number}: ")
    try:
        return await serve(member, company)
    except Exception as error:
        rest = "; the other policies go on" if company.others_go_on else ""
        if isinstance(error, SwarmnodeError):
            logger.error("ended: %s%s", error, rest)
        else:
            logger.exception("ended by a defect of ours%s", rest)
        raise
    finally:
        company.left += 1
        member.leave()


def leave_note(status: NodeStatus, seat: Seat, http_port: int) -> None:
    """How `swarmnode status` finds this node, and which port it takes the next time."""
    paths, addresses = seat.paths, status.network.addresses
    note = RunningNode(os.getpid(), status.peer_id, seat.config.node.http, http_port, addresses)
    try:
        write_running(paths.running, note)
        remember_port(paths, addresses)
    except OSError as error:
        logger.warning("`swarmnode status` will not find this node: cannot write %s (%s)", paths.state, error)


def _announce(node: NodeLoop, http_port: int, seat: Seat, company: Company) -> None:
    """Leave a note for `swarmnode status`, and tell the person and the other policies how to reach it."""
    status, config = node.status, seat.config
    addresses = status.network.addresses
    leave_note(status, seat, http_port)
    if (address := local_address(seat, addresses)) is not None and addresses:
        company.addresses.append(address)
    # Whoever has joined one of several policies finds the others through it.
    if not company.announced and (command := invitation(status)) is not None:
        company.announced = True
        state = "joining" if seeds_of(config.network) != Seeds() else "started"
        logger.info("%s swarm %s; %s joins with:", state, swarm_of(status), joins_from(status))
        logger.info("  %s", command)
