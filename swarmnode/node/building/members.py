"""Puts a node for each seat on one base model: the one place where learner, watchers and loop meet.

seats of run.py -> [build_members] -> local_policy.py (base, engine, adapters), policy_learner.py, monitors
                                   -> a PolicyNode for each, which run.py starts
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from swarmnode.exchange.gossip.neighbourhood import Neighbourhood
from swarmnode.models import remember_model
from swarmnode.node.building.assemble import build_network
from swarmnode.node.building.callers import open_callers
from swarmnode.node.building.loaded_memory import build_forward, choose_overlap
from swarmnode.node.building.local_policy import (
    LocalPolicy,
    checkpoint_store,
    cohort_of,
    load_policy,
    policies_beside,
)
from swarmnode.node.building.policies import PolicyNode, Seat
from swarmnode.node.building.task_processes import tasks_for_strangers
from swarmnode.node.learner import Learner
from swarmnode.node.node import NodeLoop
from swarmnode.node.policy_learner import PolicyLearner
from swarmnode.node.showing.board import StatusBoard, Watcher, Watchers
from swarmnode.node.showing.contribution import open_contribution
from swarmnode.node.showing.kept_rollouts import FILE, find_keeper
from swarmnode.node.showing.monitors import Monitor, MonitorFeed, run_info
from swarmnode.node.showing.screen import Screen
from swarmnode.node.stop_signals import STOP_SIGNALS
from swarmnode.registry import find_called, made
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.training.round import credit_of

logger = logging.getLogger(__name__)


def build_members(
    stack: ExitStack,
    screen: Screen,
    model: str,
    seats: Sequence[Seat],
    *,
    fresh: bool,
    watch: Watcher | None,
    monitors: Sequence[Sequence[Monitor]],
    demonstrations: Demonstrations,
) -> list[PolicyNode]:
    """Loads the base once and returns a node on it for each seat; the stack releases what they hold.
    `monitors`: those of each seat. `watch`: a further watcher beside these and the screen."""
    config, paths = seats[0].config, seats[0].paths
    make_learner: Callable[..., Learner] = find_called("learner", config.node.learner, PolicyLearner.__init__)
    loaded = load_policy(
        config, model, paths, screen.progress, seed=seats[0].seed, policies=config.node.policies
    )
    if config.policy.model == "auto":
        remember_model(paths.model_choice, model)
    policies = policies_beside(loaded, seats)
    for policy in policies:  # A node closes its own engine; for one that is never built, the stack does.
        stack.callback(policy.engine.close)
    open_callers(stack, loaded, [seat.label for seat in seats], config, paths)
    contribution = open_contribution(stack, config, paths.state)
    forward = build_forward(config, loaded)
    overlap = choose_overlap(config, loaded, forward.budget)
    cohort, neighbourhood = cohort_of(seats), Neighbourhood()
    STOP_SIGNALS.check()
    if fresh:
        _put_checkpoints_aside(seats, model, loaded)
    members: list[PolicyNode] = []
    shown_as = Path(model).name if Path(model).is_dir() else model
    watchers = [screen.start_watcher(), *([] if watch is None else [watch])]
    for seat, local, own_monitors in zip(seats, policies, monitors, strict=True):
        store = checkpoint_store(seat.config, model, seat.paths, loaded.base, seat.tasks)
        run, key, logs = store.folder.name, seat.key, seat.paths.logs
        about = run_info(
            seat.config, name=key.name, peer_id=key.peer_id, model=shown_as, folder=logs, run=run
        )
        watcher = Watchers([MonitorFeed(about, own_monitors), *watchers])
        stack.callback(watcher.close)
        tasks_of_others = tasks_for_strangers(stack, seat.tasks)
        make = partial(
            make_learner,
            seat.config,
            local.policy,
            local.engine,
            local.renderer,
            seat.tasks,
            store,
            author=key.peer_id,
            seed=seat.seed,
            overlap=overlap,
            forward=forward,
            train_jointly=None if cohort is None else partial(cohort.train, seat.label),
            tasks_of_others=tasks_of_others,
            demonstrations=demonstrations,
        )
        learner = made("learner", config.node.learner, make, Learner)
        board = StatusBoard(
            seat.config,
            peer_id=key.peer_id,
            name=key.name,
            model=shown_as,
            run=run,
            policy=seat.number,
            neighbours=[other.key.peer_id for other in seats if other is not seat],
        )
        loop = partial(
            NodeLoop,
            learner=learner,
            board=board,
            watcher=watcher,
            seed=seat.seed,
            overlap=overlap.on,
            contribution=contribution,
            keep_rollouts=find_keeper(
                store.folder / FILE,
                partial(credit_of, config=seat.config.training),
                seat.seed,
                local.renderer.pieces,
            ),
        )
        network = partial(build_network, tasks=tasks_of_others, local=local, neighbourhood=neighbourhood)
        leave = (lambda: None) if cohort is None else partial(cohort.leave, seat.label)
        members.append(PolicyNode(seat, loop, network, leave, local.engine.close))
    return members


def _put_checkpoints_aside(seats: Sequence[Seat], model: str, loaded: LocalPolicy) -> None:
    """Archives every run that this start could resume, of all policies that this home ever had: otherwise
    half of them would be older than the start of the others."""
    for number, place in enumerate(seats[0].paths.policies()):
        seat = seats[number % len(seats)]
        open_run = partial(checkpoint_store, seat.config, model, place, loaded.base, seat.tasks, tells=False)
        # Several runs may be of these tasks: with the first archived, a start would resume the next.
        while archived := open_run().archive():
            logger.info("starting over; earlier checkpoints were moved to %s", archived)
